"""T5X's factor rules: which axes of a parameter its second moment averages away.

Source: T5X t5x/adafactor.py, `factor_name_to_factordim`, `HParamMap`, `_factored_dims`, `_parse_rule`,
`set_param_axes`; `standard_logical_factor_rules`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from statekit.errors import UsageError
from statekit.state.factoring import PathPattern, by_size, first_entry, label, labels, map_entries
from statekit.state.train_state import Axis, Rule
from statekit.tensors.tensor import Shape

STANDARD = {
    "vocab": "COLUMN", "embed": "ROW", "mlp": "COLUMN", "heads": "COLUMN", "kv": "COLUMN", "joined_kv": "COLUMN",
    "relpos_buckets": "NONE", "layers": "BATCH", "stack": "BATCH", "q_wi_fused": "COLUMN", "o_wo_fused": "COLUMN",
    "multiquery_heads": "COLUMN", "kv_fused": "COLUMN", "layer_norm_scale": "NONE", "mlp_activations": "COLUMN",
}  # fmt: skip
"""What `standard_logical_factor_rules()` returns."""

_NAMED_STANDARD = re.compile(r"@?(\w+\.)*standard_logical_factor_rules(\(\))?")


@dataclass(frozen=True)
class GivenRules:
    """The factor rules of a run, as they were told.

    Attributes:
        entries: Lines of the factor map, their values read; the first about a parameter counts.
        by_axes: For each path, the labels that follow from its logical axis names.
    """

    entries: tuple[PathPattern, ...] = ()
    by_axes: Mapping[str, tuple[Axis, ...]] | None = None

    def find(self, path: str) -> tuple[bool, tuple[Axis, ...] | None]:
        """Returns whether there is a rule for a path, and its labels (None: the heuristic)."""
        if self.by_axes is not None and path in self.by_axes:
            return True, self.by_axes[path]
        entry = first_entry(self.entries, path)
        return (False, None) if entry is None else (True, entry.value)


def given_rules(factor_map: Any, logical_factor_rules: Any, logical_axes: Any) -> GivenRules:
    """Reads the three hyperparameters that make factor rules.

    Raises:
        UsageError: One isn't of the form T5X takes, or names an unknown label or axis.
    """
    by_axes = None
    if logical_factor_rules is not None and logical_axes is not None:
        table = STANDARD if _is_standard(logical_factor_rules) else logical_factor_rules
        by_axes = _from_axes(_mapping(table, "logical_factor_rules"), _mapping(logical_axes, "logical_axes"))
    entries = () if factor_map is None else map_entries(factor_map, "factor_map")
    return GivenRules(tuple(PathPattern(e.pattern, e.is_regex, labels(e.value)) for e in entries), by_axes)


def _is_standard(value: Any) -> bool:
    return isinstance(value, str) and _NAMED_STANDARD.fullmatch(value) is not None


def _mapping(value: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise UsageError(f"{name} isn't a map.", expected="{name: value, ...}", found=repr(value)[:200])
    return value


def _from_axes(table: Mapping[str, Any], axes: Mapping[str, Any]) -> dict[str, tuple[Axis, ...]]:
    rules = {}
    for path, names in axes.items():
        unknown = [name for name in names if name not in table]
        if unknown:
            raise UsageError(
                "logical_factor_rules doesn't know an axis.",
                place=path,
                expected=", ".join(table),
                found=", ".join(map(str, unknown)),
            )
        roles = tuple(label(table[name]) for name in names)
        if {Axis.ROW, Axis.COLUMN, Axis.NONE} <= set(roles):
            raise UsageError(
                "A parameter has ROW, COLUMN and NONE axes together.", place=path, found=", ".join(names)
            )
        if not {Axis.ROW, Axis.COLUMN} <= set(roles):
            roles = tuple(Axis.BATCH if axis is Axis.BATCH else Axis.NONE for axis in roles)
        rules[path] = roles
    return rules


def as_t5x(rule: Rule, shape: Shape) -> Rule:
    """Returns a rule with T5X's labels: it reads a matrix by its size, whatever another system called row."""
    other_way = rule.factored and len(rule.axes) == 2 and rule.axes == by_size(shape)[::-1]
    return Rule(by_size(shape), rule.known_from) if other_way else rule
