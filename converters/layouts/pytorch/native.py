"""Optimizers of PyTorch that have no schema: their slots and options under their own names, and nothing else told.

A tensor in a parameter's record is a slot. `step`, where it is a whole number, is the parameter's count. An option of a
group is a hyperparameter. `extra` keeps the forms that these lose: of the count, of options that JSON has no type for,
and of what else a record holds.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from statekit.converters.layouts.hyperparameters import manifest_state
from statekit.converters.layouts.pytorch.contents import STEP, Signature
from statekit.converters.layouts.pytorch.parts import GROUPS
from statekit.files.checkpoint import Checkpoint
from statekit.state.train_state import PER_PARAMETER, TrainState
from statekit.tensors.tensor import DTYPES, Shape, Tensor, bytes_of, dtype_name, in_memory, scalar
from statekit.tensors.tree import Record, Tree, holds_records, mapped, plain, walk, with_leaves
from statekit.tensors.typed import Name, fits

SCHEMA = "torch_native"
_DTYPE = re.compile(r"torch\.[a-z0-9_]+")
"""Name of a type of values, which is no object."""
FORM = "torch_native"
"""Key in `extra`: the form in which most parameters have their count, and whether they share one tensor."""
_NOT_OPTIONS = ("params", "param_names")
_AVERAGES = (
    "The weights are averages, as the optimizer's eval() leaves them; its train() makes those that it moves."
)
_STEPS = ("global_step", STEP, "iteration")
"""Keys at the top of a file under which trainers keep the updates done."""


@dataclass(frozen=True)
class NativeRecord:
    """What an optimizer keeps of a parameter.

    Attributes:
        slots: Its tensors, by their own names; those inside lists and tables by their places, joined by dots.
        updates: The updates done; None where it doesn't count.
        count: In which form it counts: the dtype of a tensor, `int` or `float`; "" where it doesn't.
        others: What it holds besides, None in the place of each slot.
    """

    slots: Mapping[str, Tensor]
    updates: int | None
    count: str
    others: Mapping[Any, Tree]

    @staticmethod
    def of(record: Mapping[Any, Any]) -> NativeRecord:
        """Returns the record as it is read."""
        step, count = _whole_number(record.get(STEP))
        slots: dict[str, Tensor] = {}
        others: dict[Any, Tree] = {}
        for key, part in record.items():
            if key == STEP and count:
                continue
            inside = {".".join(map(str, (key, *place))): leaf for place, leaf in walk(part) if _is_slot(leaf)}
            if not fits(key, Name) or not slots.keys().isdisjoint(inside):
                others[key] = part
                continue
            slots |= inside
            if not isinstance(part, Tensor):
                others[key] = mapped(part, lambda leaf: None if _is_slot(leaf) else leaf)
        return NativeRecord(slots, step, count, others)

    def form(self) -> dict[str, Any]:
        """Returns what isn't in slots and counts; nothing of a record that has its slots and the usual count."""
        others = {"others": dict(self.others)} if self.others or not self.slots else {}
        return {"count": self.count, **others}


def _is_slot(leaf: Any) -> bool:
    return isinstance(leaf, Tensor)


def _whole_number(step: Any) -> tuple[int | None, str]:
    """Returns a count and its form; no form where it isn't a whole number that the form holds exactly."""
    if isinstance(step, Tensor):
        form = dtype_name(step.dtype) if step.shape == () else ""
    else:
        form = {int: "int", float: "float"}.get(type(step), "")
    number = scalar(step) if form else None
    if not isinstance(number, (int, float)) or not float(number).is_integer() or not 0 <= number < 2**53:
        return None, ""
    return int(number), form


@dataclass(frozen=True)
class NativeRecords:
    """What an optimizer keeps of its parameters.

    Attributes:
        slots: By path.
        counts: Updates by path, of the parameters that count them.
        extra: The forms of counts, and what else there is.
    """

    slots: Mapping[str, Mapping[str, Tensor]]
    counts: Mapping[str, int]
    extra: Mapping[str, Tree]


def read_records(records: Mapping[str, Mapping[Any, Any]]) -> NativeRecords:
    """Returns what records hold, which are by path."""
    read = {path: NativeRecord.of(record) for path, record in records.items()}
    usual = next(iter(Counter(record.count for record in read.values()).most_common(1)), ("", 0))[0]
    form = {
        "count": usual,
        **_shared([records[path][STEP] for path in read if usual == read[path].count != ""]),
    }
    unlike = {path: kept for path, record in read.items() if (kept := record.form()) != {"count": usual}}
    return NativeRecords(
        {path: record.slots for path, record in read.items()},
        {path: record.updates for path, record in read.items() if record.updates is not None},
        ({FORM: form} if read else {}) | ({PER_PARAMETER: unlike} if unlike else {}),
    )


def misfits_of(
    record: Mapping[Any, Any],
    signature: Signature | None,
    shape: Shape,
    counts: bool,
    options: Mapping[Any, Any],
) -> Iterator[tuple[str, str]]:
    """Yields the slots of a parameter with which the class that keeps them can't go on, each with its fault.

    Args:
        record: What is kept of the parameter; a parameter without a gradient has nothing yet.
        signature: The class.
        shape: The parameter's.
        counts: Whether the class counts updates; SGD doesn't, and begins a momentum that isn't there anew.
        options: Those of the parameter's group.
    """
    if signature is None or not signature.shaped or not record:
        return
    for name in signature.shaped:
        slot = record.get(name)
        if isinstance(slot, Tensor) and slot.shape != shape:
            yield f"has shape {slot.shape}, expected {shape}", name
        elif isinstance(slot, Tensor) and slot.dtype.kind in "biu":
            yield f"has dtype {slot.dtype}", name
    needed = _needed(signature, counts, options)
    yield from (("isn't there", name) for name in needed if record.get(name) is None)


