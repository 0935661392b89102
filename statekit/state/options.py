"""What people may say to an optimizer of ours, in any framework: options, factor rules, whose learning rate counts."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from types import MappingProxyType
from typing import Any

from statekit.errors import Faults, UsageError, meant
from statekit.state.constants import variant_constants
from statekit.state.factoring import PathPattern, by_shape, effective, first_entry, labels
from statekit.state.schema import OptimizerSchema, Spelling, load_schema
from statekit.state.train_state import BY_NAME, EXCLUDED, Rule
from statekit.tensors.tensor import DTYPES, Shape
from statekit.tensors.typed import Finite, fits

CLASSES = {
    "adafactor": "Adafactor", "scaled_adam": "ScaledAdam", "lans": "LANS", "lamb": "LAMB", "adamw": "AdamW",
    "muon": "Muon",
}  # fmt: skip
"""Schema -> the name of our class, in statekit.torch and in statekit.tensorflow."""
RATE_NAMES = ("learning_rate", "lr")
"""Hyperparameters that are the learning rate, which every framework has its own place for."""
RATE = "a finite number from 0 on"
"""What a learning rate is, if it isn't an array or a schedule."""
KERAS = {
    "clipnorm": None, "clipvalue": None, "global_clipnorm": None, "use_ema": False, "ema_momentum": 0.99,
    "ema_overwrite_frequency": None, "loss_scale_factor": None, "gradient_accumulation_steps": None,
}  # fmt: skip
"""Options of every Keras optimizer that ours take too, with their defaults. Keras' own base class does what they say,
before or after our step, whatever the variant is."""
FACTOR = "learning_rate_factor"
"""What a group of an optimizer in Keras multiplies the learning rate by."""
FACTOR_MAP = "factor_map"
"""Rules by name, which every Adafactor of ours takes."""
COEFFICIENTS = "ns_coefficients"
"""Muon's, of each iteration: three numbers, or a row of them for each."""
LOGICAL = "logical_factor_rules"
"""Rules by logical axes, which are for models of T5X: no optimizer of ours takes them."""


def is_rate(value: Any) -> bool:
    """Tells whether a value is a number that can be a learning rate."""
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and value >= 0


def stored_rate(hyperparameters: Mapping[str, Any]) -> Any:
    """Returns the learning rate among hyperparameters, whichever name it has; None if none is there."""
    return next((hyperparameters[name] for name in RATE_NAMES if name in hyperparameters), None)


def offered(schema: str, variant: str) -> dict[str, Any]:
    """Returns the options of a variant with their defaults; the learning rate isn't one of them."""
    defaults = load_schema(schema).variant(variant)["defaults"]
    return {name: value for name, value in defaults.items() if name not in RATE_NAMES}


@dataclass(frozen=True)
class Options:
    """What was said to an optimizer, in canonical names.

    Attributes:
        values: Canonical name -> value, of what can be.
        faults: What can't be, as (what, the name that was said).
        remedy: What was probably meant.
    """

    values: Mapping[str, Any]
    faults: tuple[tuple[str, str], ...] = ()
    remedy: str = ""


def taken(schema: str, variant: str) -> tuple[str, ...]:
    """Returns the canonical names of the options that an optimizer of ours takes, but for the learning rate."""
    rules = (FACTOR_MAP,) if FACTOR_MAP in load_schema(schema).hyperparameters else ()
    return tuple(dict.fromkeys(name for name in (*offered(schema, variant), *rules) if name != LOGICAL))


