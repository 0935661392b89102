"""Hyperparameters, each with where it is known from: the user, a conversion's manifest, a file, or an assumption.

A layout starts from assumptions and replaces them by better sources. Input: values with their origin, and
the manifest's record; output: the groups of a state.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from statekit.errors import Faults, InexactError, StateError
from statekit.files.checkpoint import Checkpoint
from statekit.state.evidence import SCALED, TAKEN, Fact
from statekit.state.train_state import Group, Kind, KnownFrom, RuleRecord, StateRecord, TrainState
from statekit.tensors.tree import from_json
from statekit.tensors.typed import typed

MINIMUM = "min_dim_size_to_factor"


@dataclass(frozen=True)
class Hyperparameters:
    """Hyperparameters of one optimizer, each with its source."""

    values: Mapping[str, Any] = field(default_factory=dict)
    known_from: Mapping[str, KnownFrom] = field(default_factory=dict)

    def over(self, values: Mapping[str, Any], source: KnownFrom) -> Hyperparameters:
        """Returns the hyperparameters with other values that outweigh them."""
        return Hyperparameters(
            {**self.values, **values}, {**self.known_from, **dict.fromkeys(values, source)}
        )

    def under(self, stronger: Hyperparameters) -> Hyperparameters:
        """Returns the hyperparameters with others that outweigh them."""
        return Hyperparameters({**self.values, **stronger.values}, {**self.known_from, **stronger.known_from})

    def without(self, *names: str) -> Hyperparameters:
        """Returns the hyperparameters without some of them."""
        kept = {name: value for name, value in self.values.items() if name not in names}
        return Hyperparameters(kept, {name: self.known_from[name] for name in kept})

    def is_known(self, name: str) -> bool:
        """Tells whether a hyperparameter was given, or stands in a file, and isn't merely inferred or assumed."""
        return self.known_from.get(name, "assumed") not in TAKEN

    def assumed(self) -> dict[str, Any]:
        """Returns those that are merely assumed."""
        return {name: value for name, value in self.values.items() if self.known_from[name] == "assumed"}


def with_minimum(
    hyperparameters: Hyperparameters, factored: Sequence[int], unfactored: Sequence[int]
) -> tuple[Hyperparameters, list[str]]:
    """Returns hyperparameters whose min_dim_size_to_factor fits the slots, and what is open about it.

    Args:
        hyperparameters: Hyperparameters with the usual minimum.
        factored: The deciding size of each parameter that is factored.
        unfactored: That of each that could be and isn't.
    """
    low, high = max(unfactored, default=-1) + 1, min(factored, default=None)
    if low <= hyperparameters.values[MINIMUM] and (high is None or hyperparameters.values[MINIMUM] <= high):
        return hyperparameters, []
    if high is None:
        return hyperparameters.over({MINIMUM: low}, "assumed"), [
            f"{MINIMUM} is at least {low}; {low} is assumed."
        ]
    if low == high:
        return hyperparameters.over({MINIMUM: high}, "file"), []
    if low < high:
        return hyperparameters.over({MINIMUM: high}, "assumed"), [
            f"{MINIMUM} is from {low} to {high}; {high} is assumed."
        ]
    return hyperparameters, [
        f"{MINIMUM} is open: a parameter with a size of {high} is factored, one with {low - 1} isn't."
    ]


@dataclass(frozen=True)
class OptimizerSpec:
    """Parameters that one optimizer moves.

    Attributes:
        paths: The parameters.
        hyperparameters: What is known of the optimizer's.
        settled: Whether that is all that was ever known, so that nothing shall be assumed besides.
        kind: Whose rule it is, if that is said here.
        facts: What else is known of their updates.
    """

    paths: tuple[str, ...]
    hyperparameters: Hyperparameters
    settled: bool = False
    kind: Kind | None = None
    facts: tuple[Fact, ...] = ()

    def group(self) -> Group:
        """Returns the parameters as a group of a state."""
        hyperparameters = self.hyperparameters
        return Group(self.paths, hyperparameters.values, hyperparameters.known_from, facts=self.facts)


@dataclass(frozen=True)
class ManifestRecord:
    """What the manifest of a conversion says of its state."""

    variant: str | None
    schedule: int
    groups: tuple[OptimizerSpec, ...]
    rules: Mapping[str, RuleRecord]
    assumptions: tuple[str, ...]
    behind: Mapping[str, int] = field(default_factory=dict)
    says_updates: bool = True

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """Whose rule each group follows."""
        return tuple(group.kind for group in self.groups if group.kind is not None)


def manifest_state(checkpoint: Checkpoint, *schemas: str) -> ManifestRecord | None:
    """Reads what a conversion's manifest says of the state, if it is one of this schema, or of these together.

    Raises:
        StateError: The manifest's record is incomplete.
    """
    record = from_json((checkpoint.manifest or {}).get("state"), place=checkpoint.path)
    if not isinstance(record, Mapping) or {*str(record.get("schema")).split("+")} != {*schemas}:
        return None
    subject = "The manifest's record of the state is incomplete"
    state = typed(record, StateRecord, checkpoint.path, subject, StateError)
    Faults(
        ("has a value, and nothing says where it is known from", f"groups/{i}/hyperparameters/{name}")
        for i, g in enumerate(state["groups"])
        for name in g["hyperparameters"].keys() - g["known_from"].keys()
    ).check(StateError, subject, place=checkpoint.path)
    groups = tuple(
        OptimizerSpec(
            tuple(g["paths"]),
            Hyperparameters(g["hyperparameters"], g["known_from"]),
            settled=True,
            kind=(g.get("schema", state["schema"]), g.get("variant", state["variant"])),
            facts=tuple(fact for fact in map(Fact.from_json, g.get("facts", ())) if fact.name != SCALED),
        )
        for g in state["groups"]
    )
    counts, assumptions = state["counts"], tuple(state["assumptions"])
    return ManifestRecord(
        state["variant"],
        counts["schedule"],
        groups,
        state["rules"],
        assumptions,
        counts.get("behind", {}),
        counts.get("says_updates", True),
    )


def require_optimizer(state: TrainState, schemas: Collection[str], layout: str) -> None:
    """Refuses the state of an optimizer that a layout has no form for.

    Raises:
        InexactError: It is of one, which `found` names.
    """
    others = [schema for schema, _ in state.optimizer.kinds if schema not in schemas]
    if others:
        raise InexactError(
            f"The layout {layout} can't hold this optimizer's state.",
            expected=", ".join(schemas),
            found=", ".join(others),
        )
