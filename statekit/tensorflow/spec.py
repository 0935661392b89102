"""What an optimizer of statekit.tensorflow is to be: plain data, which its configuration holds whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from statekit.dropin.by_name import by_name, factor_rules
from statekit.dropin.options import refuse_options
from statekit.errors import Faults, UsageError
from statekit.optim.run import counts_apart, steps_for
from statekit.state.constants import variant_constants
from statekit.state.options import FACTOR, FACTOR_MAP, KERAS, LOGICAL, Options, offered, read_options
from statekit.state.schema import load_schema
from statekit.state.train_state import MULTIPLIERS, Group, Rule, RuleRecord
from statekit.tensors.tensor import Shape
from statekit.tensors.typed import Name, typed

_OWN_KEYS = ("paths", "schema", "variant", FACTOR)
"""Keys of a group that are no hyperparameters."""


@dataclass(frozen=True)
class OptimizerSpec:
    """Whose rule, and what the user, or a checkpoint, said of it.

    Attributes:
        schema: The optimizer.
        variant: Whose rule.
        hyperparameters: Canonical names and values, for parameters of no group.
        groups: Groups with hyperparameters of their own: `paths`, and what is different for them, which may be
            `learning_rate_factor`; or, with `schema` and `variant`, groups that another optimizer moves.
        rules: How parameters are factored whose rule is known, by path, as `Rule.to_json`.
        names: The path that a parameter has for all the above, by the variable's path, where they differ.
        missed: Updates that a parameter has missed, by path, where the variant counts each by itself.
    """

    schema: str
    variant: str
    hyperparameters: Mapping[str, Any] = field(default_factory=dict)
    groups: Sequence[Mapping[str, Any]] = ()
    rules: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    missed: Mapping[str, int] = field(default_factory=dict)

    @property
    def kind(self) -> tuple[str, str]:
        """Whose rule moves parameters of no group."""
        return self.schema, self.variant

    def kind_of(self, group: Mapping[str, Any]) -> tuple[str, str]:
        """Returns whose rule moves a group.

        Raises:
            StateError: Nobody says its variant, or that can't be stepped.
            NotFoundError: There is no such schema.
        """
        schema = group.get("schema", self.schema)
        variant = group.get("variant", self.variant if schema == self.schema else None)
        steps_for(schema, variant)
        return schema, str(variant)

    def to_json(self) -> dict[str, Any]:
        """Returns the arguments of a constructor that say the same."""
        by_name = {"groups": [dict(group) for group in self.groups], "rules": dict(self.rules)}
        by_name |= {"names": dict(self.names), "missed": dict(self.missed)}
        return {"variant": self.variant, **self.hyperparameters, **{k: v for k, v in by_name.items() if v}}


def read_spec(spec: OptimizerSpec, faults: Sequence[tuple[str, str]]) -> OptimizerSpec:
    """Returns a spec with canonical names for those that were said.

    Args:
        spec: As the user says it.
        faults: What is wrong besides.

    Raises:
        UsageError: An option can't be; lists every one.
        StateError: The variant can't be stepped.
    """
    steps_for(spec.schema, spec.variant)
    common = read_options(spec.schema, spec.variant, spec.hyperparameters)
    read = [read_options(*spec.kind_of(group), _said(group)) for group in spec.groups]
    all_faults = [*faults, *common.faults]
    for group, options in zip(spec.groups, read, strict=True):
        all_faults += [*options.faults, *_group_faults(spec, group, options)]
    if spec.missed and not any(counts_apart(*kind) for kind in (spec.kind, *map(spec.kind_of, spec.groups))):
        all_faults.append((f"variant {spec.variant} counts all parameters together", "missed"))
    remedies = dict.fromkeys(
        read_options_of.remedy for read_options_of in (common, *read) if read_options_of.remedy
    )
    refuse_options(all_faults, "; ".join(remedies))
    groups = [
        {**{key: group[key] for key in _OWN_KEYS if key in group}, **options.values}
        for group, options in zip(spec.groups, read, strict=True)
    ]
    return replace(spec, hyperparameters=common.values, groups=tuple(groups))


def _said(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in _OWN_KEYS}


def _group_faults(
    spec: OptimizerSpec, group: Mapping[str, Any], options: Options
) -> Iterator[tuple[str, str]]:
    for name in options.values.keys() & by_keras(*spec.kind_of(group)).keys():
        yield "is done by Keras for all parameters together", name
    if not isinstance(group.get("paths"), Sequence) or isinstance(group.get("paths"), str):
        yield "is missing in a group", "paths"


@dataclass(frozen=True)
class GroupSpec:
    """One group of parameters as the step takes it, with the schema and variant that move it."""

    kind: tuple[str, str]
    group: Group
    rules: Mapping[str, Rule]
    rate_factor: float


def by_keras(schema: str, variant: str) -> dict[str, str]:
    """Returns which of a variant's hyperparameters Keras' base class stands for: canonical name -> Keras' name."""
    if variant_constants(schema, variant).get("gradient_clipping") != "base_class":
        return {name: name for name in ("clipvalue",) if name in offered(schema, variant)}
    spec = load_schema(schema).hyperparameters
    native = {name: str(spec[name]["native"].get("keras", {}).get("name", name)) for name in spec}
    return {name: keras for name, keras in native.items() if keras in KERAS}


