"""Factor rules: which axes of a parameter an Adafactor averages away, by its path and its shape.

T5X has rules that people write, by path or by what axes are called; in the other variants the shape decides, as their
constants in the schema say. Where neither is known, the shapes of slots show what the rule was.

Canonically there are only the slots that are in use, without averaged axes. Implementations store more: an averaged
axis may stay with size 1, a slot that isn't in use may have a placeholder, and a factored parameter may store its
whole estimate beside what it follows from (`reduced_axis`, `placeholders` and `redundant_v` in
`schemas/adafactor.json`).

Source: T5X t5x/adafactor.py, `factor_name_to_factordim`, `HParamMap`, `Adafactor._parse_rule`, `_factored_dims`,
`set_param_axes`; of the others the sources in `schemas/adafactor.json`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from statekit.errors import UsageError
from statekit.state.constants import variant_constants
from statekit.state.schema import load_schema
from statekit.state.train_state import Axis, Rule, TrainState
from statekit.tensors.patterns import is_found
from statekit.tensors.tensor import DType, Filled, Shape, Tensor

FACTORED, WHOLE = ("v_row", "v_col"), ("v",)
PLACEHOLDER: Shape = (1,)
"""The shape of `zeros_1`: also where a layout has to tell from shapes alone which slots are in use."""
_UNUSED = "stands for a slot that isn't in use"
HEURISTIC = "HEURISTIC"
"""The value of a factor map's entry that leaves a parameter to its shape."""

_MAX_RANK = 8
_LABELS = {
    "row": Axis.ROW, "col": Axis.COLUMN, "column": Axis.COLUMN, "batch": Axis.BATCH,
    "none": Axis.NONE, "unfactorized": Axis.NONE,
}  # fmt: skip


@dataclass(frozen=True)
class PathPattern:
    """One line of a map from parameters to values: a regex searched in the path, or the path itself."""

    pattern: str
    is_regex: bool
    value: Any

    def fits(self, path: str) -> bool:
        """Tells whether the line is about a parameter."""
        if not self.is_regex:
            return self.pattern == path
        return is_found(self.pattern, path, "a map from parameters to values")


def map_entries(value: Any, name: str) -> tuple[PathPattern, ...]:
    """Reads a map from parameters to values: `[[regex, value], ...]` as T5X's HParamMap, or `{path: value}`.

    Args:
        value: The map; `{"HParamMap": [...]}` is the list.
        name: What it is called, for errors.

    Raises:
        UsageError: It has another form, or a regex that can't be read.
    """
    pairs = value.get("HParamMap") if isinstance(value, Mapping) else value
    if pairs is None:
        return tuple(PathPattern(str(path), False, entry) for path, entry in value.items())
    if isinstance(pairs, str) or not isinstance(pairs, Sequence) or not all(map(_is_pair, pairs)):
        raise UsageError(
            f"{name} isn't a list of pairs.",
            expected="[[regex, value], ...] or {path: value, ...}",
            found=repr(value)[:200],
        )
    for pattern, _ in pairs:
        try:
            re.compile(pattern)
        except (re.error, TypeError, RecursionError) as error:
            raise UsageError(
                f"{name} has a regex that can't be read.", expected=str(error), found=repr(pattern)[:200]
            ) from error
    return tuple(PathPattern(pattern, True, entry) for pattern, entry in pairs)


