"""Tensors that ranks share, as `torch.save` pickles them: each rank's part of a DTensor says which part it is.

FSDP2 and tensor parallelism save such parts where a program pickles its own state_dict() on each rank. A part has the
shape of the whole, the rank's place in the mesh of devices, and for each axis of the mesh how it cuts the tensor:

    Shard(dim)            into pieces of equal size, rounded up; the last ones are smaller or empty
    _StridedShard(dim)    as Shard, behind the other cuts of this dimension
    Replicate()           not at all: each rank has the same

FSDP1's ShardedTensors say it in their own way (sharded_tensors.py).

Input: what the ranks' files hold, as inert records. Output: one tree of whole tensors over the ranks' files.

Source: pytorch/pytorch torch/distributed/tensor/placement_types.py, `Shard` and `_StridedShard`;
torch/distributed/tensor/_utils.py, `compute_local_shape_and_global_offset`; torch/distributed/device_mesh.py.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from statekit.converters.formats.pytorch.one_step import MIXED, are_unlike, is_of_each
from statekit.converters.formats.pytorch.sharded_tensors import (
    attributes,
    counts_of,
    is_sharded,
    is_sharded_class,
    joined_pieces,
    pieces_of,
    row_of,
)
from statekit.errors import CorruptError, FormatError, RefusedError
from statekit.files.tree import Place
from statekit.tensors.boxes import Agreed, Box, Joined, tiling_fault
from statekit.tensors.tensor import Shape, Tensor
from statekit.tensors.tree import Path as Keys
from statekit.tensors.tree import Record, Tree, record_names, walk

_CLASS = re.compile(r"torch\.distributed\.(_tensor|tensor)\.(_?api\.)?DTensor")
_CUTS = ("Shard", "_StridedShard")
_SHAPE = 3
"""Argument of `_rebuild_wrapper_subclass` that is the shape of the whole, behind function, class and dtype."""
_WHOLE = (
    "name the folder, where the files of all ranks are called <name>_rank_<r>.pt or rank_<r>.pt; or save the run with "
    "torch.distributed.checkpoint, or whole with get_state_dict(..., options=StateDictOptions(full_state_dict=True))"
)
_UNLIKE = (
    f"{MIXED}; name one rank's file to take what that rank has; where each has a part of its own (tensor or pipeline "
    "parallel), save the run with torch.distributed.checkpoint"
)
_FLAT = (
    "load it in the program that wrote it, and save FSDP.optim_state_dict(model, optimizer) with "
    "torch.distributed.checkpoint; under FSDP2 (verl: strategy=fsdp2) each rank's files tell enough. The weights alone "
    "are read where the model's files lie in a folder of their own"
)


@dataclass(frozen=True)
class Part:
    """One rank's part of a tensor.

    Attributes:
        tensor: Its values.
        shape: The shape of the whole.
        cuts: For each axis of the mesh the dimension that it cuts; None where it cuts none.
        order: Axes of the mesh in the order in which they cut.
        at: The rank's place in the mesh.
    """

    tensor: Tensor
    shape: Shape
    cuts: tuple[int | None, ...]
    order: tuple[int, ...]
    at: tuple[int, ...]

    def box(self, mesh: Shape) -> Box:
        """Returns where the part lies in the whole.

        Args:
            mesh: Number of ranks along each axis of the mesh.
        """
        first, size = [0] * len(self.shape), list(self.shape)
        for axis in self.order:
            dim = self.cuts[axis]
            if dim is not None:
                step = -(-size[dim] // mesh[axis])
                behind = min(step * self.at[axis], size[dim])
                first[dim] += behind
                size[dim] = min(step, size[dim] - behind)
        return tuple(first), tuple(size)


def has_parts(tree: Tree) -> bool:
    """Tells whether a tree holds parts of tensors."""
    return any(_CLASS.fullmatch(name) or is_sharded_class(name) for name in record_names(tree))


def alone(tree: Tree, place: Place) -> Tree:
    """Returns the tree of one rank's file with the parts that are whole tensors as such.

    Raises:
        RefusedError: The file has less than a whole tensor.
        FormatError: A part isn't described as such.
    """
    if isinstance(tree, dict):
        return {key: alone(node, place) for key, node in tree.items()}
    if isinstance(tree, (list, tuple)):
        nodes = [alone(node, place) for node in tree]
        return nodes if isinstance(tree, list) else tuple(nodes)
    if is_sharded(tree):
        pieces = pieces_of(tree, f"{place}")
        parts = [list(tensor.shape) for _, tensor in pieces.own]
        return pieces.alone() or _refuse_part(
            pieces.shape, f"parts of shape {parts} (a ShardedTensor)", place
        )
    if not _is_part(tree):
        return tree
    part = _part(tree, (), place)
    shown = f"a part of shape {list(part.tensor.shape)} (a DTensor)"
    return part.tensor if part.tensor.shape == part.shape else _refuse_part(part.shape, shown, place)


def _refuse_part(shape: Shape, found: str, place: Place) -> NoReturn:
    raise RefusedError(
        "The file has one rank's parts of tensors, and the others lie in other ranks' files.",
        place=place,
        expected=f"a tensor of shape {list(shape)}",
        found=found,
        remedy=_WHOLE,
    )


def joined(trees: Sequence[Tree], place: Place, path: Keys = ()) -> Tree:
    """Returns what the files of all ranks hold, parts joined to whole tensors; reading what each has compares it.

    Raises:
        CorruptError: Ranks contradict each other.
        FormatError: A part isn't described as such, or isn't where the others leave room.
        RefusedError: Ranks have different tensors that don't say which part each is.
    """
    first = trees[0]
    if isinstance(first, dict):
        return {key: _joined_under(key, nodes, place, path) for key, nodes in _by_key(trees, place, path)}
    if isinstance(first, (list, tuple)):
        nodes = [joined(nodes, place, (*path, i)) for i, nodes in _by_key(trees, place, path)]
        return nodes if isinstance(first, list) else tuple(nodes)
    if all(map(_is_part, trees)):
        return _joined_parts([_part(tree, path, place) for tree in trees], place, path)
    if all(map(is_sharded, trees)):
        where = f"{_name(path)} in {place}"
        return joined_pieces([pieces_of(tree, where) for tree in trees], where, MIXED)
    return _agreed(trees, place, path)


def _joined_under(key: Any, nodes: Sequence[Tree], place: Place, path: Keys) -> Tree:
    """Returns what the files of all ranks hold under a key; what each has for itself, by rank."""
    if is_of_each(key) and (
        any(isinstance(leaf, Tensor) for _, leaf in walk(nodes[0])) or not _are_equal(nodes)
    ):
        return {f"rank_{rank}": node for rank, node in enumerate(nodes)}
    return joined(nodes, place, (*path, key))


def _by_key(trees: Sequence[Tree], place: Place, path: Keys) -> Iterator[tuple[Any, list[Tree]]]:
    """Yields what all ranks have under each key, or at each place in a sequence."""
    maps = [dict(enumerate(tree)) if isinstance(tree, (list, tuple)) else tree for tree in trees]
    keys = [sorted(map(str, tree)) if isinstance(tree, dict) else type(tree).__name__ for tree in maps]
    if any(names != keys[0] for names in keys) or any(tree.keys() != maps[0].keys() for tree in maps):
        raise _contradiction(keys, place, path)
    yield from ((key, [tree[key] for tree in maps]) for key in maps[0])


def _agreed(trees: Sequence[Tree], place: Place, path: Keys) -> Tree:
    """Returns what every rank has whole."""
    kinds = [
        f"{tree.dtype} {list(tree.shape)}" if isinstance(tree, Tensor) else f"{tree!r:.99}" for tree in trees
    ]
    if any(kind != kinds[0] for kind in kinds) or not (isinstance(trees[0], Tensor) or _are_equal(trees)):
        raise _contradiction(kinds, place, path)
    tensors = [tree for tree in trees if isinstance(tree, Tensor)]
    if tensors and tensors[0].shape and are_unlike(tensors):
        raise RefusedError(
            "Ranks hold different values of a tensor, and nothing says which part of it each is.",
            place=f"{_name(path)} in {place}",
            expected=f"equal values on {len(trees)} ranks, or tensors that say their part (DTensor, ShardedTensor)",
            remedy=_UNLIKE,
        )
    is_shared = isinstance(trees[0], Tensor) and len(trees) > 1
    return Agreed(tuple(trees), _name(path), MIXED) if is_shared else trees[0]


def _are_equal(trees: Sequence[Tree]) -> bool:
    return all(tree == trees[0] for tree in trees)


def refuse_flat(tree: Tree, place: Place) -> None:
    """Refuses the state of an optimizer under FSDP1, whose vectors don't tell the parameters in them.

    Args:
        tree: The optimizer's state_dict() of one rank, beside a model that ranks share.
        place: The files' folder, for messages.

    Raises:
        RefusedError: It is of this kind.
    """
    state = tree.get("state") if isinstance(tree, Mapping) else None
    records = state.values() if isinstance(state, Mapping) else ()
    slots = [slot for record in records if isinstance(record, Mapping) for slot in record.values()]
    flat = [slot for slot in slots if isinstance(slot, Tensor) and slot.shape]
    if flat and not has_parts(tree):
        raise RefusedError(
            "The optimizer's state of FSDP1 is flat: its vectors hold several parameters, and no file tells which.",
            place=place,
            expected="slots that each name their part of a parameter (DTensors)",
            found=f"a vector of {math.prod(flat[0].shape)} values on the first rank",
            remedy=_FLAT,
        )


def refuse_local(tree: Tree, place: Place) -> None:
    """Refuses weights under FSDP1's LOCAL_STATE_DICT: flat vectors that don't tell the parameters in them.

    Raises:
        RefusedError: They are of this kind.
    """
    for path, _ in walk(tree):
        if any(f"{key}".rpartition(".")[2] == "_flat_param" for key in path):
            raise RefusedError(
                "The weights of FSDP1 are flat: a vector holds several parameters, and no file tells which.",
                place=place,
                expected="weights by name (StateDictType.SHARDED_STATE_DICT)",
                found="a flat vector (StateDictType.LOCAL_STATE_DICT)",
                remedy="load it in the program that wrote it, and save it under StateDictType.SHARDED_STATE_DICT",
            )


def _mesh(parts: Sequence[Part], place: Place, path: Keys) -> Shape:
    """Returns the number of ranks along each axis of the mesh that all of them make up."""
    if len({len(part.at) for part in parts}) != 1:
        raise _contradiction([f"{list(part.at)} in the mesh" for part in parts], place, path)
    mesh = tuple(1 + max(axis) for axis in zip(*(part.at for part in parts), strict=True))
    # A mesh may be a part of a larger one: then several ranks stand at one place in it and have the same.
    places = Counter(part.at for part in parts)
    if len(places) != math.prod(mesh) or len(set(places.values())) != 1:
        raise _contradiction([f"{list(part.at)} in the mesh" for part in parts], place, path)
    return mesh


def _joined_parts(parts: Sequence[Part], place: Place, path: Keys) -> Tensor:
    mesh = _mesh(parts, place, path)
    first, same = parts[0], dict[Box, list[Tensor]]()
    for part in parts:
        same.setdefault(part.box(mesh), []).append(part.tensor)
        is_one = (part.shape, part.cuts, part.tensor.dtype) == (first.shape, first.cuts, first.tensor.dtype)
        if not is_one or part.tensor.shape != part.box(mesh)[1]:
            shapes = [
                f"{part.tensor.dtype} {list(part.tensor.shape)} of {list(part.shape)}" for part in parts
            ]
            raise _contradiction(shapes, place, path)
    filled = [box for box in same if math.prod(box[1])] or [*same][:1]
    if fault := tiling_fault(first.shape, filled, _name(path)):
        raise CorruptError(
            "The ranks' parts don't make up a tensor.", place=f"{_name(path)} in {place}", found=fault
        )
    return Joined({box[0]: _agreed(same[box], place, path) for box in filled}, first.shape)


def _is_part(node: Tree) -> bool:
    return isinstance(node, Record) and _CLASS.fullmatch(node.name) is not None


def _part(node: Record, path: Keys, place: Place) -> Part:
    """Takes the record of a DTensor apart."""
    inside = attributes(node)
    spec, tensor = inside.get("_spec"), inside.get("_local_tensor")
    specified = attributes(spec)
    shape = counts_of(node.args[_SHAPE] if len(node.args) > _SHAPE else None)
    at = counts_of(attributes(specified.get("mesh")).get("_coordinate_on_dim"))
    placements = row_of(specified.get("placements"))
    cuts = tuple(_cut(placement, len(shape), path, place) for placement in placements)
    if not isinstance(tensor, Tensor) or not 0 < len(cuts) == len(at):
        raise FormatError(
            "A part of a tensor isn't described as a DTensor is.",
            place=f"{_name(path)} in {place}",
            expected="values, a shape, and a placement for each axis of the mesh",
        )
    return Part(tensor, shape, cuts, _order(placements, specified), at)


def _cut(placement: Tree, rank: int, path: Keys, place: Place) -> int | None:
    """Returns the dimension that an axis of the mesh cuts; None of none."""
    kind = placement.name.rpartition(".")[2] if isinstance(placement, Record) else ""
    dim = attributes(placement).get("dim")
    if kind == "Replicate":
        return None
    if kind in _CUTS and type(dim) is int and 0 <= dim < rank:
        return dim
    raise FormatError(
        "A DTensor is placed in a way that isn't read.",
        place=f"{_name(path)} in {place}",
        expected="Shard or Replicate",
        found=kind or type(placement).__name__,
        remedy=_WHOLE,
    )


def _order(placements: Sequence[Record], specified: Mapping[str, Any]) -> tuple[int, ...]:
    """Returns the axes of the mesh in the order in which they cut: as it is stored; strided ones last, from behind."""
    is_stored = not specified.get("use_strided_shard_as_shard_order")
    entries = [
        entry for entry in row_of(specified.get("shard_order")) if isinstance(entry, Record) and is_stored
    ]
    stored = [axis for entry in entries for axis in counts_of(entry.args[-1] if entry.args else ())]
    axes = range(len(placements))
    strided = [axis for axis in axes if placements[axis].name.endswith("._StridedShard")]
    left = [axis for axis in axes if axis not in strided]
    return tuple(dict.fromkeys(axis for axis in (*stored, *left, *reversed(strided)) if axis in axes))


def _name(path: Keys) -> str:
    return "/".join(map(str, path))


def _contradiction(views: Sequence[Any], place: Place, path: Keys) -> CorruptError:
    differing = next((i for i, node in enumerate(views) if node != views[0]), 0)
    return CorruptError(
        "The files of ranks contradict each other.",
        place=f"{_name(path) or 'the whole'} in {place}",
        expected=f"as on rank 0: {views[0]}"[:200],
        found=f"on rank {differing}: {views[differing]}"[:200],
        remedy=MIXED,
    )
