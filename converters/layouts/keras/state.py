"""What the layouts of Keras' own optimizers share, whatever the files: a state from numbered variables, and back.

Which optimizer it is stands in the model's config; in files without one, the optimizer's name says it. No file says
which variables are kept from weight decay: Keras itself forgets it. The optimizer's variables have numbers:

    0 iteration   1 learning_rate (not with a schedule)   averages of all parameters   a gradient_accumulator of each
    Adam, AdamW, Lamb: m and v of each parameter; then v_max of each
    Adafactor:         r, c and v of each parameter; r and c of vectors are int32 zeros, v of matrices follows

Keras 2 has no variable for the rate, which its config says, and no zeros for the r and c of vectors.

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
from statekit.state.evidence import Fact
from statekit.state.factoring import FACTORED, by_shape, placeholder, stored_shape, swapped
from statekit.state.schedules.called import KEY as CALLED
from statekit.state.schema import load_schema
from statekit.state.train_state import Counts, Group, Optimizer, Rule, TrainState
from statekit.tensors.tensor import DTYPES, Filled, Shape, Tensor, in_memory
from statekit.tensors.typed import fits

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
        placeholders: Zeros for the slots that a parameter does not use, as Keras 3 has them and Keras 2 has not.
    """

    rate: bool
    average: bool = False
    accumulate: bool = False
    amsgrad: bool = False
    placeholders: bool = True

    def __str__(self) -> str:
        names = {
            "learning_rate": self.rate,
            "averages of the parameters": self.average,
            "accumulated gradients": self.accumulate,
            "the maximum of v": self.amsgrad,
        }
        return ", ".join([*(name for name, is_kept in names.items() if is_kept), "slots"])


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
            if kept.placeholders or _placeholder(slot, shape) is None:
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
    schema: str, variables: Sequence[Tensor], flags: Mapping[str, bool], model: Sequence[Tensor] = ()
) -> Numbered:
    """Tells an optimizer's variables apart.

    Args:
        schema: The optimizer.
        variables: In their order.
        flags: Whether it keeps each of `rate`, `average`, `accumulate`, `amsgrad`, as far as the file says.
        model: All variables that it may move, which decide where its own leave several ways open.

    Raises:
        StateError: They aren't the variables of such an optimizer, or could be several ways.
    """
    shapes = [tensor.shape for tensor in model]
    ways = (_fit(schema, variables, kept, shapes) for kept in _choices(schema, variables, flags))
    fits = [fit for fit in ways if fit is not None]
    fits = _decided(fits, model)
    if len(fits) == 1:
        return fits[0]
    count, expected = len(variables), "iteration, learning_rate unless there is a schedule, then slots"
    if not fits:
        raise StateError(
            f"The optimizer's {count} variables aren't those of Keras' {schema}.",
            expected=expected,
            found=f"shapes {[variable.shape for variable in variables][:20]}",
        )
    raise StateError(
        f"The optimizer's {count} variables could be several things.",
        expected=expected,
        found="; ".join(str(fit.kept) for fit in fits),
        remedy="give --hparams with use_ema, gradient_accumulation_steps or amsgrad, or read the .keras file",
    )


def _decided(fits: list[Numbered], model: Sequence[Tensor]) -> list[Numbered]:
    """Returns the ways that the model leaves open: by its shapes, then by what is like its weights."""
    shapes = Counter(tensor.shape for tensor in model)
    if len(fits) > 1:
        fits = [fit for fit in fits if Counter(fit.shapes) == shapes] or fits
    if len(fits) > 1:
        fits = [fit for fit in fits if _is_average_by_value(fit, model)] or fits
    return fits


def _choices(schema: str, variables: Sequence[Tensor], flags: Mapping[str, bool]) -> Iterator[Kept]:
    """Yields the sets of variables that an optimizer may keep, given the known facts."""
    # Only Keras 3 has zeros for slots that a parameter does not use, and they alone are whole numbers.
    has_zeros = any(variable.dtype.kind in "iu" for variable in variables[1:])
    facts = {**flags, "placeholders": schema != "adafactor" or has_zeros}
    options = ("rate", "average", "accumulate", *(("amsgrad",) if schema == "adamw" else ()), "placeholders")
    for choice in itertools.product(*((facts[o],) if o in facts else (True, False) for o in options)):
        yield Kept(**dict(zip(options, choice, strict=True)))


