"""Buckets of Megatron-Core's DistributedOptimizer: flat vectors of many parameters, as `dp_reshardable` keeps them.

    sharded  optimizer.distributed.dp_group_idx_D.optimizer/shard_0_1      the groups of a model-parallel rank
             ....gbuf_idx_G.dtype_(D).bucket_idx_B.{param, exp_avg, ...}   a bucket without the padding at its end
             ....param_state/shard_0_1                                     or all of it, one bucket after the other

Which parameter lies where is in no file. Parameters stand in reverse order, each begins at a multiple of 64 elements of
its bucket, and a bucket ends with its last one. `param` is the float32 master, whose rounding is the model's weight: so
the first values of each parameter are looked for, and all of them are compared when they are read. What lies between
parameters is never read. A layer has parameters of its own there, also where the model's keys hold all layers in one;
a model-parallel rank has its own pieces of them. Output: the form of `fully_reshardable`, with whole parameters.
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

from statekit.converters.layouts.megatron.slices import is_gated, joined, key_of, piece_of
from statekit.errors import RefusedError, StateError
from statekit.tensors.tensor import DType, Index, Shape, Tensor, dtype_name
from statekit.tensors.tree import Record
from statekit.tensors.views import Concatenated, Segment, Slice, Stack

_PREFIX = "optimizer.distributed.dp_group_idx_"
_BUCKET = re.compile(r"(\d+)\.gbuf_idx_(\d{1,9})\.dtype_\(torch\.(\w+), [^)]*\)\.bucket_idx_(\d{1,9})\.(\w+)")
_OBJECT = re.compile(r"(\d+)\.(\w+)/shard_\d+_\d+")
_STACK = re.compile(r"(^|\.)layers\.(?!\d+\.)")
"""What the key of a parameter has that holds all layers along its first axis."""
_SHARDING, _CONTENT, _WHOLE = "param_state_sharding_type", "content_metadata", "fully_reshardable"
_MASTER, _STATE, _GROUPS, _COALESCED = "param", "param_state", "optimizer", "buckets_coalesced"
_ALIGNED = 64
_PROBE = 256
"""Values of a parameter that are compared to find it; the others are compared as they are read."""
WHERE = (
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
    records = (common.get("optimizer", {}), common.get(_CONTENT, {}))
    if not all(isinstance(part, Mapping) for part in records):
        return dict(common)  # no optimizer of Megatron's, which its layout says
    optimizer = {**records[0], _SHARDING: _WHOLE}
    content = {**records[1], "distrib_optim_sharding_type": _WHOLE}
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
    model = {key: part for key, part in sharded.items() if not key.startswith(_PREFIX)}
    whole = {key: part for key, part in model.items() if isinstance(part, Tensor) and 0 not in part.shape}
    weights = dict(_each_layer(whole))
    ordered = _ordered(names, weights)
    groups = _groups(sharded)
    slots = _found(_joined_slots(groups, weights, ordered, place), sharded, place)
    return {**model, **dict(_stacked(slots, whole))}, (WHERE,)


def _found(
    slots: dict[str, dict[str, Tensor]], sharded: Mapping[str, Any], place: object
) -> dict[str, dict[str, Tensor]]:
    """Returns slots that were found in buckets; refuses buckets in which there are none."""
    if not slots:
        raise StateError(
            "The optimizer's tensors are of another form than a parameter's own, and none of its buckets is whole.",
            place=place,
            expected="per bucket the vectors param, exp_avg, exp_avg_sq",
            found=", ".join(key for key in sharded if key.startswith(_PREFIX)),
            remedy="save it with --dist-ckpt-optim-fully-reshardable, which keeps whole parameters instead of buckets",
        )
    return slots


def gathered_slots(
    weights: Mapping[str, Tensor], values: Any, place: object, names: Sequence[str] | None = None
) -> dict[str, dict[str, Tensor]]:
    """Returns the slots of a rank's parameters, by slot and parameter, from the flat arrays of its buckets.

    Args:
        weights: The rank's pieces of the model's parameters, layer by layer.
        values: Its file `distrib_optim.pt`.
        place: The checkpoint, for messages.
        names: The parameters in the model's order, where a user gives it.

    Raises:
        StateError: Parameters aren't found, or can't be told apart.
    """
    state = {f"{_PREFIX}0.{_STATE}/shard_0_1": [values]}
    return _found(_of_group(state, weights, _ordered(names, weights), place), state, place)


def _ordered(names: Sequence[str] | None, weights: Mapping[str, Tensor]) -> list[str] | None:
    """Returns the names that a user gave of parameters, in the form that the model's have."""
    given = None if names is None else [name if name in weights else key_of(name) for name in names]
    return None if given is None else [name for name in given if name in weights]


