"""What a drop-in optimizer is told by its user, settled by name: rules, flags, and whether the values can be.

Names may have dots for the slashes of canonical paths. Faults are collected as (what, where), so that all are shown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, TypeAlias

from statekit.optim.factoring import Entry, by_shape, effective, first_entry, labels, map_entries
from statekit.optim.settings import form
from statekit.schema import OptimizerSchema
from statekit.state import Axis, Rule
from statekit.tensor import DTYPES, Shape

Faults: TypeAlias = list[tuple[str, str]]

RATE_NAMES = ("learning_rate", "lr")
"""What schemas call the learning rate."""
SCALE = "multiply_by_parameter_scale"
EXCLUDED = "exclude_from_weight_decay"
MULTIPLIERS = ("lr_mult", "wd_mult")
LOGICAL = "logical_factor_rules"
"""Rules by logical axes, which are for models of T5X: no drop-in takes them."""


class Unset(Enum):
    """What an option is that nobody has given."""

    UNSET = "as the variant has it"

    def __repr__(self) -> str:
        return "UNSET"


UNSET = Unset.UNSET
_NO_OPTIONS = ("self", "__class__", "params", "variant", "foreach", *RATE_NAMES)


def given(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options among a drop-in's arguments that were given: those with no default but the variant's."""
    return {
        name: value for name, value in arguments.items() if name not in _NO_OPTIONS and value is not UNSET
    }


def path_of(name: str) -> str:
    """Returns the canonical path of a parameter's name."""
    return name.replace(".", "/")