_ALIKE, _READ = 0.9, 2**16
"""Cosine above which arrays are taken for averages of the weights; most elements of an array that is compared."""


def _is_average_by_value(fit: Numbered, model: Sequence[Tensor]) -> bool:
    """Tells whether what a fit takes for averages of the weights, and nothing else of their shape, is like them.

    Averages begin as the weights and follow them; accumulated gradients and moments point anywhere.
    """
    if not fit.kept.average or fit.kept.accumulate or fit.shapes != tuple(tensor.shape for tensor in model):
        return False
    small = [
        (weight, slots[AVERAGE])
        for weight, slots in zip(model, fit.slots, strict=True)
        if math.prod(weight.shape) <= _READ
    ]
    if not small:
        return False
    weights, averages = (
        np.concatenate([np.asarray(tensor.read(), np.float64).ravel() for tensor in tensors])
        for tensors in zip(*small, strict=True)
    )
    return bool(weights @ averages > _ALIKE * np.linalg.norm(weights) * np.linalg.norm(averages))


def _fit(schema: str, variables: Sequence[Tensor], kept: Kept, model: Sequence[Shape]) -> Numbered | None:
    """Returns an optimizer's variables as one that keeps just this has them; None if they are not."""
    if not variables or variables[0].dtype.kind not in "iu":
        return None
    shapes = _shapes(schema, variables, kept, model)
    expected = [] if shapes is None else [*places(schema, shapes, kept)]
    if shapes is None or len(expected) != len(variables):
        return None
    slots: list[dict[str, Tensor]] = [{} for _ in shapes]
    for (i, name, shape), variable in zip(expected, variables, strict=True):
        is_slot = i is not None and _placeholder(name, shapes[i]) is None
        # Counts and placeholders are whole numbers; the rate and every slot are not.
        is_whole = not is_slot and name != RATE
        if variable.shape != shape or (variable.dtype.kind in "iu") != is_whole:
            return None
        if i is not None and is_slot:
            slots[i][name] = variable
    return Numbered(kept, shapes, variables[0], variables[1] if kept.rate else None, tuple(slots))


def _shapes(
    schema: str, variables: Sequence[Tensor], kept: Kept, model: Sequence[Shape]
) -> tuple[Shape, ...] | None:
    """Returns the shape of each parameter, by the optimizer's variables; None if they make no whole number of them."""
    before, step = 1 + kept.rate, len(_OWN[schema])
    if schema == "adafactor" and not kept.placeholders:
        copies = len(model) * (kept.average + kept.accumulate)
        return _shapes_apart([variable.shape for variable in variables[before + copies :]])
    per_param = step + kept.average + kept.accumulate + kept.amsgrad
    count, left = divmod(len(variables) - before, per_param)
    if left or count < 0:
        return None
    if kept.average or kept.accumulate:
        return tuple(variable.shape for variable in variables[before : before + count])
    return tuple(variables[before + (i + 1) * step - 1].shape for i in range(count))


def _shapes_apart(shapes: Sequence[Shape]) -> tuple[Shape, ...]:
    """Returns the shapes of parameters whose slots are `r, c, v` of a matrix and `v` alone of a vector, in a row."""
    params: list[Shape] = []
    at = 0
    while at < len(shapes):
        whole = shapes[at + 2] if at + 2 < len(shapes) else ()
        is_matrix = len(whole) > 1 and shapes[at] == whole[:-1] and shapes[at + 1] == (*whole[:-2], whole[-1])
        params.append(whole if is_matrix else shapes[at])
        at += 3 if is_matrix else 1
    return tuple(params)


VARIANT = "keras"
AROUND = "around"
"""Key of the home: a loss scale's variables and record; models of mixed precision take no file without them."""
HOME = "keras"
"""Key in `extra` of what a file of Keras holds besides."""
HOMES = {
    "tree": "what a file of Keras has besides: its config, states that aren't parameters",
    "places": "where a parameter lies in a file of Keras",
    "graph": "the objects of tf.train.Checkpoint that aren't parameters",
    "whole_h5": "what a whole-model .h5 has besides: its configs, states that aren't parameters",
    "around": "what a loss scale has around the optimizer",
    "keras2": "that Keras 2 laid out the optimizer's variables",
}
"""What each form of Keras' files has besides, by its keys in the home."""
FORMS = {"keras-model-h5": "whole_h5", "tf2-keras2": "graph", "keras": "tree"}
"""Layout -> what a home has of a state of Keras 2 that came from the layout's form of file."""


