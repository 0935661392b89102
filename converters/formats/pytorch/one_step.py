"""Files that ranks write of one save: counts and options, which each rank has whole, are the same in all of them.

Input: what each rank holds, with the place of its file. Output: nothing where all ranks are of one step, or the names
of numbers that each rank has for itself; an error where a rank is of another step.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from statekit.converters.formats.storage import stored_crc
from statekit.errors import CorruptError, some
from statekit.tensors.tensor import Tensor, same_values
from statekit.tensors.tree import Path, Tree, walk

OfRanks: TypeAlias = Sequence[tuple[object, Mapping[Any, Any]]]
"""Each rank's file: its place and its contents."""
MIXED = "put the files of one save into a folder of their own"
"""What to do about ranks of several steps."""
_COUNTS = frozenset({"step", "steps"})
"""What optimizers of PyTorch call their count of updates, which may be a floating-point number."""
_OF_EACH = re.compile(r"(?:^|_)(rng|random|rank|sampler|data_?loader|dataset|workers?)(?:_|$)", re.IGNORECASE)
"""In the keys of what each rank has for itself."""
_MOST = 4096
"""Elements of an option whose values are compared; a larger one is a forgery, and its shape alone is."""


def check_one_step(of_ranks: OfRanks) -> None:
    """Refuses ranks that don't hold the same as the first.

    Args:
        of_ranks: What each rank has whole, such as counts, options, a schedule.

    Raises:
        CorruptError: A rank holds something else.
    """
    for place, of_rank in of_ranks[1:]:
        first, of_first = of_ranks[0]
        if paths := unlike(of_first, of_rank):
            path, *more = paths
            others = f"; {some([*map(named_by, more)])} too" if more else ""
            raise CorruptError(
                "The files of ranks aren't of one step of one run.",
                place=place,
                expected=f"{named_by(path)} {_shown(of_first, path)}, as in {first}",
                found=f"{named_by(path)} {_shown(of_rank, path)}{others}",
                remedy=MIXED,
            )


def check_slots(of_ranks: OfRanks) -> list[str]:
    """Refuses ranks whose slots of one vector have other names than the first's, or other counts.

    Returns:
        Names of other numbers that aren't the same: an optimizer may measure the piece that a rank has.

    Raises:
        CorruptError: A rank is of another step.
    """
    check_one_step([(place, dict.fromkeys(slots, "a slot")) for place, slots in of_ranks])
    numbers = [{key: slot for key, slot in slots.items() if not _is_array(slot)} for _, slots in of_ranks]
    counts = dict.fromkeys(
        key for of_rank in numbers for key, slot in of_rank.items() if _is_count(key, slot)
    )
    check_one_step([(place, {key: slots[key] for key in counts}) for place, slots in of_ranks])
    return [*dict.fromkeys(named_by(path) for of_rank in numbers[1:] for path in unlike(numbers[0], of_rank))]


def options(group: Mapping[str, Any]) -> dict[str, Tree]:
    """Returns the options of a group: each rank may number its parameters otherwise."""
    return {key: value for key, value in group.items() if key != "params"}


def unlike(first: Tree, other: Tree) -> list[Path]:
    """Returns the paths of leaves that two trees don't both have, or in which they differ."""
    left, right = dict(walk(first)), dict(walk(other))
    return [
        path
        for path in {**left, **right}
        if path not in left or path not in right or not _is_same(left[path], right[path])
    ]


def is_of_each(key: object) -> bool:
    """Tells whether a key is that of what each rank has for itself, such as its generators."""
    return isinstance(key, str) and _OF_EACH.search(key) is not None


def are_unlike(tensors: Sequence[Tensor]) -> bool:
    """Tells whether tensors of one shape surely differ, by the checksums in the directories of their files."""
    crcs = {stored_crc(tensor) for tensor in tensors}
    return None not in crcs and len(crcs) > 1


def are_replicas(first: Tree, other: Tree) -> bool:
    """Tells whether two ranks surely hold the same, by checksums; what each has for itself isn't compared."""
    left, right = (
        {path: leaf for path, leaf in walk(tree) if not any(map(is_of_each, path))} for tree in (first, other)
    )
    return left.keys() == right.keys() and all(_is_replica(left[path], right[path]) for path in left)


def _is_replica(left: Tree, right: Tree) -> bool:
    if not (isinstance(left, Tensor) and isinstance(right, Tensor)):
        return _is_same(left, right)
    crc = stored_crc(left)
    is_alike = (left.shape, left.dtype) == (right.shape, right.dtype)
    return is_alike and (stored_crc(right) == crc is not None or (crc is None and left.shape == ()))


def _is_same(left: Tree, right: Tree) -> bool:
    """Tells whether two leaves hold the same: tensors by their values, and NaN as itself."""
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        is_small = math.prod(left.shape) <= _MOST
        return (left.shape, left.dtype) == (right.shape, right.dtype) and (
            not is_small or same_values(left, right)
        )
    return bool(left == right) or repr(left) == repr(right) == "nan"


def _is_array(slot: Tree) -> bool:
    return isinstance(slot, Tensor) and slot.shape != ()


def _is_count(key: object, slot: Tree) -> bool:
    """Tells whether a number counts: by its name, or as a whole number."""
    is_whole = isinstance(slot, Tensor) and slot.dtype.kind in "iu"
    return key in _COUNTS or type(slot) is int or is_whole


def named_by(path: Path) -> str:
    """Returns the keys that lead to a leaf, for a message."""
    return "/".join(map(str, path))


def _shown(tree: Tree, path: Path) -> str:
    """Returns a leaf for a message."""
    leaf = dict(walk(tree)).get(path, "absent")
    return f"{leaf.read().item() if isinstance(leaf, Tensor) and leaf.shape == () else leaf}"[:80]
