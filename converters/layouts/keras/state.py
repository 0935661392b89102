"""What the layouts of Keras' own optimizers share, whatever the files: a state from numbered variables, and back.

Which optimizer it is stands in the model's config; in files without one, the optimizer's name says it. No file says
which variables are kept from weight decay: Keras itself forgets it. The optimizer's variables have numbers:

    0 iteration   1 learning_rate (not with a schedule)   averages of all parameters   a gradient_accumulator of each
    Adam, AdamW, Lamb: m and v of each parameter; then v_max of each
    Adafactor:         r, c and v of each parameter; r and c of vectors are int32 zeros, v of matrices follows

Source: keras-team/keras, keras/src/optimizers/base_optimizer.py, `BaseOptimizer.get_config`;
keras/src/optimizers/{base_optimizer,adam,lamb,adafactor}.py, `build`.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any

import numpy as np

from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.converters.layouts.hyperparameters import Hyperparameters, ManifestRecord
from statekit.errors import Faults, InexactError, StateError
from statekit.state.constants import variant_constants
from statekit.state.factoring import by_shape, swapped
from statekit.state.schedules.called import KEY as CALLED
from statekit.state.schema import load_schema
from statekit.state.stored_slots import FACTORED, placeholder, stored_shape
from statekit.state.train_state import Counts, Group, Optimizer, Rule, TrainState
from statekit.tensors.tensor import DTYPES, Filled, Shape, Tensor, in_memory

ITERATION, RATE, AVERAGE, ACCUMULATOR = "iteration", "learning_rate", "average", "gradient_accumulator"
_OWN = {"adamw": ("m", "v"), "lamb": ("m", "v"), "adafactor": ("v_row", "v_col", "v")}


@dataclass(frozen=True)
class Kept:
    """What an optimizer keeps.

    Attributes:
        rate: A variable for the learning rate.
        average: Averages of the parameters.
        accumulate: Gradients of an unfinished accumulation.
        amsgrad: The maximum of v.
    """

    rate: bool
    average: bool = False
    accumulate: bool = False
    amsgrad: bool = False


@dataclass(frozen=True)
class Numbered:
    """An optimizer's variables, told apart.

    Attributes:
        kept: What it keeps.
        shapes: Shape of each parameter.
        iteration: Calls so far.
        rate: The learning rate.
        slots: For each parameter, by canonical name, `gradient_accumulator` among them.
    """

    kept: Kept
    shapes: tuple[Shape, ...]
    iteration: Tensor
    rate: Tensor | None
    slots: tuple[Mapping[str, Tensor], ...]


def places(schema: str, shapes: Sequence[Shape], kept: Kept) -> Iterator[tuple[int | None, str, Shape]]:
    """Yields, for each of an optimizer's variables, its parameter's number, what it is, and its shape."""
    yield None, ITERATION, ()
    if kept.rate:
        yield None, RATE, ()
    if kept.average:
        yield from ((i, AVERAGE, shape) for i, shape in enumerate(shapes))
    if kept.accumulate:
        yield from ((i, ACCUMULATOR, shape) for i, shape in enumerate(shapes))
    for i, shape in enumerate(shapes):
        for slot in _OWN[schema]:
            yield i, slot, slot_shape(slot, shape)
    if kept.amsgrad:
        yield from ((i, "v_max", shape) for i, shape in enumerate(shapes))


def slot_shape(slot: str, shape: Shape) -> Shape:
    """Returns the shape of a slot, or of what stands for it."""
    stands = _placeholder(slot, shape)
    return stored_shape(VARIANT, slot, usual_rule(shape), shape) if stands is None else stands.shape


def _placeholder(slot: str, shape: Shape) -> Tensor | None:
    """Returns what stands for a slot that a parameter doesn't use; None for the others."""
    if slot not in FACTORED or usual_rule(shape).factored:
        return None
    return placeholder(VARIANT, slot, DTYPES["float32"])


