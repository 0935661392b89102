"""The layout `icefall`: ScaledAdam's state as icefall and GPT-SoVITS save it, all generations.

Parameters of one dtype and shape in a group are one batch. A slot holds the whole batch, with an axis for its members
in front (behind the period in `scale_grads`), and lies under the index of the first; a group's own slots lie under the
first member of its first batch, batches in the order of dtype and shape. Which generation ran, no file tells.

Source: k2-fsa/icefall, egs/librispeech/ASR/zipformer/optim.py, `BatchedOptimizer`; icefall/checkpoint.py,
`save_checkpoint`; RVC-Boss/GPT-SoVITS, GPT_SoVITS/AR/modules/optim.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypedDict

import numpy as np

from statekit.arrays.numpy_backend import NumpyBackend
from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.conversion.contracts import Encoded, Evidence
from statekit.converters.layouts.pytorch.lines import updating
from statekit.converters.layouts.pytorch.param_order import (
    BY_NAME,
    MODEL_PART,
    ORDERS,
    OWN_MODEL,
    REMEDY,
    Order,
    named_order,
    running_statistics,
)
from statekit.converters.layouts.pytorch.parts import (
    Parts,
    extra_of,
    find_parts,
    join_parts,
    names_of,
    path_of,
    shared_paths,
)
from statekit.errors import Faults, InexactError, StateError
from statekit.files.checkpoint import SORTED, Checkpoint
from statekit.lines.printing import UNKNOWN, SavedRun, State, quoted
from statekit.optim import scaled_adam
from statekit.optim.scaled_adam_clip import JOINT, batches
from statekit.state.schedules.called import KEY as CALLED
from statekit.state.schedules.icefall import IN_RUN, eden
from statekit.state.schema import all_variants, load_schema
from statekit.state.train_state import Counts, Group, Optimizer, TrainState
from statekit.tensors.tensor import Shape, Tensor, in_memory
from statekit.tensors.typed import Natural, misfits
from statekit.tensors.views import Slice, Stack

_LR = "lr"
"""What ScaledAdam calls the rate, which is canonical too."""
SCHEMA = "scaled_adam"
_SCHEDULER = "scheduler"
_SHARED = ("model_norms", "model_norm_threshold", "num_clipped")
_SIZE = ("param_rms", "scale_exp_avg_sq", "scale_grads")
_LATE_AXIS = ("scale_grads",)
_NOT_BEGUN = "The run has made no update, and icefall keeps no slots before the first: all begin anew."


@dataclass(frozen=True)
class Icefall:
    """ScaledAdam in a torch file."""

    name: str = "icefall"
    title: str = "ScaledAdam of icefall and GPT-SoVITS: slots of equally shaped parameters in one tensor"
    variants: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: all_variants((SCHEMA,)))
    containers: tuple[str, ...] = ("torch",)

    def detect(self, checkpoint: Checkpoint) -> Evidence | None:
        """Looks for scalar_lr_scale in the groups, and for delta beside exp_avg_sq once an update was made."""
        parts = find_parts(checkpoint)
        if parts is None or not all("scalar_lr_scale" in group for group in parts.groups):
            return None
        if not any(parts.state.values()):
            return Evidence(22, "an optimizer with scalar_lr_scale, before its first update")
        has_delta = any({"delta", "exp_avg_sq"} <= record.keys() for record in parts.state.values())
        if has_delta:
            return Evidence(20, "delta and exp_avg_sq under an optimizer with scalar_lr_scale")
        return None

    def decode(self, checkpoint: Checkpoint, hints: CheckpointRef) -> TrainState:
        """Returns the canonical state, each batch split into its members."""
        parts = find_parts(checkpoint, hints.model)
        if parts is None:
            raise StateError("The checkpoint has no model beside an optimizer.", place=checkpoint.path)
        order = _found_order(parts, bool(checkpoint.meta.get(SORTED)), hints)
        hyperparameters = load_schema(SCHEMA).hyperparameters
        groups = []
        for options, names in zip(parts.groups, order.groups, strict=True):
            values = {key: value for key, value in options.items() if key in hyperparameters}
            values |= {key: list(value) for key, value in values.items() if isinstance(value, tuple)}
            groups.append(Group(tuple(map(path_of, names)), values, dict.fromkeys(values, "file")))
        moved = [name for names in order.groups for name in names]
        params = {path_of(name): parts.model[name] for name in moved}
        filled = _Filling(parts, params, tuple(groups), checkpoint.path)
        filled.faults += shared_paths(moved)
        slots, joint, full = filled.slots()
        filled.faults.check(
            StateError, "The slots don't fit the parameters", place=checkpoint.path, remedy=REMEDY
        )
        extra = extra_of(parts, moved, hyperparameters)
        if (called := _schedule_call(parts)) is not None:
            extra[CALLED] = called
        state = TrainState(
            params,
            slots,
            Optimizer(SCHEMA, hints.variant, full),
            Counts(filled.updates, filled.updates, says_schedule=False),
            extra={**extra, **({JOINT: joint} if joint else {})},
            assumptions=(*order.notes, *_unknown_variant(hints.variant)),
        )
        return hints.applied(state.with_facts(lambda facts: [*facts, *order.facts]))

    def encode(self, state: TrainState) -> Encoded:
        """Returns the file's tree, members stacked into batches."""
        if state.optimizer.schema != SCHEMA:
            raise InexactError(
                "The layout icefall holds ScaledAdam's state only.",
                expected=SCHEMA,
                found=state.optimizer.schema,
            )
        index = {path: i for i, path in enumerate(state.optimizer.paths)}
        # Shapes alone don't tell which parameters an index means: of several groups, beside frozen ones, without slots.
        named = len(state.optimizer.groups) > 1 or len(index) < len(state.params) or not state.counts.updates
        names = names_of(state.extra, state.params)
        begun = state.counts.updates or state.counts.schedule  # a run that has made no update has no slots
        notes = () if begun or not any(state.slots.values()) else (_NOT_BEGUN,)
        groups = []
        for group in state.optimizer.groups:
            names_of_group = [names[path] for path in group.paths]
            groups.append(
                {
                    **_native_options(group),
                    **({"param_names": names_of_group} if named else {}),
                    "params": [index[path] for path in group.paths],
                }
            )
        native = _native_records(state, index, bool(begun))
        params = {names[path]: tensor for path, tensor in state.params.items()}
        joined = join_parts(state.extra, state.counts.updates, params, groups, native, (JOINT,))
        return replace(joined, assumptions=(*joined.assumptions, *notes))

    def lines(self, state: State, saved: SavedRun) -> list[str]:
        rates = saved.rates(state)
        stated = {
            repr(group["hyperparameters"].get(_LR))
            for group in state["groups"]
            if not saved.run.schedules or group["known_from"].get(_LR) == "given"
        }
        # The schedule multiplies the rate that each group began with.
        values = [schedule.parameters.get("base_lr") for schedule in saved.run.schedules]
        bases = {repr(value) for value in values if value is not None}
        stated = stated if len(stated) == 1 and stated != {"None"} else bases
        rate = stated.pop() if len(stated) == 1 else UNKNOWN
        eden = rates.icefall_call()
        groups = f"get_parameter_groups_with_lrs(model, lr={rate}, include_names=True)"
        schedule = [f"scheduler = {eden}", 'scheduler.load_state_dict(checkpoint["scheduler"])']
        other = [] if rates.torch_call() else rates.torch_lines() or rates.comment()
        return [
            "import torch",
            f"checkpoint = torch.load({quoted(saved.path)}, weights_only=False)  # runs what the file says",
            'model.load_state_dict(checkpoint["model"])',
            f"optimizer = ScaledAdam({groups}, lr={rate})",
            'optimizer.load_state_dict(checkpoint["optimizer"])',
            *(schedule if eden else other),
            *_given_lines(state, saved, is_scheduled=bool(eden or other)),
        ]


