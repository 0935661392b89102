"""T5X's factor rules: which axes of a parameter its second moment averages away.

Source: T5X t5x/adafactor.py, `factor_name_to_factordim`, `HParamMap`, `_factored_dims`, `_parse_rule`,
`set_param_axes`; `standard_logical_factor_rules`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from statekit.errors import UsageError
from statekit.state import Axis, Rule
from statekit.tensor import Shape

HEURISTIC = "HEURISTIC"
"""The value of a factor map's entry that leaves a parameter to its shape."""

STANDARD = {
    "vocab": "COLUMN", "embed": "ROW", "mlp": "COLUMN", "heads": "COLUMN", "kv": "COLUMN", "joined_kv": "COLUMN",
    "relpos_buckets": "NONE", "layers": "BATCH", "stack": "BATCH", "q_wi_fused": "COLUMN", "o_wo_fused": "COLUMN",
    "multiquery_heads": "COLUMN", "kv_fused": "COLUMN", "layer_norm_scale": "NONE", "mlp_activations": "COLUMN",
}  # fmt: skip
"""What `standard_logical_factor_rules()` returns."""

_NAMED_STANDARD = re.compile(r"@?(\w+\.)*standard_logical_factor_rules(\(\))?")
_LABELS = {
    "row": Axis.ROW, "col": Axis.COLUMN, "column": Axis.COLUMN, "batch": Axis.BATCH,
    "none": Axis.NONE, "unfactorized": Axis.NONE,
}  # fmt: skip
_MAX_RANK = 8


@dataclass(frozen=True)
class GivenRules:
    """The factor rules of a run, as they were told.

    Attributes:
        entries: (regex or path, whether it is a regex, labels or None for the heuristic); the first that fits counts.
        by_axes: For each path, the labels that follow from its logical axis names.
    """

    entries: tuple[tuple[str, bool, tuple[Axis, ...] | None], ...] = ()
    by_axes: Mapping[str, tuple[Axis, ...]] | None = None

    def find(self, path: str) -> tuple[bool, tuple[Axis, ...] | None]:
        """Returns whether there is an entry for a path, and its labels (None: the heuristic)."""
        if self.by_axes is not None and path in self.by_axes:
            return True, self.by_axes[path]
        for pattern, is_regex, labels in self.entries:
            if re.search(pattern, path) if is_regex else pattern == path:
                return True, labels
        return False, None


def given_rules(factor_map: Any, logical_factor_rules: Any, logical_axes: Any) -> GivenRules:
    """Reads the three hyperparameters that make factor rules.

    Raises:
        UsageError: One isn't of the form T5X takes, or names an unknown label or axis.
    """
    by_axes = None
    if logical_factor_rules is not None and logical_axes is not None:
        table = STANDARD if _is_standard(logical_factor_rules) else logical_factor_rules
        by_axes = _from_axes(_mapping(table, "logical_factor_rules"), _mapping(logical_axes, "logical_axes"))
    return GivenRules(tuple(_entries(factor_map)), by_axes)


def _is_standard(value: Any) -> bool:
    return isinstance(value, str) and _NAMED_STANDARD.fullmatch(value) is not None


