"""What a drop-in optimizer is told by its user, settled by name: rules, flags, and whether the values can be.

Names may have dots for the slashes of canonical paths. Faults are collected as (what, where), so that all are shown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, TypeAlias

from statekit.state.constants import variant_constants
from statekit.state.factoring import PathPattern, first_entry, map_entries
from statekit.state.options import RATE_NAMES, rule_of
from statekit.state.schema import OptimizerSchema
from statekit.state.train_state import Rule
from statekit.tensors.tensor import Shape

Faults: TypeAlias = list[tuple[str, str]]

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
    if (
        found.get(EXCLUDED) is not None
        and variant_constants(schema.name, variant)["decay_exclusions"] == "mask"
    ):
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


def _entry_of(entries: Sequence[PathPattern], name: str) -> PathPattern | None:
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
    factor_map = options.get("factor_map")
    entries = () if factor_map is None else map_entries(factor_map, "factor_map")
    found = {}
    for path, shape in shapes.items():
        rule, why = rule_of(path, shape, variant, options, entries)
        if rule is None:
            faults.append((why, path))
        else:
            found[path] = rule
    return found