def _given_lines(state: State, saved: SavedRun, *, is_scheduled: bool) -> list[str]:
    """Returns the lines that keep what the user gave, in whose place loading puts the file's."""
    passed_over = ("parameters_names", *([_LR] if is_scheduled else []))
    given = [
        {
            name: group["hyperparameters"][name]
            for name, origin in group["known_from"].items()
            if origin == "given" and name not in passed_over
        }
        for group in state["groups"]
    ]
    return [] if saved.is_converted or not any(given) else updating("optimizer.param_groups", given)


class Record(TypedDict, total=False):
    """What a batch has: its count, a group's own numbers, and slots, of which a batch's first axis are its members."""

    step: Natural
    delta: Tensor
    exp_avg_sq: Tensor
    model_norms: Tensor
    model_norm_threshold: float | Tensor
    num_clipped: Natural | Tensor


def is_batch(slot: Any) -> bool:
    """Tells whether a slot is one of several parameters."""
    return isinstance(slot, Tensor) and bool(slot.shape)


class _Filling:
    """Slots on their way from batches to members."""

    def __init__(
        self, parts: Parts, params: Mapping[str, Tensor], groups: Sequence[Group], place: object
    ) -> None:
        self._parts, self._params, self._groups = parts, params, groups
        self.faults = Faults()
        for i, record in parts.state.items():
            self.faults += misfits(record, Record, ("state", i))
        self.faults.check(StateError, "What the optimizer keeps isn't ScaledAdam's", place=place)
        steps = {record["step"] for record in parts.state.values() if "step" in record}
        if len(steps) > 1:
            self.faults.add(f"batches have made different numbers of updates: {sorted(steps)}", "step")
        self.faults += [
            ("has slots and no step", f"state/{i}")
            for i, record in parts.state.items()
            if "step" not in record and any(is_batch(slot) for slot in record.values())
        ]
        self.updates = max(steps, default=0)

    def slots(self) -> tuple[dict[str, dict[str, Tensor]], dict[str, dict[str, Tensor]], tuple[Group, ...]]:
        """Returns slots by path, what belongs into `JOINT`, and the groups with their own slots."""
        slots: dict[str, dict[str, Tensor]] = {}
        joint: dict[str, dict[str, Tensor]] = {}
        groups, left = [], dict(self._parts.state)
        for group, options in zip(self._groups, self._parts.groups, strict=True):
            index = dict(zip(group.paths, options["params"], strict=True))
            shared: dict[str, Any] = {}
            for batch in _batches(self._params, group):
                record = left.pop(index[batch[0]], {})
                shared |= {name: record[name] for name in _SHARED if name in record}
                for slot, tensor in record.items():
                    if slot in ("step", *_SHARED) or not isinstance(tensor, Tensor):
                        continue
                    if self._one(batch[0], slot):
                        joint.setdefault(batch[0], {})[slot] = tensor
                        continue
                    self._split(batch, slot, tensor, slots)
            groups.append(self._with_shared(group, shared))
        self.faults += [
            ("has slots, and is no batch's first parameter", f"state/{i}") for i in left if left[i]
        ]
        return slots, joint, tuple(groups)

    def _one(self, path: str, slot: str) -> bool:
        return slot in _SIZE and int(np.prod(self._params[path].shape)) == 1

    def _split(
        self, batch: Sequence[str], slot: str, tensor: Tensor, slots: dict[str, dict[str, Tensor]]
    ) -> None:
        axis = int(slot in _LATE_AXIS)
        shape = self._params[batch[0]].shape
        member_shape = (*tensor.shape[:axis], *tensor.shape[axis + 1 :])
        fits = len(tensor.shape) > axis and tensor.shape[axis] == len(batch)
        expected = {"delta": shape, "exp_avg_sq": shape}.get(slot, member_shape[:axis] + (1,) * len(shape))
        if not fits or member_shape != expected:
            self.faults.add(f"{slot} has shape {tensor.shape} for {len(batch)} of {shape}", batch[0])
            return
        for place, path in enumerate(batch):
            slots.setdefault(path, {})[slot] = Slice(tensor, axis, place)

    def _with_shared(self, group: Group, shared: Mapping[str, Any]) -> Group:
        params = {path: np.zeros(0, np.float32) for path in group.paths}
        if group.hyperparameters.get("clipping_scale") is None or not params:
            return group
        schema = load_schema(SCHEMA)
        faults = Faults(
            (f"is {value!r}, {fault}", name)
            for name, value in group.hyperparameters.items()
            if (fault := schema.fault(name, value))
        )
        faults.check(StateError, f"Hyperparameters of {SCHEMA} can't be these")
        fresh = scaled_adam.begin(NumpyBackend(), params, group, schema.stepped[-1])
        group_slots = {}
        for name, array in fresh.items():
            value = shared.get(name)
            if isinstance(value, Tensor):
                group_slots[name] = value if value.shape == array.shape else in_memory(array, name)
                if value.shape != array.shape:
                    self.faults.add(f"{name} has shape {value.shape}, expected {array.shape}", group.paths[0])
            else:
                group_slots[name] = in_memory(
                    array if value is None else np.asarray(value, array.dtype), name
                )
        return Group(group.paths, group.hyperparameters, group.known_from, group_slots)