def numbered(
    schema: str, variables: Sequence[Tensor], known: Mapping[str, bool], model: Sequence[Shape] = ()
) -> Numbered:
    """Tells an optimizer's variables apart.

    Args:
        schema: The optimizer.
        variables: In their order.
        known: What is known of what it keeps: `rate`, `average`, `accumulate`, `amsgrad`.
        model: Shapes of all variables that it may move, which decide where its own leave several ways open.

    Raises:
        StateError: They aren't the variables of such an optimizer, or could be several ways.
    """
    options = ("rate", "average", "accumulate", *(("amsgrad",) if schema == "adamw" else ()))
    choices = itertools.product(*((known[o],) if o in known else (True, False) for o in options))
    fits = [
        fit
        for choice in choices
        if (fit := _fit(schema, variables, Kept(**dict(zip(options, choice, strict=True))))) is not None
    ]
    if len(fits) > 1:
        fits = [fit for fit in fits if Counter(fit.shapes) == Counter(model)] or fits
    if len(fits) == 1:
        return fits[0]
    raise StateError(
        f"The optimizer's {len(variables)} variables "
        + ("could be several things." if fits else f"aren't those of Keras' {schema}."),
        expected="iteration, learning_rate unless there is a schedule, then slots",
        found="; ".join(f"{fit.kept}" for fit in fits)
        or f"shapes {[variable.shape for variable in variables][:20]}",
        remedy="give --hparams with use_ema and amsgrad, or read the .keras file" if fits else "",
    )


def _fit(schema: str, variables: Sequence[Tensor], kept: Kept) -> Numbered | None:
    before = 1 + kept.rate
    each = len(_OWN[schema]) + kept.average + kept.accumulate + kept.amsgrad
    count, left = divmod(len(variables) - before, each)
    if left or count < 0 or not variables or variables[0].dtype.kind not in "iu":
        return None
    first = before if kept.average or kept.accumulate else None
    step = len(_OWN[schema])
    shapes = tuple(
        variables[before + i if first else before + (i + 1) * step - 1].shape for i in range(count)
    )
    slots: list[dict[str, Tensor]] = [{} for _ in shapes]
    for (i, name, shape), variable in zip(places(schema, shapes, kept), variables, strict=True):
        if variable.shape != shape or (name == RATE and variable.dtype.kind not in "fV"):
            return None
        if i is not None:
            unused = _placeholder(name, shapes[i]) is not None
            if unused != (variable.dtype.kind in "iu"):
                return None
            slots[i] |= {} if unused else {name: variable}
    return Numbered(kept, shapes, variables[0], variables[1] if kept.rate else None, tuple(slots))


VARIANT = "keras"
HOME = "keras"
"""Key in `extra` of what a file of Keras holds besides."""
SCHEMAS = {"Adam": "adamw", "AdamW": "adamw", "Lamb": "lamb", "Adafactor": "adafactor"}
"""Class in a config -> schema."""
_NAMES = {"adam": "Adam", "adam_w": "AdamW", "lamb": "Lamb", "adafactor": "Adafactor"}
_DECAY, _PERIODS = "weight_decay_rate", "gradient_accumulation_steps"


@dataclass(frozen=True)
class Named:
    """Which optimizer of Keras a file is about.

    Attributes:
        kind: Its class.
        config: Its arguments, if the file has them.
        kept: What it keeps, if the file says so.
    """

    kind: str
    config: Mapping[str, Any] | None = None
    kept: Kept | None = None

    @property
    def schema(self) -> str:
        """Its schema."""
        return SCHEMAS[self.kind]

    def known_kept(self, hints: CheckpointRef) -> dict[str, bool]:
        """Returns what is known of the variables that it keeps."""
        if self.kept is not None:
            return asdict(self.kept)
        said = {**(self.config or {}), **hints.hyperparameters}
        options = {AVERAGE: "use_ema", "amsgrad": "amsgrad", "accumulate": "gradient_accumulation_steps"}
        known = said.keys() if self.config is None else options.values()
        kept = {name: bool(said.get(option)) for name, option in options.items() if option in known}
        if self.config is not None:
            kept["rate"] = not isinstance(self.config.get(RATE), Mapping)
        return kept


