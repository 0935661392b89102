"""What an optimizer of statekit.tensorflow was told: plain data, which its configuration holds whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from statekit.dropin.by_name import EXCLUDED, MULTIPLIERS, SCALE
from statekit.errors import UsageError, fault_list
from statekit.optim.run import counts_apart, steps_for
from statekit.state.constants import variant_constants
from statekit.state.factoring import PathPattern, first_entry, map_entries
from statekit.state.options import FACTOR, KERAS, offered, option_faults, rule_of
from statekit.state.schema import load_schema
from statekit.state.train_state import Group, Rule
from statekit.tensors.tensor import Shape

_SHOWN = 40


@dataclass(frozen=True)
class Settings:
    """What the user, or a checkpoint, said.

    Attributes:
        schema: The optimizer.
        variant: Whose rule.
        hyperparameters: Canonical names and values, for parameters of no group.
        groups: Groups with hyperparameters of their own: `paths`, and what is different for them, which may be
            `learning_rate_factor`.
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

    def check(self) -> None:
        """Raises UsageError for options that can't be, StateError if the variant can't be stepped."""
        steps_for(self.schema, self.variant)
        faults = list(option_faults(self.schema, self.variant, self.hyperparameters))
        faults += [fault for group in self.groups for fault in self._group_faults(group)]
        if self.missed and not counts_apart(self.schema, self.variant):
            faults.append((f"variant {self.variant} counts all parameters together", "missed"))
        refuse(f"Options of {self.schema} can't be used", faults)

    def _group_faults(self, group: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        own = {name: value for name, value in group.items() if name not in ("paths", FACTOR)}
        yield from option_faults(self.schema, self.variant, own)
        for name in own.keys() & by_keras(self.schema, self.variant).keys():
            yield "is done by Keras for all parameters together", name
        if not isinstance(group.get("paths"), Sequence) or isinstance(group.get("paths"), str):
            yield "is missing in a group", "paths"

    def to_json(self) -> dict[str, Any]:
        """Returns the arguments of a constructor that say the same."""
        told = {"groups": [dict(group) for group in self.groups], "rules": dict(self.rules)}
        told |= {"names": dict(self.names), "missed": dict(self.missed)}
        return {"variant": self.variant, **self.hyperparameters, **{k: v for k, v in told.items() if v}}


@dataclass(frozen=True)
class Told:
    """One group of parameters as the step takes it."""

    group: Group
    rules: Mapping[str, Rule]
    rate_factor: float


def refuse(subject: str, faults: Sequence[tuple[str, str]], remedy: str = "") -> None:
    """Raises UsageError if there are faults."""
    if faults:
        raise UsageError(
            f"{subject}: {len(faults)} faults.", found=fault_list(faults[:_SHOWN]), remedy=remedy
        )


def by_keras(schema: str, variant: str) -> dict[str, str]:
    """Returns which of a variant's hyperparameters Keras' base class stands for: canonical name -> Keras' name."""
    if variant_constants(schema, variant).get("gradient_clipping") != "base_class":
        return {name: name for name in ("clipvalue",) if name in offered(schema, variant)}
    spec = load_schema(schema).hyperparameters
    native = {name: str(spec[name]["native"].get("keras", {}).get("name", name)) for name in spec}
    return {name: keras for name, keras in native.items() if keras in KERAS}


def told(settings: Settings, shapes: Mapping[str, Shape]) -> list[Told]:
    """Sorts parameters into groups, each with all that its step needs to know.

    Args:
        settings: What the user said.
        shapes: Shape by path.

    Raises:
        UsageError: A parameter has no factor rule, stands in two groups, or is left open; lists every one.
    """
    faults: list[tuple[str, str]] = []
    common = {**offered(settings.schema, settings.variant), **settings.hyperparameters}
    grouped: list[tuple[list[str], Mapping[str, Any]]] = []
    taken: set[str] = set()
    for group in settings.groups:
        paths = [path for path in group["paths"] if path in shapes]
        faults += [
            ("is in a group, but not among the variables", p) for p in group["paths"] if p not in shapes
        ]
        faults += [("stands in two groups", path) for path in paths if path in taken]
        taken.update(paths)
        grouped.append((paths, group))
    grouped.append(([path for path in shapes if path not in taken], {}))
    faults += [
        (f"has {name}, but isn't among the variables", path)
        for name in MULTIPLIERS
        for path in common.get(name) or ()
        if path not in shapes
    ]
    found = [_told(settings, paths, {**common, **own}, shapes, faults) for paths, own in grouped if paths]
    remedy = (
        'give factor_map=[(regex, ["ROW", "COLUMN", "BATCH" or "NONE" for each axis]), ...] as the run had it'
    )
    refuse("Parameters can't be optimized", faults, remedy)
    return found


def _told(
    settings: Settings,
    paths: Sequence[str],
    known: Mapping[str, Any],
    shapes: Mapping[str, Shape],
    faults: list[tuple[str, str]],
) -> Told:
    values = {name: value for name, value in known.items() if name not in ("paths", FACTOR)}
    rules = {}
    if settings.schema == "adafactor":
        entries = map_entries(values["factor_map"], "factor_map") if values.get("factor_map") else ()
        for path in paths:
            if path in settings.rules:
                rules[path] = Rule.from_json(settings.rules[path])
                continue
            rule, fault = rule_of(path, shapes[path], settings.variant, values, entries)
            if rule is None:
                faults.append((fault, path))
            else:
                rules[path] = rule
    if not isinstance(values.get(SCALE, True), bool):
        values[SCALE] = _flags(SCALE, map_entries(values[SCALE], SCALE), paths, faults)
    masked = variant_constants(settings.schema, settings.variant).get("decay_exclusions") == "mask"
    if masked and values.get(EXCLUDED) is not None:
        values[EXCLUDED] = _flags(EXCLUDED, _exclusions(values[EXCLUDED]), paths, faults)
    return Told(Group(tuple(paths), values), rules, float(known.get(FACTOR, 1.0)))


def _exclusions(value: Any) -> tuple[PathPattern, ...]:
    """Returns exclusions as lines of a map: regexes exclude what they are found in, and nothing else."""
    if isinstance(value, Mapping):
        return map_entries(value, EXCLUDED)
    return map_entries([*((pattern, True) for pattern in value), ("", False)], EXCLUDED)


def _flags(
    option: str, entries: Sequence[PathPattern], paths: Sequence[str], faults: list[tuple[str, str]]
) -> dict[str, bool]:
    found = {}
    for path in paths:
        entry = first_entry(entries, path)
        if entry is None or not isinstance(entry.value, bool):
            faults.append((f"{option} has no true or false for it", path))
        else:
            found[path] = entry.value
    return found