def _found_order(parts: Parts, is_sorted: bool, hints: CheckpointRef) -> Order:
    """Returns the order of parameters by names, by shapes, or, for a single group, by the live model."""
    named = named_order(parts.groups, parts.model, hints.param_names)
    if named is not None:
        return named
    statistics = {*running_statistics(parts.model)}
    params = {name: tensor for name, tensor in parts.model.items() if name not in statistics}
    try:
        return _order(replace(parts, model=params), is_sorted)
    except StateError:
        # Before the first update no slot has a shape that could contradict the model part.
        source = MODEL_PART if hints.model is None and not any(parts.state.values()) else OWN_MODEL
        ordered = [name for name in (params if source == MODEL_PART else hints.model or ()) if name in params]
        if len(parts.groups) != 1 or len(ordered) != len(parts.groups[0]["params"]):
            raise
        note = f"The optimizer names no parameters; they are taken in the order of {source}."
        return Order((tuple(ordered),), (note,), ORDERS[source])


def _native_options(group: Group) -> dict[str, Any]:
    """Returns a group's hyperparameters as icefall stores them: pairs are tuples."""
    values = group.hyperparameters
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def _batch_record(state: TrainState, batch: Sequence[str]) -> dict[str, Any]:
    """Returns the record of parameters of equal shape: each of their slots stacked."""
    if without := [path for path in batch if path not in state.slots]:
        raise InexactError(
            "A parameter has no slots, and ScaledAdam's file holds those of equal shape in one tensor.",
            place=", ".join(without[:5]),
            expected=f"slots of every parameter after {state.counts.updates} updates",
            found=f"none of {len(without)}",
        )
    names = dict.fromkeys(slot for path in batch for slot in state.slots[path])
    lacking = [(f"lacks {slot}", path) for path in batch for slot in names if slot not in state.slots[path]]
    Faults(lacking).check(StateError, "ScaledAdam's file has the slots of equal shape in one tensor")
    stacked = {
        slot: Stack([state.slots[path][slot] for path in batch], int(slot in _LATE_AXIS)) for slot in names
    }
    return {"step": state.counts.updates, **stacked, **state.extra.get(JOINT, {}).get(batch[0], {})}


