"""Buckets of Megatron-Core's DistributedOptimizer: flat vectors of many parameters, as `dp_reshardable` keeps them.

    sharded  optimizer.distributed.dp_group_idx_0.optimizer/shard_0_1      the groups
             ....gbuf_idx_G.dtype_(D).bucket_idx_B.{param, exp_avg, ...}   a bucket without the padding at its end
             ....param_state/shard_0_1                                     or all of it, one bucket after the other

Which parameter lies where is in no file. Parameters stand in reverse order, each begins at a multiple of 64 elements of
its bucket, and a bucket ends with its last one. `param` is the float32 master, whose rounding is the model's weight: so
the first values of each parameter are looked for, and all of them are compared when they are read. What lies between
parameters is never read. Out comes the form of `fully_reshardable`, with whole parameters.
Source: NVIDIA/Megatron-LM megatron/core/distributed/param_and_grad_buffer.py, `_ParamAndGradBuffer`;
core/optimizer/distrib_optimizer.py, `sharded_param_state_dp_reshardable`, `get_parameter_state_dp_zero`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np

from statekit.errors import StateError
from statekit.tensors.tensor import DType, Index, Shape, Tensor, dtype_name
from statekit.tensors.tree import Record
from statekit.tensors.views import Concatenated, Segment

_PREFIX = "optimizer.distributed.dp_group_idx_"
_BUCKET = re.compile(r"(\d+)\.gbuf_idx_(\d{1,9})\.dtype_\(torch\.(\w+), [^)]*\)\.bucket_idx_(\d{1,9})\.(\w+)")
_OBJECT = re.compile(r"(\d+)\.(\w+)/shard_\d+_\d+")
_SHARDING, _CONTENT, _WHOLE = "param_state_sharding_type", "content_metadata", "fully_reshardable"
_MASTER, _STATE, _GROUPS, _COALESCED = "param", "param_state", "optimizer", "buckets_coalesced"
_ALIGNED = 64
_PROBE = 256
"""Values of a parameter that are compared to find it; the others are compared as they are read."""
_WHERE = (
    "No file says where parameters lie in the optimizer's buckets: they were found by their first values, and every "
    "value is compared with the model's as it is read."
)


@dataclass(frozen=True)
class _Buffer:
    """The flat vectors of one dtype: slots by name, bucket by bucket; one for all buckets where they are joined."""

    dtype: str
    buckets: Sequence[Mapping[str, Tensor]]
    is_joined: bool = False


@dataclass(frozen=True)
class _Place:
    """Where a parameter begins, in which bucket, and where that bucket begins in its vector."""

    bucket: int
    start: int
    origin: int


def has_buckets(sharded: Mapping[str, Any]) -> bool:
    """Tells whether an optimizer lies in buckets."""
    return any(key.startswith(_PREFIX) for key in sharded)


def with_groups(common: Mapping[str, Any], sharded: Mapping[str, Any]) -> dict[str, Any]:
    """Returns common.pt as `fully_reshardable` has it: with the groups, which lie among the objects otherwise."""
    groups = next((node for name, node in _objects(sharded) if name == _GROUPS), None)
    said = (common.get("optimizer", {}), common.get(_CONTENT, {}))
    if not all(isinstance(part, Mapping) for part in said):
        return dict(common)  # no optimizer of Megatron's, which its layout says
    optimizer = {**said[0], _SHARDING: _WHOLE}
    content = {**said[1], "distrib_optim_sharding_type": _WHOLE}
    return {
        **common,
        "optimizer": {**optimizer, **({"optimizer": groups} if groups else {})},
        _CONTENT: content,
    }


def without_buckets(
    sharded: Mapping[str, Any], place: object, names: Sequence[str] | None = None
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Returns the keys of a checkpoint with whole parameters in the place of buckets, and what was found how.

    Args:
        sharded: What is cut, by its flat keys.
        place: The checkpoint, for messages.
        names: The parameters in the model's order, where a user gives it; else it is looked for.

    Raises:
        StateError: Parameters aren't found, or can't be told apart.
    """
    _refuse_groups(sharded, place)
    model = {key: part for key, part in sharded.items() if not key.startswith(_PREFIX)}
    weights = {key: part for key, part in model.items() if isinstance(part, Tensor) and 0 not in part.shape}
    order = [name for name in reversed(list(names or weights)) if name in weights]
    slots = dict[str, Tensor]()
    for buffer in _buffers(sharded, place):
        lacking = {name: weights[name] for name in order if _slot(_MASTER, name) not in slots}
        slots |= _whole(buffer, lacking, names is not None, place)
    if not slots:
        raise StateError(
            "The optimizer's tensors are of another form than a parameter's own, and none of its buckets is whole.",
            place=place,
            expected="per bucket the vectors param, exp_avg, exp_avg_sq",
            found=", ".join(key for key in sharded if key.startswith(_PREFIX)),
            remedy="save it with --dist-ckpt-optim-fully-reshardable, which keeps whole parameters instead of buckets",
        )
    return {**model, **slots}, (_WHERE,)


