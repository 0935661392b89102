"""What ZeRO cut over ranks, put together again: the optimizer's state of each parameter, in its shape.

Stages 1 and 2 flatten the parameters of a group one after the other, fill up at the end, and cut the whole in equal
parts; what a rank holds of which parameter stands in its `param_slice_mappings`. Its float32 weights lack the filling.
Stage 3 cuts every parameter by itself, filled up to a multiple of the ranks; a rank's pieces lie one after the other
in flat sub-groups.
Source: deepspeedai/DeepSpeed deepspeed/runtime/zero/stage_1_and_2.py, `state_dict`, `_get_groups_without_padding`;
stage3.py, `_rigid_state_dict`; deepspeed/utils/zero_to_fp32.py; deepspeed/utils/tensor_fragment.py, `fragment_address`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from statekit.converters.containers.deepspeed.files import MASTER, require
from statekit.converters.formats.pytorch.one_step import options
from statekit.errors import CorruptError, FormatError, some
from statekit.tensors.tensor import Shape, Tensor
from statekit.tensors.tree import Record, Tree
from statekit.tensors.views import Concatenated, Segment

Shapes: TypeAlias = Sequence[Mapping[str, Shape]]
"""For each group of the optimizer, the shape of each parameter by name, in order."""
Flat: TypeAlias = Mapping[str, Any]
"""What the optimizer keeps of one flat vector: tensors as long as it, and scalars."""
_ALIKE = (
    "zero_stage", "loss_scaler", "dynamic_loss_scale", "clip_grad", "partition_count", "base_optimizer_state_step",
)  # fmt: skip


@dataclass(frozen=True)
class Part:
    """What a rank holds.

    Attributes:
        masters: Its float32 weights, flat, by group or sub-group.
        state: The optimizer's state of each of these.
        groups: The optimizer's groups; `params` are positions in `masters`.
        spans: Where each parameter lies in each of `masters`, if it says so: name -> start, count.
        engine: What the engine keeps beside, which each rank has whole.
        place: Its file, for messages.
        filling: How many values of each group's vector fill up between parameters.
    """

    masters: Sequence[Tensor]
    state: Sequence[Flat]
    groups: Sequence[Mapping[str, Any]]
    spans: Sequence[Mapping[str, tuple[int, int]]] | None
    engine: Mapping[str, Tree]
    place: str
    filling: Sequence[int] = ()

    @property
    def options(self) -> list[dict[str, Tree]]:
        """The options of each group, without its parameters."""
        return [*map(options, self.groups)]


def part_of(tree: Tree, place: str) -> Part:
    """Reads a rank's `optimizer_state_dict`.

    Raises:
        FormatError: It has another form than DeepSpeed gives it.
    """
    optimizer = require(
        tree.get("optimizer_state_dict") if isinstance(tree, dict) else None, dict, "a dict", place
    )
    cut = "fp32_flat_groups" in optimizer
    masters = optimizer.get("fp32_flat_groups" if cut else "single_partition_of_fp32_groups")
    base = optimizer.get("optimizer_state_dict" if cut else "base_optimizer_state")
    if isinstance(base, list):
        raise FormatError(
            "This is an elastic checkpoint of an early DeepSpeed, which doesn't keep its groups.",
            place=place,
            expected="base_optimizer_state with param_groups",
            remedy="load it with DeepSpeed and save it with elastic_checkpoint off",
        )
    flats = [_flat(entry, place) for entry in require(masters, list, "flat weights", place)]
    records = require(
        require(base, dict, "the state of an optimizer", place).get("state"), dict, "a state", place
    )
    groups = [
        require(entry, dict, "a group", place)
        for entry in require(base.get("param_groups"), list, "groups", place)
    ]
    state = [
        require(records.get(i, {}), dict, "the state of a flat vector", place) for i in range(len(flats))
    ]
    spans = None if cut else _spans(optimizer.get("param_slice_mappings"), place)
    lists = [require(group.get("params", []), (list, tuple), "a list", place) for group in groups]
    if any(type(i) is not int or not 0 <= i < len(flats) for numbers in lists for i in numbers):
        raise FormatError("A group has another vector than there are.", place=place, expected=f"{len(flats)}")
    return Part(flats, state, groups, spans, _engine(optimizer), place, _filling(optimizer, place))


def _filling(optimizer: Mapping[Any, Any], place: str) -> list[int]:
    """Returns how many values of each group's vector fill up between parameters.

    Source: deepspeedai/DeepSpeed deepspeed/runtime/zero/stage_1_and_2.py, `parameter_alignment`.
    """
    paddings = require(optimizer.get("param_alignment_paddings") or [], list, "paddings by group", place)
    return [
        sum(require(count, int, "a padding", place) for count in require(of_group, list, "paddings", place))
        for of_group in paddings
    ]


def _engine(optimizer: Mapping[Any, Any]) -> dict[str, Tree]:
    """Returns what every rank keeps alike of its engine: the loss scaler moves on all ranks at once."""
    parts = {key: optimizer[key] for key in _ALIKE if key in optimizer}
    return {
        key: node.state if isinstance(node, Record) and node.state else node for key, node in parts.items()
    }


def _flat(node: Any, place: str) -> Tensor:
    if not isinstance(node, Tensor) or len(node.shape) != 1:
        raise FormatError("A rank's weights aren't flat.", place=place, found=type(node).__name__)
    return node


def _spans(node: Any, place: str) -> list[dict[str, tuple[int, int]]] | None:
    if node is None:
        return None
    return [
        {
            str(name): _address(span, place)
            for name, span in require(group, dict, "slices by name", place).items()
        }
        for group in require(node, list, "a list of slices", place)
    ]


def _address(node: Any, place: str) -> tuple[int, int]:
    state = node.state if isinstance(node, Record) else node
    if isinstance(state, Mapping):
        start, count = state.get("start"), state.get("numel")
        if type(start) is int and type(count) is int and start >= 0 and count >= 0:
            return start, count
    raise FormatError("A slice has no start and length.", place=place, found=str(node)[:80])


def by_group(shapes: Shapes, part: Part) -> Shapes:
    """Returns parameters by the optimizer's groups. Stage 3 lists them by sub-group; a group may have several.

    Args:
        shapes: As the model's file lists them.
        part: What a rank holds, with its groups.
    """
    if len(shapes) == len(part.groups) or len(shapes) != len(part.masters):
        return shapes
    return [
        {name: shape for number in group.get("params", ()) for name, shape in shapes[number].items()}
        for group in part.groups
    ]


def joined(
    parts: Sequence[Part], shapes: Shapes, stage: int, only: int | None = None
) -> dict[str, dict[str, Any]]:
    """Returns the optimizer's state by parameter, its float32 weight among it; of one group alone where one is given.

    Raises:
        CorruptError: What ranks hold doesn't make up the parameters, or is more than they are.
    """
    first = parts[0]
    if any(len(part.masters) != len(first.masters) for part in parts):
        raise CorruptError("Ranks hold different numbers of groups.", place=first.place)
    whole = {}
    cut = _interleaved if stage == 3 else _concatenated
    for name, shape, runs in cut(parts, {n: s for n, s in enumerate(shapes) if only in (None, n)}):
        count_held = sum(count for _, _, _, count in runs)
        if count_held != math.prod(shape):
            raise CorruptError(
                "The ranks' parts don't make up a parameter.",
                place=f"{name} in {first.place}",
                expected=f"{math.prod(shape)} values for shape {shape}",
                found=count_held,
            )
        whole[name] = dict(_state(parts, name, shape, runs))
    return whole


_Runs: TypeAlias = list[tuple[int, int, int, int]]
"""Rank, position of the flat vector, start, count."""


_Numbered: TypeAlias = Mapping[int, Mapping[str, Shape]]
"""The shape of each parameter by name, of groups by their numbers."""


def _concatenated(parts: Sequence[Part], shapes: _Numbered) -> Iterator[tuple[str, Shape, _Runs]]:
    for number, group in shapes.items():
        if number >= len(parts[0].masters):
            raise CorruptError("A group has no flat weights.", place=parts[0].place, found=f"group {number}")
        spans = [_own_spans(part, number) for part in parts]
        _check_all_taken(parts, number, group, spans)
        if not _follow(spans, group):
            spans = list(_usual_spans(parts, number, group))
        for name, shape in group.items():
            runs = [
                (rank, number, *of_rank[name])
                for rank, of_rank in enumerate(spans)
                if of_rank and name in of_rank
            ]
            yield name, shape, [run for run in runs if run[3]]


_ALIGNMENT = 2
"""A vector is filled up to a multiple of so many values for each rank: zero_to_fp32.py, `zero2_align`."""


def _check_all_taken(
    parts: Sequence[Part],
    number: int,
    group: Mapping[str, Shape],
    spans: Sequence[Mapping[str, tuple[int, int]] | None],
) -> None:
    """Refuses a group whose vector holds more than its parameters: the others would be lost without a word."""
    others = sorted({name for of_rank in spans for name in of_rank or () if name not in group})
    values = sum(part.masters[number].shape[0] for part in parts)
    taken = sum(map(math.prod, group.values())) + sum(parts[0].filling[number : number + 1])
    most = -(-taken // (_ALIGNMENT * len(parts))) * _ALIGNMENT * len(parts)
    if others or values > most:
        raise _left_over(parts[0], f"{taken} values", f"{values}{', of ' if others else ''}{some(others)}")


def _left_over(part: Part, taken: str, stored: str) -> CorruptError:
    return CorruptError(
        "The optimizer holds values of parameters that the model's file doesn't name.",
        place=part.place,
        expected=f"{taken}, as param_shapes has them",
        found=stored,
        remedy="take the files of the model and of the optimizer from one save",
    )


def _follow(spans: Sequence[Mapping[str, tuple[int, int]] | None], group: Mapping[str, Shape]) -> bool:
    """Tells whether ranks say where parameters lie, in the order of the model's file.

    With round_robin_gradients they say it of another order than that of their vectors, which the model's file has.
    Source: deepspeedai/DeepSpeed deepspeed/runtime/zero/stage_1_and_2.py, `_link_all_hp_params`;
    deepspeed/runtime/engine.py, `_get_zero_param_shapes`.
    """
    if any(of_rank is None for of_rank in spans):
        return False
    names = dict.fromkeys(name for of_rank in spans for name in of_rank or ())
    return [*names] == [name for name in group if name in names]


def _own_spans(part: Part, number: int) -> Mapping[str, tuple[int, int]] | None:
    return None if part.spans is None or number >= len(part.spans) else part.spans[number]


def _usual_spans(
    parts: Sequence[Part], number: int, group: Mapping[str, Shape]
) -> Iterator[dict[str, tuple[int, int]]]:
    """Yields where parameters lie in each rank's part, if they lie there one after the other."""
    ends = list(itertools.accumulate(math.prod(shape) for shape in group.values()))
    places = dict(zip(group, zip([0, *ends], ends, strict=False), strict=True))
    begin = 0
    for part in parts:
        size = part.masters[number].shape[0]
        cut = {n: (max(a, begin), min(b, begin + size)) for n, (a, b) in places.items()}
        yield {name: (low - begin, high - low) for name, (low, high) in cut.items() if low < high}
        begin += size


