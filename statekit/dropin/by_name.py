"""What the options of a drop-in optimizer say of each parameter: flags, multipliers, factor rules.

Goes in: options, and the names of the parameters. Comes out: one value for each name. Names may have dots for the
slashes of canonical paths. Faults are collected, so that all are shown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from statekit.errors import Faults, UsageError
from statekit.state.constants import variant_constants
from statekit.state.factoring import PathPattern, first_entry, map_entries
from statekit.state.options import rule_of
from statekit.state.schema import OptimizerSchema
from statekit.state.train_state import EXCLUDED, MULTIPLIERS, SCALE, Rule
from statekit.tensors.tensor import Shape

_RULES_REMEDY = (
    'give factor_map=[(regex, ["ROW", "COLUMN", "BATCH" or "NONE" for each axis]), ...] as in the run whose rule '
    "it is, or factored=False"
)


def path_of(name: str) -> str:
    """Returns the canonical path of a parameter's name."""
    return name.replace(".", "/")


def renamed_path(path: str, names: Mapping[str, str]) -> str:
    """Returns a path under its new name, or with the new name of the longest module around it.

    Args:
        path: The path.
        names: Other paths of parameters, or of modules, by theirs.

    Example:
        >>> renamed_path("fc1/weight", {"fc1": "Dense_0", "fc1/bias": "b"})
        'Dense_0/weight'
    """
    keys = path.split("/")
    around = ("/".join(keys[:n]) for n in range(len(keys), 0, -1))
    return next((names[module] + path[len(module) :] for module in around if module in names), path)


def by_name(
    schema: OptimizerSchema, variant: str, options: Mapping[str, Any], names: Sequence[str], faults: Faults
) -> dict[str, Any]:
    """Resolves options by name: to one value for each parameter, or to one for all.

    Args:
        schema: The optimizer's schema.
        variant: The optimizer's variant.
        options: Canonical name -> value.
        names: Names of the parameters.
        faults: Where faults are added.
    """
    resolved = dict(options)
    if SCALE in resolved and not isinstance(resolved[SCALE], bool):
        resolved[SCALE] = _flags(SCALE, map_entries(resolved[SCALE], SCALE), names, faults)
    if (
        resolved.get(EXCLUDED) is not None
        and variant_constants(schema.name, variant)["decay_exclusions"] == "mask"
    ):
        resolved[EXCLUDED] = _mask(resolved[EXCLUDED], names, faults)
    path_named = {path_of(name): name for name in names}
    for key in MULTIPLIERS:
        if key in resolved:
            factors = {path_of(name): factor for name, factor in resolved[key].items()}
            faults += [
                (f"isn't a parameter of the group, but has a {key}", path)
                for path in factors
                if path not in path_named
            ]
            resolved[key] = {
                path_named[path]: factor for path, factor in factors.items() if path in path_named
            }
    return resolved


def _flags(
    option: str, entries: Sequence[PathPattern], names: Sequence[str], faults: Faults
) -> dict[str, bool]:
    """Returns true or false for each name; adds to `faults` the names that are left open."""
    flags = {}
    for name in names:
        entry = _entry_of(entries, name)
        if entry is None or not isinstance(entry.value, bool):
            faults.add(f"{option} has no true or false for it", name)
        else:
            flags[name] = entry.value
    return flags


def _mask(value: Any, names: Sequence[str], faults: Faults) -> dict[str, bool]:
    """Returns which parameters are kept from weight decay; regexes are searched in name and path."""
    if isinstance(value, Mapping):
        return _flags(EXCLUDED, map_entries(value, EXCLUDED), names, faults)
    entries = map_entries([(pattern, True) for pattern in value], EXCLUDED)
    return {name: _entry_of(entries, name) is not None for name in names}


def _entry_of(entries: Sequence[PathPattern], name: str) -> PathPattern | None:
    return first_entry(entries, name, path_of(name))


def factor_rules(
    schema: OptimizerSchema,
    variant: str,
    options: Mapping[str, Any],
    shapes: Mapping[str, Shape],
    faults: Faults,
) -> dict[str, Rule]:
    """Returns the factor rule of each parameter, by name; none for an optimizer that doesn't factor.

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
    rules = {}
    for name, shape in shapes.items():
        rule, why = rule_of(name, shape, variant, options, entries)
        if rule is None:
            faults.add(why, name)
        else:
            rules[name] = rule
    return rules


def refuse_by_name(schema: OptimizerSchema, faults: Faults) -> None:
    """Raises UsageError if options leave open what holds for a parameter."""
    remedy = _RULES_REMEDY if "v_row" in schema.slots else ""
    faults.check(UsageError, "What the options say by name doesn't fit the parameters", remedy=remedy)
