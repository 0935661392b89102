"""The law of overrides: what may be changed about an optimizer as its state is loaded from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.dropin.by_name import by_name
from statekit.errors import Faults, UsageError
from statekit.optim.adafactor_forms import MOMENTUM_ON
from statekit.state.constants import variant_constants
from statekit.state.factoring import map_entries
from statekit.state.options import FACTOR_MAP, RATE_NAMES, read_options, rule_of, taken
from statekit.state.run import rate_factors
from statekit.state.schema import load_schema
from statekit.state.train_state import EXCLUDED, MULTIPLIERS, SCALE, Group, TrainState
from statekit.tensors.tensor import DTYPES, Cast, DType, Filled, Tensor

OFFSETS = ("keep", "reset")
"""Words for a `step_offset`: as it is, and the count that was reached."""


def overridden(
    state: TrainState, overrides: Mapping[str, Any], rate: str, anew: Callable[[str], str]
) -> TrainState:
    """Returns a state with hyperparameters as asked for, in every group.

    Where a run has several optimizers, an override is of the one that takes it; where more than one may, its name
    begins with the schema: `**{"adamw/weight_decay": 0.1}`.

    This is the law, in every framework:

    1. An override is an option that the state's variant takes, by its canonical name or the variant's own. Anything
       else is refused, with the name that was probably meant.
    2. Its value is of the type and in the range that the schema says. None is a value only where the schema has null,
       and means what the schema says of null: mostly that it is off.
    3. One that decides slots (`decides` in the schema) is refused if it would change which slots there are, or how
       long they are: the checkpoint holds no values for others. Saying what the state has already changes nothing,
       and so does another value that decides the same.
    4. But Adafactor's momentum may begin or end (`at_loading` is `refit`): `m` begins with zeros, as it always does;
       and momentum may be cast to another dtype.
    5. `step_offset` may be "keep", "reset", or a number up to the count.

    Args:
        state: The state.
        overrides: Name -> value.
        rate: What the framework calls the learning rate, which has an argument of its own.
        anew: Gives what begins a new optimizer of a schema instead, for errors.

    Raises:
        UsageError: One can't be made; lists every one.
    """
    ref = CheckpointRef(hparams=dict(overrides)).of(schema for schema, _ in state.optimizer.kinds)
    return state.per_optimizer(
        lambda part: _overridden(
            part, ref[part.optimizer.schema].hyperparameters, rate, anew(part.optimizer.schema)
        )
    )


def rate_of(rates: Any, group: Group, state: TrainState, place: str) -> Any:
    """Returns the learning rate of a group, scaled if a map scaled the group's parameters.

    Args:
        rates: What the caller gave: one for all, or one by schema; numbers, scalars of a framework, or schedules.
        group: The group.
        state: The state.
        place: The name of the argument.

    Raises:
        UsageError: It is said of an optimizer that the run hasn't.
    """
    rate, factor = _rate_of(rates, state.optimizer.kind(group)[0], state, place), rate_factor(state, group)
    if rate is None or factor == 1:
        return rate
    return (lambda *count: factor * rate(*count)) if callable(rate) else factor * rate


def rate_factor(state: TrainState, group: Group) -> float:
    """Returns what a learning rate that is given for the whole run is multiplied by in one of its groups."""
    hyperparameters = load_schema(state.optimizer.kind(group)[0]).hyperparameters
    name = next((name for name in RATE_NAMES if name in hyperparameters), None)
    scheduled = _scheduled_factor(state, group)
    return scheduled * (1.0 if name is None else float(state.optimizer.followed(group, {name: 1.0})[name]))


def _scheduled_factor(state: TrainState, group: Group) -> float:
    """Returns what a group of a run with a schedule of Keras multiplied its rate by."""
    factors, groups = rate_factors(state.extra), state.optimizer.groups
    if len(factors) != len(groups):
        return 1.0
    return next((f for f, other in zip(factors, groups, strict=True) if other.paths == group.paths), 1.0)


def _rate_of(rates: Any, schema: str, state: TrainState, place: str) -> Any:
    if not isinstance(rates, Mapping):
        return rates
    schemas = [name for name, _ in state.optimizer.kinds]
    if unknown := [str(name) for name in rates if name not in schemas]:
        raise UsageError(
            "A learning rate is of an optimizer that the run hasn't.",
            place=place,
            expected=", ".join(schemas),
            found=", ".join(unknown),
        )
    return rates.get(schema)


def _overridden(state: TrainState, overrides: Mapping[str, Any], rate: str, anew: str) -> TrainState:
    schema, variant = load_schema(state.optimizer.schema), str(state.optimizer.variant)
    is_word = overrides.get("step_offset") in OFFSETS
    values = {**overrides, "step_offset": 0} if is_word else overrides
    options = read_options(schema.name, variant, values, rate=rate)
    faults = Faults((fault, _shown(name, overrides)) for fault, name in options.faults)
    slots = [
        ("would change which slots there are", _shown(name, overrides))
        for name, value in options.values.items()
        if _changes_slots(state, name, value)
    ]
    by_path = _by_path(state, variant, options.values, faults)
    faults += slots
    ways = [options.remedy, f"leave them as the run had them, or begin anew: {anew}" if slots else ""]
    usual = f"what the run was configured with goes into hparams={{...}}, the learning rate into {rate}=..."
    faults.check(UsageError, "Overrides can't be made", remedy="; ".join(way for way in ways if way) or usual)
    offset = overrides["step_offset"] if is_word else by_path.get("step_offset", "keep")
    by_path.pop("step_offset", None)
    state = state.with_hyperparameters(**by_path).with_step_offset(offset)
    refit = {name for name in by_path if schema.hyperparameters[name].get("at_loading") == "refit"}
    return _refitted(state) if refit else state


def _shown(name: str, overrides: Mapping[str, Any]) -> str:
    """Returns an override as the caller wrote it."""
    option = name if name in overrides else name.partition("[")[0]
    return f"{option}={overrides[option]!r:.200}" if option in overrides else name


def _changes_slots(state: TrainState, name: str, value: Any) -> bool:
    """Tells whether an option would change which slots a state has, or how long they are."""
    spec = load_schema(state.optimizer.schema).hyperparameters[name]
    decides: Mapping[str, Any] = spec.get("decides", {})
    if not decides or spec.get("at_loading") == "refit":
        return False
    if "factoring" in decides:
        return any(_factors_otherwise(state, group, {name: value}) for group in state.optimizer.groups)
    return any(
        (value not in (None, False)) != _has_slots(state, group, name, decides["existence"])
        if "existence" in decides
        else value != _length(state, group, name, decides["length"][0])
        for group in state.optimizer.groups
    )


def _has_slots(state: TrainState, group: Group, name: str, slots: list[str]) -> bool:
    """Tells whether a group has an option on, by its hyperparameters, or else by its slots."""
    if name in group.hyperparameters:
        return group.hyperparameters[name] not in (None, False)
    return any(slot in tensors for slot in slots for tensors in _slots(state, group))


def _length(state: TrainState, group: Group, name: str, slot: str) -> Any:
    """Returns the length of a group's slots of one name: by its hyperparameters, or else by the slots."""
    lengths = (tensors[slot].shape[0] for tensors in _slots(state, group) if slot in tensors)
    return group.hyperparameters[name] if name in group.hyperparameters else next(lengths, None)