def origin_in_keras2(home: Mapping[str, Any]) -> str | None:
    """Returns the layout that goes on in Keras 2 with a state of it; None for a state from elsewhere."""
    return next((name for name, key in FORMS.items() if key in home), None) if home.get("keras2") else None


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
        is_keras2: Whether it is one of Keras 2, which has its rate in the config alone.
        is_partial: Whether `config` lacks arguments, as a TensorFlow checkpoint has only those that are variables.
        given: What the user calls it, where no file names it.
    """

    kind: str
    config: Mapping[str, Any] | None = None
    kept: Kept | None = None
    is_keras2: bool = False
    is_partial: bool = False
    given: str | None = None

    @property
    def schema(self) -> str:
        """Its schema."""
        return SCHEMAS[self.kind]

    def known_kept(self, hints: CheckpointRef) -> dict[str, bool]:
        """Returns the known facts about the variables that it keeps."""
        if self.kept is not None:
            return asdict(self.kept)
        stated = {**(self.config or {}), **hints.hyperparameters}
        options = {AVERAGE: "use_ema", "amsgrad": "amsgrad", "accumulate": "gradient_accumulation_steps"}
        names = stated.keys() if self.config is None else options.values()
        kept = {name: bool(stated.get(option)) for name, option in options.items() if option in names}
        if self.config is not None:
            kept["rate"] = not self.is_keras2 and not isinstance(self.config.get(RATE), Mapping)
        return kept


def by_config(config: Any, is_keras2: bool = False) -> Named | None:
    """Returns the optimizer of a model's config; None if it is none of Keras' own that statekit knows."""
    compiled = config.get("compile_config") if isinstance(config, Mapping) else None
    optimizer = compiled.get("optimizer") if isinstance(compiled, Mapping) else None
    if not isinstance(optimizer, Mapping) or optimizer.get("registered_name") is not None:
        return None
    kind, settings = class_and_config(optimizer)
    return Named(kind, settings, None, is_keras2) if kind in SCHEMAS and settings is not None else None


def called(record: Mapping[str, Any]) -> tuple[str, Mapping[str, Any] | None]:
    """Returns class and arguments of a record of Keras' serialization; None for arguments that it has not."""
    settings = record.get("config")
    return str(record.get("class_name")), settings if isinstance(settings, Mapping) else None


def class_and_config(record: Mapping[str, Any]) -> tuple[str, Mapping[str, Any] | None]:
    """Returns class and arguments of an optimizer: of the one inside where a loss scale is around it.

    Source: keras-team/keras v2.15.0, keras/mixed_precision/loss_scale_optimizer.py, `get_config`;
    keras/saving/object_registration.py, `get_registered_name`, which puts `Custom>` before new optimizers.
    """
    kind, settings = called(record)
    inner = (settings or {}).get("inner_optimizer")
    if kind in LOSS_SCALES and isinstance(inner, Mapping):
        kind, settings = called(inner)
    return kind.removeprefix("Custom>"), settings


def unknown_class(config: Any, name: Any, place: object) -> StateError:
    """Returns the error of a file of Keras whose optimizer has no schema, by the name that its config has for it.

    Args:
        config: The model's config.
        name: What the file calls the optimizer elsewhere.
        place: The file.
    """
    compiled = config.get("compile_config") if isinstance(config, Mapping) else None
    record = compiled.get("optimizer") if isinstance(compiled, Mapping) else None
    kind = class_and_config(record)[0] if isinstance(record, Mapping) and record.get("class_name") else None
    alone = "statekit convert FILE weights.safetensors --params-only takes the weights alone"
    if kind is not None:
        return StateError(
            f"The optimizer is {kind}, and statekit does not read it from this form of file.",
            place=place,
            expected=", ".join(SCHEMAS),
            found=kind,
            remedy=alone,
        )
    return StateError(
        "The file doesn't say which optimizer of Keras it is about.",
        place=place,
        expected=", ".join(SCHEMAS),
        found=name or "no name",
        remedy=f"name the optimizer that ran (--optimizer Adam), read the .keras file, which has its config; {alone}",
    )


LOSS_SCALES = ("LossScaleOptimizer", "LossScaleOptimizerV3")