def by_config(config: Any) -> Named | None:
    """Returns the optimizer of a model's config; None if it is none of Keras' own that statekit knows."""
    compiled = config.get("compile_config") if isinstance(config, Mapping) else None
    optimizer = compiled.get("optimizer") if isinstance(compiled, Mapping) else None
    if not isinstance(optimizer, Mapping) or optimizer.get("registered_name") is not None:
        return None
    kind, settings = optimizer.get("class_name"), optimizer.get("config")
    return Named(kind, settings) if kind in SCHEMAS and isinstance(settings, Mapping) else None


def by_name(name: Any) -> Named | None:
    """Returns the optimizer that goes by this name unless it was given another one."""
    plain = re.sub(r"_\d+$", "", name) if isinstance(name, str) else ""
    return Named(_NAMES[plain]) if plain in _NAMES else None


@dataclass(frozen=True)
class Parts:
    """A run of Keras.

    Attributes:
        named: The optimizer.
        numbered: Its variables.
        moved: The parameters that it moves, in its order.
        frozen: Parameters that it doesn't.
        notes: What was assumed so far.
        home: What a file of this kind holds besides.
    """

    named: Named
    numbered: Numbered
    moved: Mapping[str, Tensor]
    frozen: Mapping[str, Tensor]
    notes: Sequence[str] = ()
    home: Mapping[str, Any] = field(default_factory=dict)