def _order(parts: Parts, is_sorted: bool) -> Order:
    """Returns which parameter an index means: by the shapes of batches, and in each group as the model has them."""
    by_shape: dict[Shape, list[str]] = {}
    for name, tensor in parts.model.items():
        by_shape.setdefault(tensor.shape, []).append(name)
    faults, claimed, groups = Faults(), dict[Shape, int](), []
    for number, group in enumerate(parts.groups):
        batches = _batch_shapes(parts, group)
        for count, shape in batches.values():
            in_model = len(by_shape.get(shape, []))
            if (other := claimed.setdefault(shape, number)) != number:
                faults.add(f"stands in the groups {other} and {number}", f"shape {shape}")
            elif is_sorted and count > 1:
                faults.add(f"{count} parameters have it, {BY_NAME}", f"shape {shape}")
            elif in_model != count:
                faults.add(f"{count} in the optimizer, {in_model} in the model", f"shape {shape}")
        shapes = {shape for _, shape in batches.values()}
        names = tuple(name for name, tensor in parts.model.items() if tensor.shape in shapes)
        if not faults and not _stand_in_order(parts, group["params"], names, batches):
            faults.add("its parameters don't stand in the order of the model", f"group {number}")
        groups.append(names)
    faults.check(StateError, "Nothing tells which parameters the optimizer's indices mean", remedy=REMEDY)
    note = "The optimizer names no parameters; those of a group are taken in the order of the model part."
    return Order(tuple(groups), (note,), _assumed(by_shape, claimed))