def _mapping(value: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise UsageError(f"{name} isn't a map.", expected="{name: value, ...}", found=repr(value)[:200])
    return value


def hparam_map(value: Any, name: str) -> list[tuple[str, bool, Any]]:
    """Returns the entries of an HParamMap, or of a map from path, as (pattern, whether it is a regex, value).

    Raises:
        UsageError: It is neither.
    """
    pairs = value.get("HParamMap", None) if isinstance(value, Mapping) else value
    if pairs is None:
        return [(str(path), False, entry) for path, entry in _mapping(value, name).items()]
    if not isinstance(pairs, Sequence) or not all(isinstance(p, Sequence) and len(p) == 2 for p in pairs):
        raise UsageError(
            f"{name} isn't a list of pairs.",
            expected='{"HParamMap": [[regex, value], ...]} or {path: value, ...}',
            found=repr(value)[:200],
        )
    for pattern, _ in pairs:
        try:
            re.compile(pattern)
        except (re.error, TypeError, RecursionError) as error:
            raise UsageError(
                f"{name} has a regex that can't be read.", expected=str(error), found=repr(pattern)
            ) from error
    return [(pattern, True, entry) for pattern, entry in pairs]


def _entries(factor_map: Any) -> list[tuple[str, bool, tuple[Axis, ...] | None]]:
    if factor_map is None:
        return []
    return [(pattern, kind, _labels(value)) for pattern, kind, value in hparam_map(factor_map, "factor_map")]


def _labels(value: Any) -> tuple[Axis, ...] | None:
    if value is None or value == HEURISTIC:
        return None
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise UsageError(
            "A factor rule isn't a list.", expected="[ROW, COLUMN, ...] or HEURISTIC", found=repr(value)[:200]
        )
    return tuple(map(_label, value))


def _label(value: Any) -> Axis:
    """Reads a label in any of T5X's spellings."""
    name = value.value if isinstance(value, Axis) else str(value).rpartition(".")[2]
    try:
        return _LABELS[name.lower()]
    except KeyError:
        raise UsageError(
            "A factor rule has an unknown label.", expected=", ".join(_LABELS), found=repr(value)[:80]
        ) from None


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
        labels = tuple(_label(table[name]) for name in names)
        if {Axis.ROW, Axis.COLUMN, Axis.NONE} <= set(labels):
            raise UsageError(
                "A parameter has ROW, COLUMN and NONE axes together.", place=path, found=", ".join(names)
            )
        if not {Axis.ROW, Axis.COLUMN} <= set(labels):
            labels = tuple(Axis.BATCH if label is Axis.BATCH else Axis.NONE for label in labels)
        rules[path] = labels
    return rules


def effective(
    labels: tuple[Axis, ...] | None, shape: Shape, factored: bool, min_dim: int
) -> tuple[Axis, ...] | None:
    """Returns what T5X does with a parameter, as labels; None if it has no rule for it and stops.

    Args:
        labels: Its entry in the factor rules; None for the heuristic.
        shape: Its shape.
        factored: The hyperparameter.
        min_dim: The smallest second-largest axis that the heuristic factors.
    """
    if not factored:
        return (Axis.NONE,) * len(shape)
    if labels is not None and (len(shape) > 2 or Axis.BATCH in labels):
        return labels
    if len(shape) > 2:
        return None
    return by_size(shape) if len(shape) == 2 and min(shape) >= min_dim else (Axis.NONE,) * len(shape)


def by_size(shape: Shape) -> tuple[Axis, ...]:
    """Returns the labels of a matrix that is factored by its size: the larger axis is COLUMN, the second of equals."""
    labels = [Axis.ROW, Axis.ROW]
    labels[int(np.argsort(shape, kind="stable")[-1])] = Axis.COLUMN
    return tuple(labels)


def fits(labels: tuple[Axis, ...], shape: Shape, row: Shape, column: Shape) -> bool:
    """Tells whether factored slots of these shapes follow from labels."""
    rule = Rule(labels, "file")
    return (
        rule.factored and rule.slot_shape("v_row", shape) == row and rule.slot_shape("v_col", shape) == column
    )


def from_slots(shape: Shape, row: Shape, column: Shape, by_logical_axes: bool) -> Rule | None:
    """Finds the rule of a factored parameter from the shapes of its slots; None if no rule gives them.

    A matrix with vectors for slots was factored by its size; nothing else does that. It counts as proven unless it is
    square. Otherwise every labelling that T5X takes is tried, and axes that both slots keep are taken for BATCH. That
    is proven only where labels come from logical axes, which allow no NONE beside ROW and COLUMN.
    """
    if len(shape) == 2 and fits(by_size(shape), shape, row, column):
        return Rule(by_size(shape), "assumed" if shape[0] == shape[1] else "file")
    if len(shape) > _MAX_RANK:
        return None
    labellings = itertools.product((Axis.ROW, Axis.COLUMN, Axis.BATCH), repeat=len(shape))
    taken = (labels for labels in labellings if len(shape) > 2 or Axis.BATCH in labels)
    found = [labels for labels in taken if fits(labels, shape, row, column)]
    if not found:
        return None
    proven = len(found) == 1 and (by_logical_axes or Axis.BATCH not in found[0])
    return Rule(found[0], "file" if proven else "assumed")