def known_options(schema: str, variant: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns those of a group's hyperparameters that are options and known, but for what is said of it by name."""
    rules = load_schema(schema)
    names = [name for name in taken(schema, variant) if name in values and name != FACTOR_MAP]
    return {name: values[name] for name in names if not _is_unknown(rules, name, values[name])}


def _is_unknown(rules: OptimizerSchema, name: str, value: Any) -> bool:
    return value is None and "null_is_unknown" in rules.hyperparameters[name]


def by_other_names(values: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Returns hyperparameters with each map by parameter under other names; a parameter without one is left out."""
    return {
        key: {names[name]: part for name, part in value.items() if name in names}
        if key in BY_NAME and isinstance(value, Mapping)
        else value
        for key, value in values.items()
    }


def _faulty_value(value: Any, canonical: str, place: str, fault: str) -> str:
    """Says what is wrong with a value, and by which canonical name it was read."""
    also = "" if place == canonical else f", as {canonical}"
    return f"is {value!r}{also}, {fault}"


def read_options(
    schema: str,
    variant: str,
    given_values: Mapping[str, Any],
    *,
    rate: str = "learning_rate",
    unchecked: Callable[[Any], bool] = lambda value: False,
) -> Options:
    """Reads what somebody says to an optimizer, by canonical names or by the variant's own.

    Every framework, loading included, reads options here, so that all take and refuse the same in the same words. A
    name that is canonical and the variant's own at once has the canonical meaning; only a negative number has the other
    one where the two differ in sign (`decay_rate` of Hugging Face's Adafactor).

    Args:
        schema: Name of the schema.
        variant: Whose rule.
        given_values: Name -> value.
        rate: What the learning rate is called, which isn't an option.
        unchecked: Whether a value can't be looked at, as in a traced computation.

    Example:
        >>> read_options("adamw", "torch", {"betas": (0.9, 0.98), "epsilon": 1e-6}).values
        {'beta1': 0.9, 'beta2': 0.98, 'epsilon': 1e-06}
    """
    rules, canonical_names = load_schema(schema), taken(schema, variant)
    natives = native_options(schema, variant)
    values: dict[str, Any] = {}
    places: dict[str, str] = {}
    faults: list[tuple[str, str]] = []
    remedies: dict[str, None] = {}
    for name, value in _whole(rules, variant, natives, given_values).items():
        parts = _meanings(name, value, canonical_names, natives)
        if not parts:
            elsewhere = _elsewhere(rules, variant, name, rate)
            faults.append((elsewhere or f"isn't an option of variant {variant}", name))
            if not elsewhere and name not in rules.hyperparameters:
                remedies[meant(name, (*canonical_names, *natives, rate))] = None
        for canonical, spelling in parts.items():
            if fault := spelling.fault(value):
                faults.append((f"is {value!r}, {fault}: {', '.join(parts)}", name))
                break
            place = name if spelling.index is None else f"{name}[{spelling.index}]"
            if canonical in values:
                faults.append((f"is said twice: as {places[canonical]} and as {place}", canonical))
                continue
            values[canonical], places[canonical] = spelling.canonical(value), place
    faulty = {
        name: _fault(rules, variant, name, value) for name, value in values.items() if not unchecked(value)
    }
    for canonical, fault in faulty.items():
        if fault:
            value, place = values.pop(canonical), places[canonical]
            faults.append((_faulty_value(value, canonical, place, fault), place))
    return Options(values, tuple(faults), "; ".join(filter(None, remedies)))


def _whole(
    rules: OptimizerSchema,
    variant: str,
    natives: Mapping[str, Mapping[str, Spelling]],
    options: Mapping[str, Any],
) -> Mapping[str, Any]:
    """Joins arguments that make up one array, under the first of their names."""
    whole = dict(options)
    for argument, meanings in natives.items():
        for canonical, spelling in meanings.items():
            if not spelling.parts or whole.keys().isdisjoint(spelling.parts):
                continue
            usual = rules.variant(variant)["defaults"][canonical]
            pairs = zip(spelling.parts, usual, strict=True)
            whole[argument] = [whole.pop(part, default) for part, default in pairs]
    return whole


def _fault(rules: OptimizerSchema, variant: str, name: str, value: Any) -> str:
    """Returns the fault of an option's value; values by name are checked later, with the parameters."""
    if name == FACTOR_MAP:
        return ""
    if fault := rules.fault(name, value):
        return fault
    if _is_unknown(rules, name, value):
        return "expected " + " or ".join(
            kind for kind in rules.hyperparameters[name]["type"] if kind != "null"
        )
    if name == "dtype_momentum" and (value or "float32") not in DTYPES:
        return "expected a dtype"
    if name == COEFFICIENTS and not _are_coefficients(value):
        return "expected three numbers, or rows of three"
    if name == EXCLUDED and isinstance(value, Mapping):
        by_mask = variant_constants(rules.name, variant).get("decay_exclusions") == "mask"
        return "" if by_mask else "expected a list of regexes"
    return _said_by_name(name, value)


def _are_coefficients(value: Sequence[Any]) -> bool:
    """Tells whether a value can be the coefficients of Newton-Schulz iterations."""
    are_rows = len(value) > 0 and all(isinstance(row, list | tuple) for row in value)
    return all(fits([*row], list[Finite]) and len(row) == 3 for row in (value if are_rows else [value]))


def _said_by_name(name: str, value: Any) -> str:
    """Returns what is wrong with what is said of parameters by their names or paths; "" if nothing is."""
    if name != EXCLUDED or value is None:
        return ""
    if isinstance(value, Mapping):
        is_told = all(isinstance(flag, bool) for flag in value.values())
        return "" if is_told else "expected true or false for each path"
    return "" if all(map(_is_regex, value)) else "expected a list of regexes"


def _is_regex(value: Any) -> bool:
    try:
        return bool(re.compile(value)) and isinstance(value, str)
    except (re.error, TypeError, RecursionError):
        return False


def _only_native(
    values: Mapping[str, Any], natives: Collection[str], rules: OptimizerSchema
) -> dict[str, Any]:
    """Returns the values under names of the variant's own that the schema hasn't."""
    return {
        name: value for name, value in values.items() if name in natives and name not in rules.hyperparameters
    }


def read_hparams(
    schema: str,
    variant: str | None,
    given_values: Mapping[str, Any],
    *,
    only: Collection[str] | None = None,
    also: Mapping[str, str] = MappingProxyType({}),
    unchecked: Collection[str] = (),
) -> Options:
    """Reads what somebody says about a checkpoint, as `--hparams` does: any hyperparameter of the schema.

    Args:
        schema: Name of the schema.
        variant: Whose own names are known too; None while nobody knows which one it is.
        given_values: Name -> value.
        only: The schema's hyperparameters that a layout has a meaning for; None for all.
        also: Further names that a layout knows, each with the canonical one.
        unchecked: Names that may be said beside the schema's, or whose values the layout reads itself.
    """
    rules = load_schema(schema)
    natives = native_options(schema, variant) if variant is not None else {}
    native = _only_native(given_values, natives, rules)
    read = read_options(schema, str(variant), native) if native else Options({})
    values, faults, remedies = dict(read.values), [*read.faults], {read.remedy: None}
    rates = dict.fromkeys(RATE_NAMES, RATE_NAMES[0])
    meant_names = (*(only or rules.hyperparameters), *natives, *also, *unchecked)
    for name, value in given_values.items():
        if name in native:
            continue
        canonical = name if name in rules.hyperparameters else also.get(name, name)
        is_read_elsewhere = canonical in unchecked
        # A layout that reads a value itself also says which names it takes.
        if canonical not in rules.hyperparameters and not is_read_elsewhere:
            faults.append((f"isn't a hyperparameter of {schema}", name))
            remedies[meant(rates.get(name, name), meant_names)] = None
        elif only is not None and canonical not in only and not is_read_elsewhere:
            faults.append((f"isn't a hyperparameter of variant {variant}", name))
        elif canonical in values:
            faults.append(("is said twice", canonical))
        elif not is_read_elsewhere and (fault := _value_fault(rules, canonical, value)):
            faults.append((f"is {value!r}, {fault}", name))
        else:
            values[canonical] = value
    return Options(values, tuple(faults), "; ".join(filter(None, remedies)))


def _value_fault(rules: OptimizerSchema, name: str, value: Any) -> str | None:
    """Returns what is wrong with a value; a factor map is read by the layout."""
    return None if name == FACTOR_MAP else rules.fault(name, value) or _said_by_name(name, value)


def checked_hparams(
    schema: str,
    variant: str | None,
    values: Mapping[str, Any],
    *,
    only: Collection[str] | None = None,
    also: Mapping[str, str] = MappingProxyType({}),
    unchecked: Collection[str] = (),
) -> dict[str, Any]:
    """Returns what `read_hparams` reads: hyperparameters by canonical name.

    Raises:
        UsageError: A hyperparameter doesn't exist, can't have its value, or is said twice; lists every one.
    """
    options = read_hparams(schema, variant, values, only=only, also=also, unchecked=unchecked)
    names = load_schema(schema).hyperparameters if only is None else only
    Faults(options.faults).check(
        UsageError,
        f"Hyperparameters of {schema} can't be these",
        place="hparams",
        expected=", ".join(dict.fromkeys((*names, *also, *unchecked))),
        remedy=options.remedy,
    )
    return dict(options.values)


def is_known(schema: str, name: str) -> bool:
    """Tells whether an optimizer has a hyperparameter, by its canonical name or some variant's own."""
    rules = load_schema(schema)
    return name in rules.hyperparameters or any(
        name in native_options(schema, variant) for variant in rules.variants
    )


def native_options(schema: str, variant: str) -> dict[str, dict[str, Spelling]]:
    """Returns a variant's own names of its options: name -> canonical name -> how it says that."""
    spellings: dict[str, dict[str, Spelling]] = {}
    offered_names = taken(schema, variant)
    for canonical in offered_names:
        spelling = load_schema(schema).spelling(variant, canonical)
        if spelling.argument not in offered_names or (spelling.argument == canonical and spelling.turned):
            spellings.setdefault(spelling.argument, {})[canonical] = spelling
    return spellings


def _meanings(
    name: str, value: Any, canonical_names: Sequence[str], natives: Mapping[str, Mapping[str, Spelling]]
) -> Mapping[str, Spelling]:
    """Returns which hyperparameters a name stands for, each with how; none if it is unknown."""
    is_turned = name in natives and isinstance(value, (int, float)) and value < 0
    if name in canonical_names and not is_turned:
        return {name: Spelling(name, None, 0, False)}
    return natives.get(name, {})


def _elsewhere(rules: OptimizerSchema, variant: str, name: str, rate: str) -> str:
    """Returns what a name that isn't an option of a variant means elsewhere; "" if nothing."""
    if name in RATE_NAMES:
        return f"isn't an option: the learning rate is {rate}"
    canonical = [
        hyperparameter
        for hyperparameter in rules.hyperparameters
        if any(rules.spelling(other, hyperparameter).argument == name for other in rules.variants)
    ]
    if name in rules.hyperparameters or not canonical:
        return ""
    return f"is another optimizer's name for {', '.join(canonical)}"


def rule_of(
    path: str, shape: Shape, variant: str, settings: Mapping[str, Any], entries: Sequence[PathPattern]
) -> tuple[Rule | None, str]:
    """Returns how an Adafactor factors a parameter, or None and why nobody can say.

    Args:
        path: The parameter; its name in a framework may have dots for the slashes.
        shape: Its shape.
        variant: Whose rule.
        settings: The group's hyperparameters; `factored` and `min_dim_size_to_factor` count.
        entries: Lines of its `factor_map`.
    """
    settings_of_variant = {**load_schema("adafactor").settings(variant), **settings}
    factored, minimum = settings_of_variant["factored"], settings_of_variant["min_dim_size_to_factor"]
    entry = first_entry(entries, path, path.replace(".", "/"))
    if entry is None and factored and entries and entries[0].is_regex:
        return None, "is found by no regex of factor_map"
    stated = labels(entry.value) if entry else None
    if variant_constants("adafactor", variant)["factored_rank"] == "two_or_rule":
        axes = effective(stated, shape, factored, minimum)
    else:
        axes = stated or by_shape(variant_constants("adafactor", variant), shape, factored, minimum)
    if axes is None:
        return None, f"has shape {shape} and no factor rule"
    if len(axes) != len(shape):
        return None, f"has shape {shape}, but a factor rule for {len(axes)} axes"
    return Rule(axes, "given"), ""


def rate_needed(schema: str, variant: str, settings: Mapping[str, Any]) -> bool:
    """Tells whether a step needs a learning rate, or has one of its own if none is given."""
    has_rate = _OWN_RATE.get(variant_constants(schema, variant).get("lr_source", "given"))
    return has_rate is None or not has_rate({**load_schema(schema).settings(variant), **settings})


_OWN_RATE: Mapping[str, Callable[[Mapping[str, Any]], bool]] = {
    "given_or_rsqrt": lambda settings: True,
    "given_or_relative": lambda settings: bool(settings["relative_step"]),
    "given_or_relative_compounding": lambda settings: bool(settings["relative_step"]),
}
"""Whether an optimizer has a learning rate of its own, by `lr_source`."""