def state_of(parts: Parts, key: str, known: ManifestRecord | None, hints: CheckpointRef) -> TrainState:
    """Returns the canonical state.

    Args:
        parts: The run.
        key: Key in `extra` for its home.
        known: What a conversion's manifest says.
        hints: What the user says, in Keras' names or canonical ones.

    Raises:
        StateError: It makes no state.
        UsageError: A hint that the schema doesn't know.
    """
    schema, numbered_slots = load_schema(parts.named.schema), parts.numbered
    slots_of, rules = dict[str, dict[str, Tensor]](), dict[str, Rule]()
    derived, accumulated = dict[str, Tensor](), dict[str, Tensor]()
    for (path, param), slots in zip(parts.moved.items(), numbered_slots.slots, strict=True):
        param_slots = dict(slots)
        if ACCUMULATOR in param_slots:
            accumulated[path] = param_slots.pop(ACCUMULATOR)
        if schema.name == "adafactor":
            rules[path] = usual_rule(param.shape)
            if rules[path].factored:
                derived[path] = param_slots.pop("v")
        slots_of[path] = param_slots
    settings, notes = _settings(parts)
    if known is not None and known.groups:
        groups = tuple(member.group() for member in known.groups)
        notes = list(known.assumptions)
    else:
        groups = (Group(tuple(parts.moved), settings.values, settings.known_from),)
        notes = [*parts.notes, *notes]
    periods = next((g.hyperparameters.get(_PERIODS) for g in groups), None)
    periods = hints.hyperparameters.get(_PERIODS, periods) or 1
    calls = int(numbered_slots.iteration.read())
    if calls < 0:
        raise StateError("The optimizer's iteration is negative.", found=calls)
    home = {
        **parts.home,
        "class": parts.named.kind,
        "iteration": calls,
        "iteration_dtype": numbered_slots.iteration.dtype.name,
        "schedule": True if numbered_slots.rate is None else None,
        "derived_v": derived,
        "gradient_accumulators": accumulated,
    }
    extra: dict[str, Any] = {key: {name: part for name, part in home.items() if part not in ({}, None)}}
    extra |= called_by(parts.named.config)
    state = TrainState(
        {**parts.moved, **parts.frozen},
        slots_of,
        Optimizer(schema.name, VARIANT, groups),
        Counts(calls // periods, calls),
        rules,
        extra,
        tuple(notes),
    )
    return hints.applied(state)


def called_by(config: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns what an optimizer's config says of a schedule in the place of its rate, for a state's extra."""
    made = (config or {}).get(RATE)
    if not isinstance(made, Mapping) or not isinstance(made.get("config"), Mapping):
        return {}
    said = {"function": str(made.get("class_name")), "arguments": dict(made["config"]), "whole": True}
    return {CALLED: said}


@cache
def usual_rule(shape: Shape) -> Rule:
    """Returns how Keras' Adafactor factors a parameter."""
    return Rule(by_shape(variant_constants("adafactor", VARIANT), shape, True), "file")


def _settings(parts: Parts) -> tuple[Hyperparameters, list[str]]:
    """Returns the hyperparameters that the file tells, and what was assumed besides."""
    schema, named, kept = load_schema(parts.named.schema), parts.named, parts.numbered.kept
    usual = dict(schema.variant(VARIANT)["defaults"])
    usual |= {_DECAY: None} if named.kind == "Adam" else {}
    usual.pop(RATE)
    settings = Hyperparameters().over(usual, "assumed")
    notes = []
    if named.config is not None:
        said = schema.canonical(VARIANT, named.config)
        settings = settings.over({n: v for n, v in said.items() if n != RATE}, "file")
        if settings.values.get(_DECAY):
            notes.append("No file of Keras says what is kept from weight decay; assumed: nothing is.")
    else:
        seen = {"use_ema": kept.average} | ({"amsgrad": kept.amsgrad} if schema.name == "adamw" else {})
        settings = settings.over({n: v for n, v in seen.items() if n in usual}, "file")
        open_ = ", ".join(f"{n}={v}" for n, v in settings.assumed().items())
        notes.append(f"The file holds no config; assumed: {open_}.")
    rate = None if parts.numbered.rate is None else float(parts.numbered.rate.read())
    if rate is not None and math.isfinite(rate):
        settings = settings.over({RATE: rate}, "file")
    return settings, notes


def kind_of(state: TrainState, home: Mapping[str, Any]) -> str:
    """Returns the class that goes on with a state: Adam only if that was it, and nothing is decayed."""
    kind = {"adafactor": "Adafactor", "lamb": "Lamb"}.get(state.optimizer.schema)
    if kind:
        return kind
    decays = any(group.hyperparameters.get(_DECAY) for group in state.optimizer.groups)
    return "Adam" if home.get("class") == "Adam" and not decays else "AdamW"


def usual_name(kind: str) -> str:
    """Returns what an optimizer of a class is called unless it was given a name."""
    return next(name for name, one in _NAMES.items() if one == kind)


def order_of(state: TrainState) -> list[str]:
    """Returns the parameters that the optimizer moves, in the order in which a model has them.

    Files of Keras make states whose parameters stand in that order; those from elsewhere say it by their only group.
    """
    groups = state.optimizer.groups
    moved = {path for group in groups for path in group.paths}
    if len(groups) == 1 and HOME not in state.extra:
        return list(groups[0].paths)
    return [path for path in state.params if path in moved]


def variables_of(
    state: TrainState, home: Mapping[str, Any], layout: str
) -> tuple[Kept, list[tuple[int | None, str, Tensor]]]:
    """Returns which variables an optimizer keeps, and each: number of the parameter, what it is, the tensor.

    Raises:
        InexactError: No optimizer of Keras holds the state; lists every reason.
    """
    schema = state.optimizer.schema
    if schema not in SCHEMAS.values():
        raise InexactError(
            f"The layout {layout} holds no state of {schema}.",
            expected=", ".join(sorted({*SCHEMAS.values()})),
            found=schema,
        )
    order, faults = order_of(state), Faults()
    slots = [_own(state, path, home, faults) for path in order]
    kept = _kept(state, home, slots, order, faults)
    variables: list[tuple[int | None, str, Tensor]] = []
    dtype = DTYPES[str(home.get("iteration_dtype", "int64"))]
    for i, name, _ in places(schema, [state.params[path].shape for path in order], kept):
        if name == ITERATION:
            variables.append((i, name, in_memory(np.asarray(calls_of(state, home), dtype), ITERATION)))
        elif i is None:
            rate = rate_of(state)
            value = np.asarray(math.nan if rate is None else rate, np.float32)
            variables.append((i, name, in_memory(value, RATE)))
        elif name in slots[i]:
            variables.append((i, name, slots[i].pop(name)))
        elif (stands := _placeholder(name, state.params[order[i]].shape)) is not None:
            variables.append((i, name, stands))
        else:
            faults.add(f"has no slot {name}", order[i])
    faults += [
        (f"has slot {name}, for which there is no place", path)
        for path, left in zip(order, slots, strict=True)
        for name in left
    ]
    faults += [
        (f"has slot {n} as a whole", f"groups/{i}")
        for i, g in enumerate(state.optimizer.groups)
        for n in g.slots
    ]
    faults.check(InexactError, "Keras' optimizers can't hold the state")
    return kept, variables


def calls_of(state: TrainState, home: Mapping[str, Any]) -> int:
    """Returns how often the optimizer was called: more often than it made updates while it accumulates gradients.

    Raises:
        InexactError: Updates were counted anew between two of them, where gradients wait for the next.
    """
    group = state.optimizer.groups[0].hyperparameters if state.optimizer.groups else {}
    periods = group.get("gradient_accumulation_steps") or 1
    calls = int(home.get("iteration", 0))
    if calls // periods == state.counts.updates:
        return calls
    if calls % periods:
        raise InexactError(
            "Updates can't be counted anew between two of them: gradients wait for the next, and Keras has one number.",
            expected=f"iterations that {periods} gradient_accumulation_steps divide",
            found=calls,
            remedy="save the run after an update",
        )
    return state.counts.updates * periods


NO_RATE = "nobody said the learning rate: it is NaN, to be set before training goes on"
"""Why the learning rate in a file isn't one."""


def rate_of(state: TrainState) -> float | None:
    """Returns the learning rate that all groups have; None if nobody said one, or a schedule does."""
    rates = {group.hyperparameters.get(RATE) for group in state.optimizer.groups}
    rate = next(iter(rates)) if len(rates) == 1 else None
    return float(rate) if isinstance(rate, (int, float)) else None


def _kept(
    state: TrainState,
    home: Mapping[str, Any],
    slots_in_order: Sequence[Mapping[str, Tensor]],
    order: Sequence[str],
    faults: Faults,
) -> Kept:
    """Returns which variables there are; all parameters must have the same."""
    kept = {}
    for name in (AVERAGE, ACCUMULATOR, "v_max"):
        having = [path for path, slots in zip(order, slots_in_order, strict=True) if name in slots]
        kept[name] = bool(having)
        if having and len(having) < len(order):
            faults.add(f"some parameters have {name} and others don't", having[0])
    rate = rate_of(state) is not None or not home.get("schedule")
    return Kept(rate, kept[AVERAGE], kept[ACCUMULATOR], kept["v_max"])


def _own(state: TrainState, path: str, home: Mapping[str, Any], faults: Faults) -> dict[str, Tensor]:
    """Returns a parameter's slots as Keras names them canonically: by the axes that they have averaged away."""
    slots, param = dict(state.slots.get(path, {})), state.params[path]
    accumulated = home.get("gradient_accumulators", {}).get(path)
    if accumulated is not None:
        slots[ACCUMULATOR] = accumulated
    if state.optimizer.schema != "adafactor":
        return slots
    usual, rule = usual_rule(param.shape), state.rules.get(path)
    if rule is not None and rule.axes == swapped(usual.axes) and rule.factored:
        slots["v_row"], slots["v_col"] = slots["v_col"], slots["v_row"]
    elif rule is not None and rule.axes != usual.axes:
        axes = ", ".join(axis.value for axis in rule.axes)
        faults.add(f"is factored by {axes}; Keras would: {', '.join(a.value for a in usual.axes)}", path)
    if usual.factored and "v_row" in slots and "v" not in slots:
        why = "Keras makes it anew from r and c at each update"
        slots["v"] = home.get("derived_v", {}).get(path) or Filled(param.shape, param.dtype, 0, why)
    return slots