def _assumed(names: Mapping[Shape, Sequence[str]], shapes: Iterable[Shape]) -> str:
    """Returns the order that was taken, where several parameters have one of the optimizer's shapes."""
    return ORDERS[MODEL_PART] if any(len(names[shape]) > 1 for shape in shapes) else ""


def _batch_shapes(parts: Parts, group: Mapping[str, Any]) -> dict[Any, tuple[int, Shape]]:
    """Returns how many parameters of which shape the batches of a group have, by the index of their first."""
    records = {i: parts.state.get(i, {}) for i in group["params"]}
    deltas = {i: record["delta"] for i, record in records.items() if is_batch(record.get("delta"))}
    return {i: (delta.shape[0], tuple(delta.shape[1:])) for i, delta in deltas.items()}


def _stand_in_order(
    parts: Parts, indices: Sequence[Any], names: Sequence[str], batches: Mapping[Any, tuple[int, Shape]]
) -> bool:
    """Tells whether the parameters of the model have, in its order, the shapes that a group's indices need."""
    if len(names) != len(indices):
        return False
    places = {i: place for place, i in enumerate(indices)}
    return all(parts.model[names[places[i]]].shape == shape for i, (_, shape) in batches.items())


def _batches(params: Mapping[str, Tensor], group: Group) -> tuple[tuple[str, ...], ...]:
    return batches({path: (params[path].dtype.name, *params[path].shape) for path in group.paths})


def _native_records(state: TrainState, index: Mapping[str, int], begun: bool) -> dict[int, dict[str, Any]]:
    """Returns the record of each batch, at the number of its first parameter."""
    records: dict[int, dict[str, Any]] = {}
    for group in state.optimizer.groups:
        batches = _batches(state.params, group)
        for batch in batches if begun else ():
            records[index[batch[0]]] = _batch_record(state, batch)
        if batches:
            records.setdefault(index[batches[0][0]], {}).update(_native_shared(state, group))
    return records


def _native_shared(state: TrainState, group: Group) -> Iterator[tuple[str, Any]]:
    """Yields the group's own slots that the original has by now."""
    if state.counts.updates < 2 or not group.slots:
        return
    yield "model_norms", group.slots["model_norms"]
    threshold = float(group.slots["model_norm_threshold"].read())
    if not np.isposinf(threshold):
        yield "model_norm_threshold", threshold
        yield "num_clipped", int(group.slots["num_clipped"].read())


def _unknown_variant(variant: str | None) -> tuple[str, ...]:
    if variant is not None:
        return ()
    variants = ", ".join(load_schema(SCHEMA).variants)
    return (f"The file doesn't say which generation ran: {variants}. Name it with --variant.",)


def _schedule_call(parts: Parts) -> dict[str, Any] | None:
    """Returns the call of the run's schedule as far as the file says it: its state is two counts.

    train.py puts its own settings beside them. Where the groups' rates are Eden's without a warm-up, that is over.
    """
    rest = parts.rest if isinstance(parts.rest, Mapping) else {}
    state = rest.get(_SCHEDULER)
    if not isinstance(state, Mapping) or not all(type(state.get(name)) is int for name in ("batch", "epoch")):
        return None
    arguments = {name: rest[name] for name in IN_RUN if type(rest.get(name)) in (int, float)}
    rates = [(group.get("base_lr", group.get("initial_lr")), group.get("lr")) for group in parts.groups]
    if {"lr_batches", "lr_epochs"} <= arguments.keys() and all(
        type(base) is float
        and type(rate) is float
        and math.isclose(eden(base, arguments, state["batch"], state["epoch"]), rate, rel_tol=1e-9)
        for base, rate in rates
    ):
        arguments |= {"warmup_batches": 0, "warmup_start": 1.0}
    return {"function": "Eden", "arguments": arguments, "whole": False}


LAYOUT = Icefall()
