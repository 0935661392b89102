"""Container `npz`: the leaves of a tree in a NumPy archive, each under its keys, joined by slashes.

It reads them; statekit writes none. Input: a file, as `numpy.savez` or `numpy.savez_compressed` writes it:

    params/dense/kernel.npy   opt/0/0.npy   opt/0/1/dense/kernel.npy      big_vision: fields of states are numbers
    params/dense/kernel.npy   opt_state/0/mu/dense/kernel.npy             other programs have their names
    ['params']['dense']['kernel'].npy   ['opt_state'][0].mu['dense'].npy   keystr of jax.tree_util

Output: the tree, the numbered fields of states under their names. States that hold nothing have no leaves, and are
left out. What isn't an array of numbers is told and not read.
Source: google-research/big_vision big_vision/utils.py, `save_checkpoint`, `tree_flatten_with_names`; NumPy
numpy/lib/_npyio_impl.py, `savez`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

from statekit.budget import Budget
from statekit.conversion.contracts import Evidence, ReadOnly
from statekit.converters.containers.step_folders import check_step
from statekit.converters.formats.flat_names import placed
from statekit.converters.formats.named_tuples import numbered_fields
from statekit.converters.formats.npy import ANY_DTYPE, is_npz, npz_arrays
from statekit.errors import StatekitError, UnknownFormatError
from statekit.files.checkpoint import EMPTY_LEFT_OUT, SEQUENCES_AS_MAPS, Checkpoint, Finding
from statekit.files.source import first_bytes, opening
from statekit.files.tree import Place
from statekit.tensors.tensor import Shape, Tensor
from statekit.tensors.tree import Path as Keys
from statekit.tensors.tree import Record, Tree, nested, walk

_OF_MXNET = ".params"
_UNNAMED = re.compile(r"arr_\d+")


@dataclass(frozen=True)
class Npz(ReadOnly):
    """NumPy archives of a tree's leaves."""

    name: str = "npz"
    title: str = "NumPy's npz: the leaves of a tree by their keys, as big_vision saves them"

    def detect(self, path: Place) -> Evidence | None:
        try:
            fits = not path.is_dir() and path.suffix != _OF_MXNET and is_npz(first_bytes(path, 512))
        except (OSError, StatekitError):
            return None
        return Evidence(10, "it is a zip archive of .npy files") if fits else None

    def open(self, path: Place, step: int | None = None, budget: Budget | None = None) -> Checkpoint:
        """Reads the archive's directory and the headers of its arrays."""
        check_step(step, None, path)
        with opening(path, budget) as files:
            source = files.source(path)
            arrays = npz_arrays(source, ANY_DTYPE, deflated=True)
            _check_named(arrays, source.place)
            tree = nested(placed(arrays, source.place))
            meta = {"generation": "npz", SEQUENCES_AS_MAPS: True, EMPTY_LEFT_OUT: True}
            checkpoint = Checkpoint(self.name, path, _with_fields(tree), meta, None, on_close=files.close)
            return replace(checkpoint, findings=tuple(_unread(arrays)))


def _with_fields(tree: Tree) -> Tree:
    """Returns a tree in which states whose fields are numbered have their names."""
    if not isinstance(tree, Mapping):
        return tree
    names = _field_names(tree)
    named = {}
    for key, child in tree.items():  # a loop: a comprehension costs a second stack frame for each level
        named[names.get(key, key)] = child if names else _with_fields(child)
    return named


def _field_names(node: Mapping[Any, Tree]) -> Mapping[Any, str]:
    """Returns the names of a NamedTuple's numbered fields; none if it isn't one that its parts tell.

    A count and two trees like one another are Adam's; a count and three are AMSGrad's where all shapes are equal, and
    Adafactor's otherwise. A count alone is a schedule's.
    """
    if not node or [*node] != [str(i) for i in range(len(node))]:
        return {}
    first, *trees = node.values()
    is_count = isinstance(first, Tensor) and first.shape == () and first.dtype.kind in "iu"
    alike = _are_alike(trees) if is_count else None
    return {} if alike is None else dict(zip(node, numbered_fields(len(trees), alike), strict=False))


def _are_alike(trees: Sequence[Tree]) -> bool | None:
    """Tells whether trees have equal shapes; None if they have leaves in different places.

    It ends at the first difference: chains in chains would be walked once for each that they lie in.
    """
    alike = True
    for tensors in zip_longest(*map(_shapes, trees)):
        if None in tensors or len({path for path, _ in tensors}) != 1:
            return None
        alike &= len({shape for _, shape in tensors}) == 1
    return alike if all(any(_shapes(tree)) for tree in trees) else None


def _shapes(tree: Tree) -> Iterator[tuple[Keys, Shape]]:
    """Yields the shapes of the tensors below a node; none of a tensor itself."""
    return ((path, leaf.shape) for path, leaf in walk(tree) if path and isinstance(leaf, Tensor))


def _check_named(arrays: Mapping[str, Any], place: str) -> None:
    """Refuses an archive whose arrays have no names."""
    if arrays and all(map(_UNNAMED.fullmatch, arrays)):
        raise UnknownFormatError(
            "The arrays of an npz have no names.",
            place=place,
            expected="a name for each leaf, its keys joined by /",
            found=f"{len(arrays)} arrays, {', '.join(list(arrays)[:2])}, ...",
            remedy="which leaf each is stands in the program alone: load them there, and save the tree by names, "
            "numpy.savez(file, **{name: leaf})",
        )


def _unread(arrays: Mapping[str, Any]) -> Iterator[Finding]:
    """Yields the arrays that hold no numbers."""
    for name, leaf in arrays.items():
        if isinstance(leaf, Record):
            yield Finding(f"an array of {leaf.args[0]} isn't read: it holds no numbers", name)


CONTAINER = Npz()
