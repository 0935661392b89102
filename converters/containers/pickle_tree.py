"""Container `pickle`: a tree of arrays that a JAX program pickled, read as data: nothing in it is run.

It reads them; statekit writes none. Input: a file of any of these, with arrays of NumPy or JAX:

    (params, opt_state)    {"params": ..., "opt_state": ...}    TrainState(step, params, opt_state)
    params, then opt_state: several pickles, one behind the other

Output: the tree; of several pickles a list. A NamedTuple's pickle has its class and its values by position; the class
tells their names, and one of the program's own is a list.
Source: jax-ml/jax jax/_src/array.py, `_reconstruct_array`;
deepmind/dm-haiku examples, `pickle.dump(params, f)`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from statekit.budget import Account, Budget
from statekit.conversion.contracts import Evidence, ReadOnly
from statekit.converters.containers.step_folders import check_step
from statekit.converters.formats.named_tuples import fields_of
from statekit.converters.formats.pickle.names import built_array
from statekit.converters.formats.pickle.reader import read_pickle
from statekit.errors import StatekitError, UnknownFormatError
from statekit.files.checkpoint import SEQUENCES_AS_MAPS, Checkpoint, Finding
from statekit.files.source import first_bytes, opening, read_small
from statekit.files.tree import Place
from statekit.tensors.tensor import Stored
from statekit.tensors.tree import Record, Tree

_SUFFIXES = (".pkl", ".pickle")
_BEGIN = b"\x80"
"""The first byte of a pickle of protocol 2 or later."""
_EMPTY: Final = ("EmptyState", "MaskedNode")


@dataclass(frozen=True)
class PickledTree(ReadOnly):
    """Pickled trees of JAX programs."""

    name: str = "pickle"
    title: str = "pickled trees of JAX programs (params, opt_state), read as data and never run"

    def detect(self, path: Place) -> Evidence | None:
        """Looks at the name and the first bytes."""
        try:
            fits = path.suffix in _SUFFIXES and not path.is_dir() and first_bytes(path, 1) == _BEGIN
        except (OSError, StatekitError):
            return None
        return Evidence(5, "it begins as a pickle, and is called so") if fits else None

    def open(self, path: Place, step: int | None = None, budget: Budget | None = None) -> Checkpoint:
        """Reads the pickle, arrays included, as data."""
        check_step(step, None, path)
        with opening(path, budget) as files:
            data = read_small(path, files)
            values, end = _pickles(data, str(path), files.account)
            value = values[0] if len(values) == 1 else values
            tree = _named(value, (), str(path))
            if not isinstance(tree, (dict, list)):
                raise UnknownFormatError(
                    "A pickle holds no tree of arrays.",
                    place=path,
                    expected="a dict, a tuple, or an object with fields",
                    found=type(value).__name__,
                )
            meta = {"generation": "pickle", SEQUENCES_AS_MAPS: True}
            unread = f"{len(data) - end} bytes behind the pickle look like no pickle: nothing reads them"
            findings = (Finding(unread, str(path)),) if end < len(data) else ()
            return Checkpoint(self.name, path, tree, meta, None, findings=findings, on_close=files.close)


def _pickles(data: bytes, place: str, account: Account) -> tuple[list[Any], int]:
    """Returns what the pickles of a file hold, and where the last one ends."""
    pickled = read_pickle(data, place, calls=_calls, account=account)
    values = [pickled.value]
    while data[pickled.end : pickled.end + 1] == _BEGIN:
        pickled = read_pickle(data, place, start=pickled.end, calls=_calls, account=account)
        values.append(pickled.value)
    return values, pickled.end


def _calls(_: Callable[[str], None]) -> Mapping[str, Callable[[tuple[Any, ...]], Any]]:
    """Returns the calls by which JAX pickles its arrays, as inert constructors.

    Source: jax-ml/jax jax/_src/array.py, `_reconstruct_array`; before 0.4, jax/_src/device_array.py,
    `reconstruct_device_array`.
    """
    return {
        "jax._src.array._reconstruct_array": _array,
        "jax._src.device_array.reconstruct_device_array": _array,
    }


def _array(args: tuple[Any, ...]) -> Any:
    """Returns an array from (what makes one of NumPy, its arguments, its state, what JAX knows of it)."""
    return built_array(args[2]) if len(args) > 2 else Record("jax.Array", args)


def _named(node: Tree, path: tuple[str, ...], place: str) -> Tree:
    """Returns a tree with maps in the place of objects and lists in that of tuples, its tensors with their names."""
    if isinstance(node, Stored):
        return replace(node, name="/".join(path), place=place)
    if isinstance(node, Record):
        node = _fields(node)
    if isinstance(node, Mapping):
        below = {}
        for key, child in node.items():  # a loop: a comprehension costs a second stack frame for each level
            below[key] = _named(child, (*path, str(key)), place)
        return below
    if isinstance(node, (list, tuple)):
        parts = []
        for index, child in enumerate(node):
            parts.append(_named(child, (*path, str(index)), place))
        return parts
    return node


def _fields(record: Record) -> Tree:
    """Returns what an object holds, by the names of its fields; the object itself where nobody knows them."""
    name = record.name.rpartition(".")[2]
    if name in _EMPTY:
        return {}
    names = fields_of(name)
    if names and len(record.args) == len(names):
        return dict(zip(names, record.args, strict=True))
    if record.state is None and any(isinstance(part, Mapping) for part in record.args):
        return list(record.args)  # a NamedTuple of the program's own, whose fields only that knows
    if not record.args and isinstance(record.state, Mapping):
        return {
            key: part
            for key, part in record.state.items()  # without functions that a pickle names, which hold nothing
            if not isinstance(part, Record) or part.args or part.state is not None
        }
    return record


CONTAINER = PickledTree()