def _interleaved(parts: Sequence[Part], shapes: _Numbered) -> Iterator[tuple[str, Shape, _Runs]]:
    ranks, number, offset = len(parts), 0, 0
    sizes = [flat.shape[0] for flat in parts[0].masters]
    for name, shape in (pair for group in shapes.values() for pair in group.items()):
        count = math.prod(shape)
        length = -(-count // ranks)
        while number < len(sizes) and offset == sizes[number]:
            number, offset = number + 1, 0
        if number == len(sizes) or offset + length > sizes[number]:
            raise CorruptError(
                "A parameter reaches beyond its sub-group.", place=f"{name} in {parts[0].place}", found=shape
            )
        left = [min(length, max(0, count - rank * length)) for rank in range(ranks)]
        yield name, shape, [(rank, number, offset, n) for rank, n in enumerate(left) if n]
        offset += length
    if left_over := sum(sizes[number:]) - offset:
        raise _left_over(parts[0], f"{sum(sizes) - left_over} values of each rank", f"{sum(sizes)}")


def _state(parts: Sequence[Part], name: str, shape: Shape, runs: _Runs) -> Iterator[tuple[str, Any]]:
    part = parts[runs[0][0]] if runs else parts[0]
    for key, value in (part.state[runs[0][1]] if runs else {}).items():
        if isinstance(value, Tensor) and value.shape:
            pieces = [(parts[rank].state[number].get(key), start, n) for rank, number, start, n in runs]
            yield str(key), _joined(pieces, shape, f"{key} of {name} in {part.place}")
        else:
            yield str(key), value
    weights = [(parts[rank].masters[number], start, n) for rank, number, start, n in runs]
    yield MASTER, _joined(weights, shape, f"weights of {name} in {part.place}")


def _joined(pieces: Sequence[tuple[Any, int, int]], shape: Shape, place: str) -> Tensor:
    """Returns a parameter's tensor from flat ones: tensor, start, count."""
    short = [
        flat for flat, start, n in pieces
        if not isinstance(flat, Tensor) or len(flat.shape) != 1 or start + n > flat.shape[0]
    ]  # fmt: skip
    if short or not pieces or len({flat.dtype for flat, _, _ in pieces}) != 1:
        raise CorruptError(
            "A rank's part is shorter than it says, or of another kind than the others.",
            place=place,
            found="; ".join(str(getattr(flat, "shape", flat)) for flat in short[:3]),
        )
    return Concatenated(tuple(Segment(flat, start, n) for flat, start, n in pieces), shape)