def _is_pair(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and len(value) == 2


def first_entry(entries: Iterable[PathPattern], *paths: str) -> PathPattern | None:
    """Returns the first line about a parameter, under any of its spellings."""
    return next((entry for entry in entries if any(map(entry.fits, paths))), None)


def labels(value: Any) -> tuple[Axis, ...] | None:
    """Reads a factor rule in any of T5X's spellings; None is the heuristic.

    Raises:
        UsageError: It isn't a list of labels.
    """
    if value is None or value == HEURISTIC:
        return None
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise UsageError(
            "A factor rule isn't a list.", expected="[ROW, COLUMN, ...] or HEURISTIC", found=repr(value)[:200]
        )
    return tuple(map(label, value))


def label(value: Any) -> Axis:
    """Reads one label.

    Raises:
        UsageError: There is no such label.
    """
    name = value.value if isinstance(value, Axis) else str(value).rpartition(".")[2]
    try:
        return _LABELS[name.lower()]
    except KeyError:
        raise UsageError(
            "A factor rule has an unknown label.", expected=", ".join(_LABELS), found=repr(value)[:80]
        ) from None


def matrix_rule(form: Mapping[str, Any], rank: int) -> Rule | None:
    """Returns which axes of a parameter are outputs (ROW), inputs (COLUMN) and BATCH, as a variant takes them.

    Args:
        form: The variant's constants; None is returned of a schema whose update sees no matrices.
        rank: How many axes the parameter has.

    Source: KellerJordan/Muon muon.py, `muon_update`; google-deepmind/optax optax/contrib/_muon.py,
    `MuonDimensionNumbers`.
    """
    if "orientation" not in form or rank < 2:
        return None
    if rank == 4 and form["rank_above_two"] == "filters":
        return Rule((Axis.ROW, Axis.COLUMN, Axis.COLUMN, Axis.COLUMN), "inferred")
    sides = (Axis.ROW, Axis.COLUMN) if form["orientation"] == "first" else (Axis.COLUMN, Axis.ROW)
    return Rule((*(Axis.BATCH,) * (rank - 2), *sides), "inferred")


_EITHER_WAY = ("match_rms", "none")
"""Values of `shape_scale` that are the same for a matrix and for its transpose."""


def turned_matrices(state: TrainState, said_by: str | None = None) -> list[str]:
    """Returns the parameters of which a variant takes other axes for outputs and inputs than they are.

    Args:
        state: The state of one optimizer, under the variant that goes on with it.
        said_by: The variant that says what they are, where no rule does; None: nobody else does.
    """
    schema, variant = state.optimizer.schema, str(state.optimizer.variant)
    form, of_source = variant_constants(schema, variant), variant_constants(schema, said_by or variant)
    turned: list[str] = []
    if "orientation" not in form:
        return turned
    usual_scale = load_schema(schema).settings(variant)["shape_scale"]
    for group in state.optimizer.groups:
        if group.hyperparameters.get("shape_scale", usual_scale) in _EITHER_WAY:
            continue
        for path in group.paths:
            rank = len(state.params[path].shape)
            rule, usual = state.rules.get(path) or matrix_rule(of_source, rank), matrix_rule(form, rank)
            if rule is not None and usual is not None and rule.axes != usual.axes:
                turned.append(path)
    return turned


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
    """Reads the three hyperparameters that make factor rules: by path, or by what each axis is called.

    Args:
        factor_map: As `map_entries` reads it; None without one.
        logical_factor_rules: Name of an axis -> label; None without.
        logical_axes: Path -> names of its axes; None where they are unknown.

    Raises:
        UsageError: One isn't of the form T5X takes, or names an unknown label or axis.
    """
    by_axes = None
    if logical_factor_rules is not None and logical_axes is not None:
        table = _mapping(logical_factor_rules, "logical_factor_rules")
        by_axes = _from_axes(table, _mapping(logical_axes, "logical_axes"))
    entries = () if factor_map is None else map_entries(factor_map, "factor_map")
    return GivenRules(tuple(PathPattern(e.pattern, e.is_regex, labels(e.value)) for e in entries), by_axes)


def _mapping(value: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise UsageError(f"{name} isn't a map.", expected="{name: value, ...}", found=repr(value)[:200])
    return value


def _is_of(name: Any, table: Mapping[str, Any]) -> bool:
    return (name is None or isinstance(name, str)) and name in table


def _from_axes(table: Mapping[str, Any], axes: Mapping[str, Any]) -> dict[str, tuple[Axis, ...]]:
    rules = {}
    for path, names in axes.items():
        is_list = isinstance(names, (list, tuple))
        unknown = [name for name in names if not _is_of(name, table)] if is_list else [names]
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


def effective(
    rule: tuple[Axis, ...] | None, shape: Shape, factored: bool, min_dim_size_to_factor: int
) -> tuple[Axis, ...] | None:
    """Returns the labels by which T5X factors a parameter; None if T5X stops because it has no rule.

    A rule without BATCH is ignored for rank 0 to 2.

    Args:
        rule: Its entry in the factor rules; None for the heuristic.
        shape: Its shape.
        factored: The hyperparameter.
        min_dim_size_to_factor: The smallest second-largest axis that the heuristic factors.
    """
    if not factored:
        return (Axis.NONE,) * len(shape)
    if rule is not None and (len(shape) > 2 or Axis.BATCH in rule):
        return rule
    if len(shape) > 2:
        return None
    large = len(shape) == 2 and min(shape) >= min_dim_size_to_factor
    return by_size(shape) if large else (Axis.NONE,) * len(shape)


def swapped(axes: Iterable[Axis]) -> tuple[Axis, ...]:
    """Returns labels with those of rows and columns exchanged."""
    other = {Axis.ROW: Axis.COLUMN, Axis.COLUMN: Axis.ROW}
    return tuple(other.get(axis, axis) for axis in axes)


def by_size(shape: Shape) -> tuple[Axis, ...]:
    """Returns the labels of a matrix that is factored by its size: the larger axis is COLUMN, the second of equals.

    Example:
        >>> [axis.value for axis in by_size((512, 64))]
        ['COLUMN', 'ROW']
    """
    axes = [Axis.ROW, Axis.ROW]
    axes[TIE_BREAK["last"](shape)[0]] = Axis.COLUMN
    return tuple(axes)


TIE_BREAK: Mapping[str, Callable[[Sequence[int]], list[int]]] = {
    "first": lambda sizes: sorted(range(len(sizes)), key=lambda i: -sizes[i]),
    "last": lambda sizes: sorted(range(len(sizes)), key=lambda i: (-sizes[i], -i)),
    "argsort": lambda sizes: [int(i) for i in np.argsort(sizes)[::-1]],
    "by_position": lambda sizes: list(range(len(sizes)))[::-1],
}
"""Axes from the one that `v_row` averages away on, by `tie_break`, which also says whether sizes matter."""


def by_shape(
    form: Mapping[str, Any],
    shape: Shape,
    factored: bool,
    min_dim_size_to_factor: int = 0,
    stacked: Collection[int] = (),
) -> tuple[Axis, ...]:
    """Returns what a variant does with a parameter for which nobody wrote a rule, as labels.

    Args:
        form: The variant's constants.
        shape: The parameter's shape.
        factored: The hyperparameter.
        min_dim_size_to_factor: The smallest second-largest axis that is factored, where the variant has a minimum.
        stacked: Axes along which parameters are stacked: they are kept apart.

    Example:
        >>> from statekit.state.constants import variant_constants
        >>> [axis.value for axis in by_shape(variant_constants("adafactor", "t2t_late"), (3, 64, 8), True)]
        ['NONE', 'ROW', 'COLUMN']
    """
    axes = [Axis.BATCH if i in stacked else Axis.NONE for i in range(len(shape))]
    free = [i for i in range(len(shape)) if i not in stacked]
    enough = len(free) >= 2 if form["factored_rank"] == "two_or_more" else len(shape) == 2
    if factored and enough:
        column, row = (free[i] for i in TIE_BREAK[form["tie_break"]]([shape[i] for i in free])[:2])
        if form["factored_minimum"] == "none" or shape[row] >= min_dim_size_to_factor:
            axes[column], axes[row] = Axis.COLUMN, Axis.ROW
    return tuple(axes)


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
    fitting = [labels for labels in taken if fits(labels, shape, row, column)]
    if not fitting:
        return None
    proven = len(fitting) == 1 and (by_logical_axes or Axis.BATCH not in fitting[0])
    return Rule(fitting[0], "file" if proven else "assumed")


def shown_rule(shape: Shape, slots: Mapping[str, Tensor], variant: str | None) -> Rule | None:
    """Returns the rule of a parameter: by the variant if shapes alone decide there, else by its slots."""
    constants = variant_constants("adafactor", variant) if variant else {"factored_rank": "two_or_rule"}
    by_rule = constants["factored_rank"] == "two_or_rule"
    if "v_row" not in slots:
        return Rule((Axis.NONE,) * len(shape), "file" if len(shape) < 2 or not by_rule else "assumed")
    row, column = slots["v_row"].shape, slots["v_col"].shape
    if not by_rule and len(shape) > 1 and fits(axes := by_shape(constants, shape, True), shape, row, column):
        open_tie = constants["tie_break"] == "argsort" and len(shape) > 3 and row == column
        return Rule(axes, "assumed" if open_tie else "file")
    for axes in ((Axis.ROW, Axis.COLUMN), (Axis.COLUMN, Axis.ROW)):
        if len(shape) == 2 and fits(axes, shape, row, column):
            return Rule(axes, "assumed" if shape[0] == shape[1] else "file")
    return from_slots(shape, row, column, False)


def unused(rule: Rule) -> tuple[str, ...]:
    """Returns the slots of the second moment that a parameter doesn't use."""
    return WHOLE if rule.factored else FACTORED


def is_derived(variant: str, slot: str, rule: Rule) -> bool:
    """Tells whether an implementation stores in a slot what follows from the two that are in use."""
    return rule.factored and slot in WHOLE and variant_constants("adafactor", variant)["redundant_v"]


def placeholder(variant: str, slot: str, dtype: DType) -> Tensor | None:
    """Returns what an implementation stores for a slot that isn't in use; None if nothing.

    Args:
        variant: The implementation.
        slot: Canonical name.
        dtype: Of a placeholder that is of the slots' own dtype.

    Example:
        >>> placeholder("optax", "v", np.dtype("float32")).shape, placeholder("torch", "v", np.dtype("float32"))
        ((1,), None)
    """
    kind = variant_constants("adafactor", variant)["placeholders"]
    if kind == "zeros_1":
        return Filled(PLACEHOLDER, dtype, reason=_UNUSED)
    if kind == "int32_scalar" and slot in FACTORED:
        return Filled((), np.dtype(np.int32), reason=_UNUSED)
    return None


def with_placeholders(
    variant: str, slots: Mapping[str, Tensor], names: Iterable[str], dtype: DType
) -> dict[str, Tensor]:
    """Returns slots with an implementation's placeholders under those of the names that have none."""
    empty = {name: placeholder(variant, name, dtype) for name in names if name not in slots}
    return {**slots, **{name: tensor for name, tensor in empty.items() if tensor is not None}}


def stored_shape(variant: str, slot: str, rule: Rule, shape: Shape) -> Shape:
    """Returns the shape in which an implementation stores a slot that is in use.

    Args:
        variant: The implementation.
        slot: Canonical name, of any slot.
        rule: How the parameter is factored.
        shape: The parameter's.

    Example:
        >>> rule = Rule((Axis.ROW, Axis.COLUMN), "file")
        >>> stored_shape("torch", "v_row", rule, (4, 3)), stored_shape("optax", "v_row", rule, (4, 3))
        ((4, 1), (4,))
    """
    if slot not in FACTORED:
        return shape
    if variant_constants("adafactor", variant)["reduced_axis"] == "dropped":
        return rule.slot_shape(slot, shape)
    gone = rule.dims(Axis.COLUMN if slot == "v_row" else Axis.ROW)
    return tuple(1 if i in gone else n for i, n in enumerate(shape))