def _each_layer(weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yields parameters as modules have them: of a key that holds all layers, one for each."""
    for key, weight in weights.items():
        if _STACK.search(key):
            for layer in range(weight.shape[0]):
                yield _STACK.sub(rf"\g<0>{layer}.", key), Slice(weight, 0, layer)
        else:
            yield key, weight


def _stacked(
    slots: Mapping[str, Mapping[str, Tensor]], weights: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yields slots under the model's keys; undoes `_each_layer`. What some layers lack is left out."""
    for slot, of_param in slots.items():
        for key, weight in weights.items():
            layers = [of_param.get(name) for name, _ in _each_layer({key: weight})]
            tensors = [tensor for tensor in layers if tensor is not None]
            if len(tensors) == len(layers):
                yield _slot(slot, key), Stack(tensors, 0) if _STACK.search(key) else tensors[0]


def _groups(sharded: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the keys of each group of data-parallel ranks, in the order of model-parallel ranks."""
    groups: dict[int, dict[str, Any]] = {}
    for key, part in sharded.items():
        number = key.removeprefix(_PREFIX).partition(".")[0]
        if key.startswith(_PREFIX) and number.isdecimal():
            groups.setdefault(int(number), {})[key] = part
    return [groups[number] for number in sorted(groups)]


def _joined_slots(
    groups: Sequence[Mapping[str, Any]],
    weights: Mapping[str, Tensor],
    ordered: Sequence[str] | None,
    place: object,
) -> dict[str, dict[str, Tensor]]:
    """Returns whole slots by slot and parameter, of what the groups of model-parallel ranks hold.

    Tensor-parallel ranks count up first, then stages of a pipeline: how many of each there are is tried.
    Source: megatron-core 0.16.1, core/optimizer/__init__.py, `get_megatron_optimizer`: the rank in the model group.
    """
    error: StateError | None = None
    for count in sorted((n for n in range(1, len(groups) + 1) if len(groups) % n == 0), reverse=True):
        try:
            by_group = [
                _of_group(group, _cut_for(rank % count, count, weights), ordered, place)
                for rank, group in enumerate(groups)
            ]
        except (StateError, RefusedError) as refused:
            error = error or (refused if isinstance(refused, StateError) else None)
            continue
        return _of_all(by_group, count, weights, place)
    raise error or StateError("The optimizer has no group of ranks.", place=place)


def _cut_for(rank: int, count: int, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the pieces of a tensor-parallel rank."""
    gated = is_gated(weights)
    return {name: piece_of(name, weight, rank, count, gated) for name, weight in weights.items()}


def _of_group(
    sharded: Mapping[str, Any], weights: Mapping[str, Tensor], ordered: Sequence[str] | None, place: object
) -> dict[str, dict[str, Tensor]]:
    """Returns the slots of the parameters that lie in the buckets of a group of ranks, by slot and parameter."""
    slots: dict[str, dict[str, Tensor]] = {}
    order = list(reversed(list(ordered if ordered is not None else weights)))
    for buffer in _buffers(sharded, place):
        lacking = {name: weights[name] for name in order if name not in slots.get(_MASTER, {})}
        for key, of_param in _whole(buffer, lacking, ordered is not None, place).items():
            slots.setdefault(key, {}).update(of_param)
    return slots


def _of_all(
    by_group: Sequence[Mapping[str, Mapping[str, Tensor]]],
    count: int,
    weights: Mapping[str, Tensor],
    place: object,
) -> dict[str, dict[str, Tensor]]:
    """Returns the slots of all groups, with the pieces of tensor-parallel ranks joined."""
    gated = is_gated(weights)
    pieces: dict[str, dict[str, dict[int, Tensor]]] = {}
    for number, slots in enumerate(by_group):
        for key, of_param in slots.items():
            for name, tensor in of_param.items():  # a tied embedding lies in the first stage and in the last
                pieces.setdefault(key, {}).setdefault(name, {}).setdefault(number % count, tensor)
    return {
        key: {
            name: joined(_slot(key, name), name, [of_rank[rank] for rank in range(count)], gated, place)
            for name, of_rank in by_name.items()
            if len(of_rank) == count
        }
        for key, by_name in pieces.items()
    }


def _whole(
    buffer: _Buffer, weights: Mapping[str, Tensor], is_ordered: bool, place: object
) -> dict[str, dict[str, Tensor]]:
    """Returns the slots of the parameters that lie in a buffer, by slot and parameter."""
    of_dtype = {name: part for name, part in weights.items() if dtype_name(part.dtype) == buffer.dtype}
    slots: dict[str, dict[str, Tensor]] = {}
    for name, at in _Search(buffer, of_dtype, is_ordered, place).places():
        shape = weights[name].shape
        for key, vector in buffer.buckets[at.bucket].items():
            run = Segment(vector, at.start, math.prod(shape))
            slots.setdefault(key, {})[name] = Concatenated((run,), shape)
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
                "Parameters of one size have equal values, so that nothing assigns their slots.",
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


def _buffers(sharded: Mapping[str, Any], place: object) -> Iterator[_Buffer]:
    """Yields the buffers of an optimizer."""
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
    turned = [dict(zip(lists, parts, strict=True)) for parts in zip(*lists.values(), strict=False)]
    buckets = [buffer] if _is_vector(buffer.get(_MASTER)) else turned
    for bucket in buckets:
        vectors = {key: part for key, part in bucket.items() if _is_vector(part)}
        if _MASTER in vectors:
            yield vectors


def _is_vector(part: Any) -> TypeGuard[Tensor]:
    return isinstance(part, Tensor) and len(part.shape) == 1