def option_faults(
    schema: OptimizerSchema, variant: str, options: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    """Yields what is wrong with canonical hyperparameters that a user gives, without the learning rate.

    Args:
        schema: The optimizer's schema.
        variant: The optimizer's variant.
        options: Canonical name -> value.
    """
    own_rules = {"factor_map"} if "v_row" in schema.slots else set()
    offered = {*schema.variant(variant)["defaults"], *own_rules} - {*RATE_NAMES, LOGICAL}
    by_mask = form(schema.name, variant).get("decay_exclusions") == "mask"
    for name, value in options.items():
        if name not in offered:
            yield f"isn't an option of variant {variant}", name
        elif name not in (SCALE, "factor_map") and (fault := schema.fault(name, value)):
            yield f"is {value!r}, {fault}", name
        elif name == EXCLUDED and isinstance(value, Mapping) and not by_mask:
            yield "is a map, expected a list of regexes", name
        elif name == "dtype_momentum" and (value or "float32") not in DTYPES:
            yield f"is {value!r}, expected a dtype", name


def by_name(
    schema: OptimizerSchema, variant: str, options: Mapping[str, Any], names: Sequence[str], faults: Faults
) -> dict[str, Any]:
    """Returns options with those that tell parameters apart resolved to one value per path, or one for all.

    Args:
        schema: The optimizer's schema.
        variant: The optimizer's variant.
        options: Canonical name -> value.
        names: Names of the parameters.
        faults: Where faults are added.
    """
    found = dict(options)
    if SCALE in found:
        found[SCALE] = flags_of(SCALE, found[SCALE], names, faults)
    if found.get(EXCLUDED) is not None and form(schema.name, variant)["decay_exclusions"] == "mask":
        found[EXCLUDED] = _mask(found[EXCLUDED], names, faults)
    paths = {path_of(name) for name in names}
    for key in MULTIPLIERS:
        if key in found:
            found[key] = {path_of(name): value for name, value in found[key].items()}
            faults += [(f"isn't a parameter, but has a {key}", path) for path in found[key].keys() - paths]
    return found


def flags_of(option: str, value: Any, names: Sequence[str], faults: Faults) -> bool | dict[str, bool]:
    """Returns an option as one bool, or one for each path; adds to `faults` the names it leaves open.

    Args:
        option: What it is called, for errors.
        value: A bool, {name: bool}, or [(regex, bool), ...].
        names: Names of the parameters.
        faults: Where faults are added.
    """
    if isinstance(value, bool):
        return value
    entries = map_entries(value, option)
    found = {}
    for name in names:
        entry = _entry_of(entries, name)
        if entry is None or not isinstance(entry.value, bool):
            faults.append((f"{option} has no true or false for it", name))
        else:
            found[path_of(name)] = entry.value
    return found


def _mask(value: Any, names: Sequence[str], faults: Faults) -> Any:
    """Returns which parameters are kept from weight decay, by path; regexes are searched in name and path."""
    if isinstance(value, Mapping):
        return flags_of(EXCLUDED, value, names, faults)
    entries = map_entries([(pattern, True) for pattern in value], EXCLUDED)
    return {path_of(name): _entry_of(entries, name) is not None for name in names}


def _entry_of(entries: Sequence[Entry], name: str) -> Entry | None:
    return first_entry(entries, name, path_of(name))


def factor_rules(
    schema: OptimizerSchema,
    variant: str,
    options: Mapping[str, Any],
    shapes: Mapping[str, Shape],
    faults: Faults,
) -> dict[str, Rule]:
    """Returns the factor rule of each parameter, by path; none for an optimizer that doesn't factor.

    Args:
        schema: The optimizer's schema.
        variant: The optimizer's variant.
        options: Canonical name -> value, with `factor_map` where one is given.
        shapes: Name -> shape of each parameter.
        faults: Where faults are added: names that no rule fits.
    """
    if "v_row" not in schema.slots:
        return {}
    settings = {**schema.settings(variant), **options}
    factor_map = settings["factor_map"]
    entries = () if factor_map is None else map_entries(factor_map, "factor_map")
    constants, factored = form(schema.name, variant), settings["factored"]
    found = {}
    for name, shape in shapes.items():
        entry = _entry_of(entries, name)
        told = labels(entry.value) if entry else None
        axes = RULE.get(constants["factored_rank"], _by_shape)(
            constants, told, shape, factored, settings["min_dim_size_to_factor"]
        )
        if entries and entry is None and entries[0].is_regex and factored:
            faults.append(("is found by no regex of factor_map", name))
        elif axes is None:
            faults.append((f"has shape {shape} and no factor rule", name))
        elif len(axes) != len(shape):
            faults.append((f"has shape {shape}, but a factor rule for {len(axes)} axes", name))
        found[path_of(name)] = Rule(axes or (), "given")
    return found


Axes: TypeAlias = tuple[Axis, ...] | None


def _by_shape(form: Mapping[str, Any], told: Axes, shape: Shape, factored: bool, minimum: int) -> Axes:
    return told or by_shape(form, shape, factored, minimum)


def _by_rule(form: Mapping[str, Any], told: Axes, shape: Shape, factored: bool, minimum: int) -> Axes:
    return effective(told, shape, factored, minimum)


RULE: Mapping[str, Callable[[Mapping[str, Any], Axes, Shape, bool, int], Axes]] = {"two_or_rule": _by_rule}
"""Labels by `factored_rank`: (constants, labels given, shape, factored, min_dim_size_to_factor) -> labels."""


def rate_needed(schema: OptimizerSchema, variant: str, options: Mapping[str, Any]) -> bool:
    """Tells whether the learning rate has to be given: some Adafactors have one of their own."""
    own = OWN_RATE.get(form(schema.name, variant).get("lr_source", "given"))
    return own is None or not own({**schema.settings(variant), **options})


OWN_RATE: Mapping[str, Callable[[Mapping[str, Any]], bool]] = {
    "given_or_rsqrt": lambda settings: True,
    "given_or_relative": lambda settings: bool(settings["relative_step"]),
    "given_or_relative_compounding": lambda settings: bool(settings["relative_step"]),
}
"""Whether an optimizer has a learning rate of its own if none is given, by `lr_source`."""
