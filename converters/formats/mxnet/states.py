"""The `.states` files of MXNet: pickles of an updater's states, alone or beside the optimizer; nothing in them runs.

Each NDArray in them is an object made from None, whose state holds one record (`records`) as a bytearray. Its
values are read from the file when asked for.
Source: apache/mxnet, python/mxnet/optimizer/updater.py, `Updater.get_states`; python/mxnet/ndarray/ndarray.py,
`NDArray.__reduce__`, `NDArray.__getstate__`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, BinaryIO

from statekit.converters.formats.mxnet.records import CPU, read_record, record_header
from statekit.converters.formats.pickle.extents import read_thin_pickle
from statekit.converters.formats.pickle.names import CALLS, Call, kept, shown
from statekit.converters.formats.pickle.writer import Called, LongBytes, Name, write_pickle
from statekit.errors import CorruptError, FormatError
from statekit.files.source import Held, Part, Source, bring_scattered
from statekit.files.stage import Stage
from statekit.tensors.tensor import Tensor, nbytes
from statekit.tensors.tree import Path, Record, Tree

ARRAYS = ("mxnet.ndarray.ndarray.NDArray", "mxnet.numpy.ndarray")
"""Classes of arrays; optimizers' states are of the first, in numpy mode too."""
BYTES = "builtins.bytearray"
_NDARRAY, _BYTEARRAY = Name("mxnet.ndarray.ndarray", "NDArray"), Name("builtins", "bytearray")
_NO_HANDLE = (None,)
_HANDLE = "handle"


@dataclass(frozen=True)
class States:
    """A file of states.

    Attributes:
        states: By index, or by name.
        optimizer: The optimizer, if the file holds it.
        generation: Of the arrays' records.
        device: Type and id that the arrays were saved from.
        notes: What was odd, one sentence each.
    """

    states: Mapping[Any, Tree]
    optimizer: Record | None
    generation: int
    device: tuple[int, int]
    notes: tuple[str, ...]


def read_states(source: Source) -> States:
    """Reads the pickle and the headers of its arrays.

    Raises:
        RefusedError: It calls what isn't inert, or asks for absurd memory.
        CorruptError: The file is cut off, or an array reaches beyond its bytes.
        FormatError: It isn't a pickle of states.
    """
    bring_scattered(source)
    read = read_thin_pickle(source, _calls)
    places = _Arrays(source.place)
    states, optimizer = read.value, None
    if isinstance(states, tuple) and len(states) == 2:
        states, optimizer = states
    if not isinstance(states, dict) or not isinstance(optimizer, (Record, type(None))):
        raise FormatError(
            "This isn't a pickle of an updater's states.",
            place=source.place,
            expected="a dict of states, alone or beside the optimizer",
            found=shown(read.value),
        )
    named, whole = places.tree(states, ("states",)), places.tree(optimizer, ("optimizer",))
    rest = source.size - read.end
    behind = (f"{rest} bytes stand behind the pickle",) if rest else ()
    return States(named, whole, *places.form(), (*read.notes, *behind))


def write_states(
    states: Tree, optimizer: Tree, generation: int, device: tuple[int, int], file: BinaryIO, stage: Stage
) -> None:
    """Writes a file of states as `Updater.get_states` does under Python 3.8 and newer.

    Args:
        states: By index.
        optimizer: The optimizer's Record; None to leave it out.
        generation: 3 for numpy mode, 2 for the legacy mode.
        device: Type and id of the device that arrays shall come back to.
        file: The new file.
        stage: Where tensors are streamed from.

    Raises:
        FormatError: An array that has no place in such a record.
        UsageError: Something that isn't plain data.
    """
    top: tuple[Any, ...] = ("states",) if optimizer is None else ()

    def reduce(path: Path, tensor: Tensor) -> Called:
        name = "/".join(map(str, (*top, *path) if top else (_PARTS[path[0]], *path[1:])))
        head = record_header(generation, device, tensor.shape, tensor.dtype, name)
        values = LongBytes(len(head) + nbytes(tensor), partial(_blocks, head, stage, name, tensor))
        return Called(_NDARRAY, _NO_HANDLE, {_HANDLE: Called(_BYTEARRAY, (values,))})

    write_pickle(states if optimizer is None else (states, optimizer), file, reduce)


_PARTS = ("states", "optimizer")


def _blocks(head: bytes, stage: Stage, name: str, tensor: Tensor) -> Any:
    yield head
    yield from stage.stream(name, tensor)


def _calls(note: Callable[[str], None]) -> dict[str, Call]:
    return {**{name: kept(name) for name in ARRAYS}, BYTES: _bytes}


def _bytes(args: tuple[Any, ...]) -> Any:
    return args[0] if len(args) == 1 and isinstance(args[0], Part) else CALLS[BYTES](args)


class _Arrays:
    """Puts tensors in the place of arrays; what is one object stays one."""

    def __init__(self, place: str) -> None:
        self._place = place
        self._done: dict[int, tuple[Any, Any]] = {}
        self._forms: dict[tuple[int, tuple[int, int]], None] = {}

    def form(self) -> tuple[int, tuple[int, int]]:
        """Returns generation and device of the arrays."""
        if len(self._forms) > 1:
            raise FormatError(
                "The arrays of a file were saved from several devices or by several generations of MXNet.",
                place=self._place,
                found=list(self._forms),
            )
        return next(iter(self._forms), (3, CPU))

    def tree(self, node: Any, path: Path) -> Any:
        """Returns a part of the tree; one call per level, which the reader has limited."""
        if not isinstance(node, (dict, list, tuple, Record)):
            if isinstance(node, Part):
                raise FormatError(
                    "Bytes stand where no array is.", place=self._place, found="/".join(map(str, path))
                )
            return node
        if id(node) not in self._done:
            self._done[id(node)] = (node, self._made(node, path))
        return self._done[id(node)][1]

    def _made(self, node: Any, path: Path) -> Any:
        if isinstance(node, dict):
            return {key: self.tree(value, (*path, key)) for key, value in node.items()}
        if isinstance(node, (list, tuple)):
            items = [self.tree(value, (*path, i)) for i, value in enumerate(node)]
            return items if isinstance(node, list) else tuple(items)
        if node.name in ARRAYS and isinstance(node.state, dict) and _HANDLE in node.state:
            return self._array(node.state[_HANDLE], path)
        args, state = self.tree(node.args, (*path, "args")), self.tree(node.state, (*path, "state"))
        return Record(node.name, args, state)

    def _array(self, handle: Any, path: Path) -> Any:
        name = "/".join(map(str, path))
        if handle is None:
            return None
        if isinstance(handle, bytes):
            handle = Held(handle, self._place)
        if not isinstance(handle, (Held, Part)):
            raise FormatError(
                "An array isn't made of bytes.", place=f"{name} in {self._place}", found=shown(handle)
            )
        record = read_record(handle, 0, name)
        if record.end != handle.size:
            raise CorruptError(
                "An array has another size than its header says.",
                place=f"{name} in {self._place}",
                expected=f"{record.end} bytes",
                found=f"{handle.size} bytes",
            )
        if record.tensor is None:
            return None
        self._forms[record.generation, record.device] = None
        return replace(record.tensor, name=name)