def by_name(name: Any) -> Named | None:
    """Returns the optimizer that goes by this name unless it was given another one."""
    plain = re.sub(r"_\d+$", "", name) if isinstance(name, str) else ""
    return Named(_NAMES[plain]) if plain in _NAMES else None


def by_user(name: str | None) -> Named | None:
    """Returns the optimizer that a user names, by its class however it is written; None if there is none."""
    kinds = {kind.casefold(): kind for kind in SCHEMAS}
    kind = kinds.get((name or "").replace("_", "").casefold())
    return Named(kind, given=name) if kind is not None else None


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


def state_of(parts: Parts, key: str, record: ManifestRecord | None, hints: CheckpointRef) -> TrainState:
    """Returns the canonical state.

    Args:
        parts: The run.
        key: Key in `extra` for its home.
        record: What a conversion's manifest says.
        hints: What the user says, in Keras' names or canonical ones.

    Raises:
        StateError: It makes no state.
        UsageError: A hint that the schema doesn't know.
    """
    groups, notes = _groups(parts, record)
    slots, rules, home = _slots(parts)
    calls = int(parts.numbered.iteration.read())
    if calls < 0:
        raise StateError("The optimizer's iteration is negative.", found=calls)
    periods = next((g.hyperparameters.get(_PERIODS) for g in groups), None)
    periods = hints.hyperparameters.get(_PERIODS, periods) or 1
    state = TrainState(
        {**parts.moved, **parts.frozen},
        slots,
        Optimizer(parts.named.schema, VARIANT, groups),
        Counts(calls // periods, calls),
        rules,
        {key: _extra(parts, calls, home), **called_by(parts.named.config)},
        tuple(notes),
    )
    return hints.applied(state)


def _groups(parts: Parts, record: ManifestRecord | None) -> tuple[tuple[Group, ...], list[str]]:
    """Returns the groups, with their hyperparameters, and what was assumed."""
    if record is not None and record.groups:
        return tuple(member.group() for member in record.groups), list(record.assumptions)
    settings, notes = _settings(parts)
    given = parts.named.given
    facts = () if given is None else (Fact("optimizer", given, "given"),)
    group = Group(tuple(parts.moved), settings.values, settings.known_from, facts=facts)
    return (group,), [*parts.notes, *notes]


def _slots(
    parts: Parts,
) -> tuple[dict[str, dict[str, Tensor]], dict[str, Rule], dict[str, dict[str, Tensor]]]:
    """Returns the slots by path, the rules by which they are factored, and what is no slot: derived or waiting."""
    slots, rules = dict[str, dict[str, Tensor]](), dict[str, Rule]()
    derived, accumulated = dict[str, Tensor](), dict[str, Tensor]()
    if len(parts.moved) != len(parts.numbered.slots):
        raise StateError(
            "The optimizer moves another number of parameters than the model has.",
            expected=len(parts.moved),
            found=len(parts.numbered.slots),
        )
    for (path, param), stored in zip(parts.moved.items(), parts.numbered.slots, strict=True):
        slots[path] = dict(stored)
        if ACCUMULATOR in stored:
            accumulated[path] = slots[path].pop(ACCUMULATOR)
        if parts.named.schema == "adafactor":
            rules[path] = usual_rule(param.shape)
            if rules[path].factored:
                derived[path] = slots[path].pop("v")
    return slots, rules, {"derived_v": derived, "gradient_accumulators": accumulated}


def _extra(parts: Parts, calls: int, beside: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what goes back into a file of Keras besides parameters and slots."""
    home = {
        **parts.home,
        "class": parts.named.kind,
        "iteration": calls,
        "iteration_dtype": parts.numbered.iteration.dtype.name,
        "schedule": True if _is_scheduled(parts) else None,
        "keras2": parts.named.is_keras2 or None,
        "placeholders": None if parts.numbered.kept.placeholders else False,
        **beside,
    }
    return {name: part for name, part in home.items() if part not in ({}, None)}


def _is_scheduled(parts: Parts) -> bool:
    """Tells whether a schedule stands in the place of the rate."""
    config = parts.named.config or {}
    if parts.named.is_keras2:
        return bool(called_by(config)) or RATE not in config
    return parts.numbered.rate is None


def called_by(config: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns what an optimizer's config says of a schedule in the place of its rate, for a state's extra.

    A legacy optimizer of Keras 2 divides its rate by 1 + `decay` times its iterations, as InverseTimeDecay does.
    Source: keras-team/keras v2.15.0, keras/optimizers/legacy/optimizer_v2.py, `_decayed_lr`.
    """
    config = config or {}
    rate, decay = config.get(RATE), config.get("decay")
    if fits(rate, float) and fits(decay, float) and decay:
        arguments = {"initial_learning_rate": rate, "decay_steps": 1, "decay_rate": decay}
        return {CALLED: {"function": "InverseTimeDecay", "arguments": arguments, "whole": True}}
    if not isinstance(rate, Mapping) or not isinstance(rate.get("config"), Mapping):
        return {}
    call = {"function": str(rate.get("class_name")), "arguments": dict(rate["config"]), "whole": True}
    return {CALLED: call}


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
    stated = schema.canonical(VARIANT, named.config or {})
    settings = settings.over({n: v for n, v in stated.items() if n != RATE}, "file")
    if named.config is None or named.is_partial:
        seen = {"use_ema": kept.average} | ({"amsgrad": kept.amsgrad} if schema.name == "adamw" else {})
        settings = settings.over({n: v for n, v in seen.items() if n in usual}, "file")
        open_ = ", ".join(f"{n}={v}" for n, v in settings.assumed().items())
        notes.append(f"The file holds no config; assumed: {open_}.")
    elif settings.values.get(_DECAY):
        notes.append("No file of Keras says what is kept from weight decay; assumed: nothing is.")
    rate = _rate(parts)
    if rate is not None and math.isfinite(rate):
        settings = settings.over({RATE: rate}, "file")
    return settings, notes


def _rate(parts: Parts) -> float | None:
    """Returns the rate that a file holds; None where a schedule makes it, or none is given."""
    if parts.named.is_keras2 and called_by(parts.named.config):
        return None
    if parts.numbered.rate is not None:
        return float(parts.numbered.rate.read())
    rate = (parts.named.config or {}).get(RATE)
    return rate if parts.named.is_keras2 and fits(rate, float) else None


def kind_of(state: TrainState, home: Mapping[str, Any]) -> str:
    """Returns the class that goes on with a state: Adam only if that was it, and nothing is decayed."""
    kind = {"adafactor": "Adafactor", "lamb": "Lamb"}.get(state.optimizer.schema)
    if kind:
        return kind
    decays = any(group.hyperparameters.get(_DECAY) for group in state.optimizer.groups)
    return "Adam" if home.get("class") == "Adam" and not decays else "AdamW"


def usual_name(kind: str) -> str:
    """Returns what an optimizer of a class is called unless it was given a name."""
    return next(name for name, word in _NAMES.items() if word == kind)


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
    kept = _kept(state, home, slots, order, faults, layout)
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


NO_RATE = "the learning rate is not given: it is NaN, to be set before training goes on"
"""Why the learning rate in a file isn't one."""


def rate_of(state: TrainState) -> float | None:
    """Returns the learning rate that all groups have; None if none is given, or a schedule does."""
    rates = {group.hyperparameters.get(RATE) for group in state.optimizer.groups}
    rate = next(iter(rates)) if len(rates) == 1 else None
    return float(rate) if isinstance(rate, (int, float)) else None


def _kept(
    state: TrainState,
    home: Mapping[str, Any],
    slots_in_order: Sequence[Mapping[str, Tensor]],
    order: Sequence[str],
    faults: Faults,
    layout: str,
) -> Kept:
    """Returns which variables there are; all parameters must have the same.

    Keras 2, and Keras 3 within a loss scale, save no placeholders.
    """
    kept, is_keras2 = {}, origin_in_keras2(home) == layout
    is_bare = is_keras2 or (AROUND in home and layout == "keras")
    for name in (AVERAGE, ACCUMULATOR, "v_max"):
        having = [path for path, slots in zip(order, slots_in_order, strict=True) if name in slots]
        kept[name] = bool(having)
        if having and len(having) < len(order):
            faults.add(f"some parameters have {name} and others don't", having[0])
    rate = not is_keras2 and (rate_of(state) is not None or not home.get("schedule"))
    placeholders = not is_bare or bool(home.get("placeholders", True))
    return Kept(rate, kept[AVERAGE], kept[ACCUMULATOR], kept["v_max"], placeholders)


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