def _grouped(
    spec: OptimizerSpec, shapes: Mapping[str, Shape], faults: Faults
) -> list[tuple[list[str], Mapping[str, Any]]]:
    """Returns the paths of each group with what is said of it, and of all others at the end."""
    grouped: list[tuple[list[str], Mapping[str, Any]]] = []
    taken: set[str] = set()
    for group in spec.groups:
        paths = [path for path in group["paths"] if path in shapes]
        faults += [
            ("is in a group, but not among the variables", p) for p in group["paths"] if p not in shapes
        ]
        faults += [("stands in two groups", path) for path in paths if path in taken]
        taken.update(paths)
        grouped.append((paths, group))
    return [*grouped, ([path for path in shapes if path not in taken], {})]


def group_specs(spec: OptimizerSpec, shapes: Mapping[str, Shape]) -> list[GroupSpec]:
    """Sorts parameters into groups, each with all that its step needs to know.

    Args:
        spec: What the user said, in canonical names.
        shapes: Shape by path.

    Raises:
        UsageError: A parameter has no factor rule, stands in two groups, or is left open; lists every one.
    """
    faults = Faults()
    grouped = _grouped(spec, shapes, faults)
    faults += [
        (f"has {name}, but isn't among the variables", path)
        for name in MULTIPLIERS
        for path in spec.hyperparameters.get(name) or ()
        if path not in shapes
    ]
    specs = [_group_spec(spec, paths, settings, shapes, faults) for paths, settings in grouped if paths]
    remedy = (
        'give factor_map=[(regex, ["ROW", "COLUMN", "BATCH" or "NONE" for each axis]), ...] as the run had it'
    )
    faults.check(UsageError, "Parameters can't be optimized", remedy=remedy)
    return specs


def _group_spec(
    spec: OptimizerSpec,
    paths: Sequence[str],
    settings: Mapping[str, Any],
    shapes: Mapping[str, Shape],
    faults: Faults,
) -> GroupSpec:
    kind = spec.kind_of(settings)
    schema, variant = load_schema(kind[0]), kind[1]
    usual = {name: value for name, value in offered(*kind).items() if name != LOGICAL}
    options = {**usual, **(spec.hyperparameters if kind == spec.kind else {}), **settings}
    records = typed(spec.rules, dict[Name, RuleRecord], "rules", "These aren't factor rules", UsageError)
    given_rules = {path: Rule.from_json(records[path]) for path in paths if path in records}
    open_shapes = {path: shapes[path] for path in paths if path not in given_rules}
    rules = given_rules | factor_rules(schema, variant, options, open_shapes, faults)
    values = _said(options)
    for key in MULTIPLIERS:
        if key in values:
            values[key] = {path: factor for path, factor in values[key].items() if path in paths}
    values = by_name(schema, variant, values, paths, faults)
    values.pop(FACTOR_MAP, None)
    return GroupSpec(kind, Group(tuple(paths), values), rules, float(options.get(FACTOR, 1.0)))