def _slots(state: TrainState, group: Group) -> Iterator[Mapping[str, Tensor]]:
    yield group.slots
    yield from (state.slots.get(path, {}) for path in group.paths)


def _factors_otherwise(state: TrainState, group: Group, change: Mapping[str, Any]) -> bool:
    """Tells whether a parameter would be factored in another way than the state has it."""
    variant, options = str(state.optimizer.variant), {**group.hyperparameters, **change}
    if options == group.hyperparameters:
        return False
    minimum = "min_dim_size_to_factor"
    if change == {"factored": True} and minimum not in options and minimum in taken("adafactor", variant):
        return False  # nobody knows which are large enough
    factor_map = options.get(FACTOR_MAP)
    entries = () if factor_map is None else map_entries(factor_map, FACTOR_MAP)
    for path in group.paths:
        rule = rule_of(path, state.params[path].shape, variant, options, entries)[0]
        source = state.rules.get(path)
        if rule is not None and source is not None and rule.axes != source.axes:
            return True
    return False


def _by_path(state: TrainState, variant: str, changes: Mapping[str, Any], faults: Faults) -> dict[str, Any]:
    """Returns changes with what they say by name said by path, for all groups together."""
    paths = list(state.optimizer.paths)
    by_name_or_all = {
        name: value
        for name, value in changes.items()
        if name in (SCALE, *MULTIPLIERS) or (name == EXCLUDED and isinstance(value, Mapping))
    }
    schema = load_schema(state.optimizer.schema)
    return {**changes, **by_name(schema, variant, by_name_or_all, paths, faults)}


def _refitted(state: TrainState) -> TrainState:
    """Adds, drops or casts `m` as the hyperparameters demand; a new one is zeros."""
    slots = dict(state.slots)
    constants = variant_constants(state.optimizer.schema, str(state.optimizer.variant))
    is_on = MOMENTUM_ON[constants["momentum_on"]] if "momentum_on" in constants else lambda beta1: True
    stored_in = constants.get("momentum_dtype", constants.get("first_moment_dtype"))
    for group in state.optimizer.groups:
        values = group.hyperparameters
        for path in group.paths:
            param, tensors = state.params[path], dict(slots.get(path, {}))
            old = tensors.pop("m", None)
            if is_on(values.get("beta1")):
                names = (
                    values.get("dtype_momentum", "float32") if stored_in == "dtype_momentum" else stored_in
                )
                dtype = param.dtype if names in (None, "parameter") else DTYPES[names]
                is_told = stored_in == "dtype_momentum" and "dtype_momentum" in values
                tensors["m"] = _momentum(old, param, dtype if is_told or old is None else old.dtype)
            slots[path] = tensors
    return replace(state, slots=slots)


def _momentum(old: Tensor | None, param: Tensor, dtype: DType) -> Tensor:
    if old is None:
        return Filled(param.shape, dtype, 0.0, "momentum begins here")
    return old if old.dtype == dtype else Cast(old, dtype)