def _needed(signature: Signature, counts: bool, options: Mapping[Any, Any]) -> list[str]:
    """Returns what a class looks for in the record of a parameter that it has moved, as `misfits_of`."""
    switched = [slot for option, slot in signature.switched.items() if options.get(option)]
    usual = signature.slots if counts or len(signature.slots) > 1 else ()
    return [*switched, *((STEP,) if counts else ()), *usual]


def _shared(steps: Sequence[Any]) -> dict[str, bool]:
    """Returns whether counts are one tensor that several parameters share."""
    tensors = [step for step in steps if isinstance(step, Tensor)]
    return {"shared": True} if len(tensors) > 1 and len({*map(bytes_of, tensors)}) == 1 else {}


def native_records(state: TrainState, paths: Sequence[str]) -> dict[str, dict[Any, Any]]:
    """Returns the records of some parameters by path, in the order in which they were born; undoes `read_records`."""
    usual: Mapping[str, Any] = state.extra.get(FORM) or {}
    forms: Mapping[str, Any] = state.extra.get(PER_PARAMETER) or {}
    wanted, steps = {*paths}, dict[tuple[str, int], Any]()
    records: dict[str, dict[Any, Any]] = {}
    for path in [*state.slots, *(path for path in forms if path not in state.slots)]:
        if path not in wanted:
            continue
        form = forms.get(path, usual)
        slots = dict(state.slots.get(path, {}))
        record: dict[Any, Any] = {}
        if count := form.get("count"):
            updates = state.counts.behind.get(path, state.counts.updates)
            step = steps.get((count, updates)) if usual.get("shared") else None
            record[STEP] = steps[count, updates] = _step(count, updates) if step is None else step
        others = {key: _filled(key, part, slots) for key, part in form.get("others", {}).items()}
        records[path] = {**record, **slots, **others}
    return records


def foreign_objects(state: TrainState) -> Iterator[tuple[str, str]]:
    """Yields the objects of an optimizer that `torch.load(weights_only=True)` refuses, and where they are."""
    for key in (GROUPS, FORM, PER_PARAMETER):  # where a state keeps them
        yield from _objects(state.extra.get(key), key)


def _objects(node: Tree, place: str) -> Iterator[tuple[str, str]]:
    is_dtype = isinstance(node, Record) and _DTYPE.fullmatch(node.name) is not None
    if isinstance(node, Record) and not (is_dtype and not node.args):
        yield f"an object of {node.name}", place
    parts = (
        node.items()
        if isinstance(node, Mapping)
        else enumerate(node)
        if isinstance(node, (list, tuple))
        else ()
    )
    for key, part in parts:
        yield from _objects(part, f"{place}/{key}")


def _step(form: str, updates: int) -> Any:
    if form in ("int", "float"):
        return updates if form == "int" else float(updates)
    return in_memory(np.asarray(updates, DTYPES[form]), STEP)


def _filled(key: Any, part: Tree, slots: dict[str, Tensor]) -> Tree:
    """Returns a part of a record with its slots in their places, which are taken out of `slots`."""
    names = {place: ".".join(map(str, (key, *place))) for place, leaf in walk(part) if leaf is None}
    return with_leaves(part, {place: slots.pop(name) for place, name in names.items() if name in slots})


def options_of(group: Mapping[Any, Any]) -> dict[str, Any]:
    """Returns a group's options, as far as JSON can show them."""
    return {
        key: value if _is_exact(value) else plain(value)
        for key, value in group.items()
        if key not in _NOT_OPTIONS and fits(key, Name) and _is_shown(value)
    }


def unlike_json(group: Mapping[Any, Any]) -> dict[Any, Tree]:
    """Returns a group's options that JSON has no type for, as they are: tuples, tensors, tables."""
    named = {key: value for key, value in group.items() if key not in _NOT_OPTIONS}
    return {key: value for key, value in named.items() if not (fits(key, Name) and _is_exact(value))}


def native_options(options: Mapping[str, Any], others: Mapping[Any, Tree]) -> dict[str, Any]:
    """Returns the options of a group that `others` doesn't have in their own types."""
    return {key: value for key, value in options.items() if key not in others or plain(others[key]) != value}


def _is_shown(value: Any) -> bool:
    return not holds_records(value) and not any(
        isinstance(leaf, Tensor) and leaf.shape for _, leaf in walk(value)
    )


def _is_exact(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, bool | int) or fits(value, Name)


def of_averages(groups: Sequence[Mapping[Any, Any]]) -> list[str]:
    """Returns what is to say of weights that were saved as averages.

    Source: facebookresearch/schedule_free schedulefree/adamw_schedulefree.py, `eval` and `train`.
    """
    return [_AVERAGES] if any(group.get("train_mode") is False for group in groups) else []


def stated_updates(groups: Sequence[Mapping[Any, Any]], rest: Tree, checkpoint: Checkpoint) -> int | None:
    """Returns the updates that a run has done whose records don't count them: as its groups or its trainer say.

    It is None where nothing says them.

    Args:
        groups: The optimizer's.
        rest: What lies beside model and optimizer.
        checkpoint: The checkpoint, which may have its step in its name or its manifest.
    """
    stated = [group.get("k" if "weight_lr_power" in group else STEP) for group in groups] + [
        rest.get(key) for key in _STEPS if isinstance(rest, Mapping)
    ]
    numbers = (number for number, form in map(_whole_number, stated) if form and number)
    manifest = manifest_state(checkpoint, SCHEMA)
    stands_at = manifest.schedule if manifest else 0
    return next(numbers, None) or checkpoint.step or stands_at or None