def _whole(
    buffer: _Buffer, weights: Mapping[str, Tensor], is_ordered: bool, place: object
) -> dict[str, Tensor]:
    """Returns the slots of the parameters that lie in a buffer, by their keys."""
    of_dtype = {name: part for name, part in weights.items() if dtype_name(part.dtype) == buffer.dtype}
    slots = dict[str, Tensor]()
    for name, at in _Search(buffer, of_dtype, is_ordered, place).places():
        shape = weights[name].shape
        for key, vector in buffer.buckets[at.bucket].items():
            slots[_slot(key, name)] = Concatenated((Segment(vector, at.start, math.prod(shape)),), shape)
    return slots


def _slot(key: str, name: str) -> str:
    return f"optimizer.state.{key}.{name}"


class _Search:
    """Looks for parameters in a buffer, in their order first.

    Args:
        buffer: The buffer.
        weights: The model's parameters of its dtype, in the order in which they are expected.
        is_ordered: Whether a user gave that order.
        place: The checkpoint, for messages.
    """

    def __init__(
        self, buffer: _Buffer, weights: Mapping[str, Tensor], is_ordered: bool, place: object
    ) -> None:
        self.buffer, self.is_ordered, self.place = buffer, is_ordered, place
        self.sizes = {name: math.prod(weight.shape) for name, weight in weights.items()}
        """Of the parameters that remain."""
        self._order = {name: number for number, name in enumerate(weights)}
        self._heads: dict[int, dict[bytes, list[str]]] = {}
        """Names by how many first values are compared, and by these as the model has them."""
        for name, weight in weights.items():
            block = weight.read(_head(weight.shape))
            self._dtype = weight.dtype
            self._heads.setdefault(block.size, {}).setdefault(_bits(block, weight.dtype), []).append(name)

    def places(self) -> Iterator[tuple[str, _Place]]:
        """Yields each parameter with its place; takes it from those that remain."""
        for number, bucket in enumerate(self.buffer.buckets):
            vector = bucket[_MASTER]
            at = _Place(number, 0, 0)
            while at.start < vector.shape[0]:
                name, here = self._next(vector, at)
                yield name, here
                at = _Place(number, here.start + self.sizes.pop(name), here.origin)

    def _next(self, vector: Tensor, at: _Place) -> tuple[str, _Place]:
        matches = [(name, here) for here in self._starts(at) for name in self._names_at(vector, here)]
        if len(matches) > 1 and not self.is_ordered:
            matches = self._leading(matches, vector) or matches
        names = list(dict.fromkeys(name for name, _ in matches))
        if not names:
            raise StateError(
                "No parameter's values stand where the next one of a bucket begins.",
                place=self.place,
                expected=f"a master that rounds to its weight at {at.start} of {vector.shape[0]}",
                found=f"none of {', '.join(list(self.sizes)[:5]) or 'the parameters left'}",
                remedy="check that all files are of one step, and that the optimizer's are whole",
            )
        if len(names) > 1 and not self.is_ordered:
            raise StateError(
                "Parameters of one size have equal values, so that nothing tells which slots are whose.",
                place=self.place,
                found=", ".join(names[:5]),
                remedy="give the parameters in the model's order (--param-names FILE)",
            )
        return matches[0]

    def _starts(self, at: _Place) -> list[_Place]:
        """Returns where the next parameter may begin: in the same bucket, or in the next where they are joined."""
        offset = at.start - at.origin
        aligned = _Place(at.bucket, at.origin + -(-offset // _ALIGNED) * _ALIGNED, at.origin)
        new = _Place(at.bucket, at.start, at.start)
        return [aligned, new] if self.buffer.is_joined and new.start != aligned.start else [aligned]

    def _leading(self, matches: Sequence[tuple[str, _Place]], vector: Tensor) -> list[tuple[str, _Place]]:
        """Returns the matches that another parameter, or the end, follows."""
        following: dict[_Place, set[str]] = {}
        leading = []
        for name, here in matches:
            end = _Place(here.bucket, here.start + self.sizes[name], here.origin)
            if end not in following:
                after = self._starts(end)
                following[end] = {other for place in after for other in self._names_at(vector, place)}
            if end.start == vector.shape[0] or following[end] - {name}:
                leading.append((name, here))
        return leading

    def _names_at(self, vector: Tensor, at: _Place) -> list[str]:
        """Returns the parameters whose first values stand somewhere, and all of which has room, in order."""
        room = vector.shape[0] - at.start
        if room <= 0 or not self._heads:
            return []
        bits = _bits(vector.read((slice(at.start, at.start + min(room, _PROBE)),)), self._dtype)
        alike = (
            name
            for count, by_bits in self._heads.items()
            for name in by_bits.get(bits[: count * self._dtype.itemsize], ())
        )
        return sorted(
            (name for name in alike if self.sizes.get(name, room + 1) <= room), key=self._order.__getitem__
        )


def _bits(block: Any, dtype: DType) -> bytes:
    """Returns values as a model of some dtype holds them."""
    with np.errstate(all="ignore"):  # what has no value there is no parameter's
        rounded: bytes = block.astype(dtype).tobytes()
    return rounded


def _head(shape: Shape) -> Index:
    """Returns a block of about so many first values in C order."""
    index, left = [slice(0, 0)] * len(shape), _PROBE
    for axis in reversed(range(len(shape))):
        count = min(shape[axis], max(left, 1))
        index[axis] = slice(0, count)
        left = left // shape[axis] if count == shape[axis] else 0
    return tuple(index)


def _objects(sharded: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields what is no tensor of its own, by its name."""
    for key, part in sharded.items():
        match = _OBJECT.fullmatch(key.removeprefix(_PREFIX)) if key.startswith(_PREFIX) else None
        if match:
            yield match[2], part[0] if isinstance(part, list) and part else part


def _refuse_groups(sharded: Mapping[str, Any], place: object) -> None:
    groups = {key.removeprefix(_PREFIX).partition(".")[0] for key in sharded if key.startswith(_PREFIX)}
    if len(groups) != 1:
        raise StateError(
            "Ranks of a model-parallel run have buckets of their own slices, which statekit doesn't join.",
            place=place,
            expected="one group of data-parallel ranks",
            found=f"{len(groups)} groups",
            remedy="save it with --dist-ckpt-optim-fully-reshardable",
        )


def _buffers(sharded: Mapping[str, Any], place: object) -> Iterator[_Buffer]:
    """Yields the buffers of an optimizer.

    Raises:
        StateError: The vectors of a bucket have several lengths.
    """
    for buffer in (*_sharded(sharded), *_all_gathered(sharded)):
        for number, bucket in enumerate(buffer.buckets):
            if len({vector.shape for vector in bucket.values()}) != 1:
                raise StateError(
                    "The vectors of a bucket have several lengths.",
                    place=place,
                    expected="as many values of each slot as of the masters",
                    found=", ".join(f"{key} {vector.shape[0]}" for key, vector in bucket.items()),
                    remedy=f"check that all files are of one step: bucket {number} of {buffer.dtype}",
                )
        yield buffer


def _sharded(sharded: Mapping[str, Any]) -> Iterator[_Buffer]:
    """Yields the buffers of whose buckets each vector has a key."""
    vectors: dict[tuple[int, str], dict[int, dict[str, Tensor]]] = {}
    for key, part in sharded.items():
        match = _BUCKET.fullmatch(key.removeprefix(_PREFIX)) if key.startswith(_PREFIX) else None
        if match and _is_vector(part):
            buffer = vectors.setdefault((int(match[2]), match[3]), {})
            buffer.setdefault(int(match[4]), {})[match[5]] = part
    for (_, dtype), by_number in sorted(vectors.items()):
        yield _Buffer(dtype, [bucket for _, bucket in sorted(by_number.items()) if _MASTER in bucket])


def _all_gathered(sharded: Mapping[str, Any]) -> Iterator[_Buffer]:
    """Yields the buffers of the states that one rank has gathered; older ones hold a list of buckets."""
    nodes = [node for name, node in _objects(sharded) if name == _STATE and isinstance(node, Mapping)]
    for node in nodes:
        for number in sorted(key for key in node if type(key) is int):
            for dtypes, buffer in node[number].items() if isinstance(node[number], Mapping) else ():
                first = dtypes[0] if isinstance(dtypes, tuple) and dtypes else dtypes
                dtype = (first.name if isinstance(first, Record) else str(first)).removeprefix("torch.")
                yield _Buffer(dtype, list(_vectors(buffer)), bool(node.get(_COALESCED)))


def _vectors(buffer: Any) -> Iterator[dict[str, Tensor]]:
    """Yields the buckets of a gathered buffer: one for all, or several in lists."""
    if not isinstance(buffer, Mapping):
        for entry in buffer if isinstance(buffer, list) else ():
            yield from _vectors(entry) if isinstance(entry, Mapping) else ()
        return
    lists = {key: part for key, part in buffer.items() if isinstance(part, list)}
    buckets = [buffer] if _is_vector(buffer.get(_MASTER)) else _turned(lists)
    for bucket in buckets:
        vectors = {key: part for key, part in bucket.items() if _is_vector(part)}
        if _MASTER in vectors:
            yield vectors


def _turned(lists: Mapping[Any, Sequence[Any]]) -> list[dict[Any, Any]]:
    """Returns a map for each place of several lists."""
    return [dict(zip(lists, parts, strict=True)) for parts in zip(*lists.values(), strict=False)]


def _is_vector(part: Any) -> TypeGuard[Tensor]:
    return isinstance(part, Tensor) and len(part.shape) == 1
