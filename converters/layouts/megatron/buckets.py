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
from dataclasses import dataclass, field
from typing import Any

from statekit.errors import StateError
from statekit.tensors.tensor import DType, Index, Shape, Tensor, dtype_name
from statekit.tensors.tree import Record
from statekit.tensors.views import Concatenated, Segment

_PREFIX = "optimizer.distributed.dp_group_idx_"
_BUCKET = re.compile(r"(\d+)\.gbuf_idx_(\d+)\.dtype_\(torch\.(\w+), [^)]*\)\.bucket_idx_(\d+)\.(\w+)")
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
    optimizer = {**common.get("optimizer", {}), _SHARDING: _WHOLE}
    content = {**common.get(_CONTENT, {}), "distrib_optim_sharding_type": _WHOLE}
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
    for buffer in _buffers(sharded):
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


@dataclass
class _Search:
    """Looks for parameters in a buffer, in their order first."""

    buffer: _Buffer
    weights: dict[str, Tensor]
    is_ordered: bool
    place: object
    _heads: dict[str, tuple[int, bytes]] = field(default_factory=dict)

    def places(self) -> Iterator[tuple[str, _Place]]:
        """Yields each parameter with its place; takes it from those that remain."""
        for number, bucket in enumerate(self.buffer.buckets):
            vector = bucket[_MASTER]
            at = _Place(number, 0, 0)
            while at.start < vector.shape[0]:
                name, here = self._next(vector, at)
                yield name, here
                end = here.start + math.prod(self.weights.pop(name).shape)
                at = _Place(number, end, here.origin)

    def _next(self, vector: Tensor, at: _Place) -> tuple[str, _Place]:
        matches = [
            (name, here) for here in self._starts(at) for name in self.weights if self._is(name, vector, here)
        ]
        if len(matches) > 1 and not self.is_ordered:
            leading = [match for match in matches if self._leads_on(match, vector)]
            matches = leading or matches
        names = list(dict.fromkeys(name for name, _ in matches))
        if not names:
            raise StateError(
                "No parameter's values stand where the next one of a bucket begins.",
                place=self.place,
                expected=f"a master that rounds to its weight at {at.start} of {vector.shape[0]}",
                found=f"none of {', '.join(list(self.weights)[:5]) or 'the parameters left'}",
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

    def _leads_on(self, match: tuple[str, _Place], vector: Tensor) -> bool:
        """Tells whether another parameter, or the end, follows a match."""
        name, here = match
        end = here.start + math.prod(self.weights[name].shape)
        after = self._starts(_Place(here.bucket, end, here.origin))
        others = [other for other in self.weights if other != name]
        return end == vector.shape[0] or any(self._is(other, vector, at) for at in after for other in others)

    def _is(self, name: str, vector: Tensor, at: _Place) -> bool:
        """Tells whether a parameter's first values stand somewhere, and whether all of it has room."""
        weight = self.weights[name]
        if at.start + math.prod(weight.shape) > vector.shape[0]:
            return False
        if name not in self._heads:
            block = weight.read(_head(weight.shape))
            self._heads[name] = block.size, _bits(block, weight.dtype)
        count, bits = self._heads[name]
        return _bits(vector.read((slice(at.start, at.start + count),)), weight.dtype) == bits


def _bits(block: Any, dtype: DType) -> bytes:
    """Returns values as a model of some dtype holds them."""
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


def _buffers(sharded: Mapping[str, Any]) -> Iterator[_Buffer]:
    vectors: dict[tuple[int, str], dict[int, dict[str, Tensor]]] = {}
    for key, part in sharded.items():
        match = _BUCKET.fullmatch(key.removeprefix(_PREFIX)) if key.startswith(_PREFIX) else None
        if match and isinstance(part, Tensor) and len(part.shape) == 1:
            buffer = vectors.setdefault((int(match[2]), match[3]), {})
            buffer.setdefault(int(match[4]), {})[match[5]] = part
    for (_, dtype), by_number in sorted(vectors.items()):
        yield _Buffer(dtype, [bucket for _, bucket in sorted(by_number.items()) if _MASTER in bucket])
    for name, node in _objects(sharded):
        if name == _STATE and isinstance(node, Mapping):
            yield from _gathered(node)


def _gathered(node: Mapping[Any, Any]) -> Iterator[_Buffer]:
    """Yields the buffers of a state that one rank has gathered; older ones hold a list of buckets."""
    for number in sorted(key for key in node if type(key) is int):
        for dtypes, buffer in node[number].items() if isinstance(node[number], Mapping) else ():
            first = dtypes[0] if isinstance(dtypes, tuple) and dtypes else dtypes
            dtype = (first.name if isinstance(first, Record) else str(first)).removeprefix("torch.")
            yield _Buffer(dtype, _vectors(buffer), bool(node.get(_COALESCED)))


def _vectors(buffer: Any) -> list[dict[str, Tensor]]:
    if isinstance(buffer, Mapping):
        flat = {
            key: part for key, part in buffer.items() if isinstance(part, Tensor) and len(part.shape) == 1
        }
        if _MASTER in flat:
            return [flat]
        lists = {key: part for key, part in buffer.items() if isinstance(part, list)}
        return [dict(zip(lists, bucket, strict=True)) for bucket in zip(*lists.values(), strict=False)]
    return [bucket for entry in buffer if isinstance(entry, Mapping) for bucket in _vectors(entry)]
