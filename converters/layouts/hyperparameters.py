"""What is told of a run beside its tensors: by the user, by the manifest of a conversion, by files that lie around."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from statekit.errors import StateError
from statekit.files.checkpoint import Checkpoint
from statekit.state.train_state import KnownFrom
from statekit.tensors.tree import from_json


@dataclass(frozen=True)
class Settings:
    """Hyperparameters of one optimizer, each with where it is known from."""

    values: Mapping[str, Any] = field(default_factory=dict)
    known_from: Mapping[str, KnownFrom] = field(default_factory=dict)

    def over(self, values: Mapping[str, Any], known: KnownFrom) -> Settings:
        """Returns the settings with other values that outweigh them."""
        return Settings({**self.values, **values}, {**self.known_from, **dict.fromkeys(values, known)})

    def under(self, stronger: Settings) -> Settings:
        """Returns the settings with others that outweigh them."""
        return Settings({**self.values, **stronger.values}, {**self.known_from, **stronger.known_from})

    def without(self, *names: str) -> Settings:
        """Returns the settings without some of them."""
        kept = {name: value for name, value in self.values.items() if name not in names}
        return Settings(kept, {name: self.known_from[name] for name in kept})

    def is_told(self, name: str) -> bool:
        """Tells whether a hyperparameter was given, or stands in a file, and isn't merely assumed."""
        return self.known_from.get(name, "assumed") != "assumed"

    def assumed(self) -> dict[str, Any]:
        """Returns those that are merely assumed."""
        return {name: value for name, value in self.values.items() if self.known_from[name] == "assumed"}


@dataclass(frozen=True)
class Member:
    """Parameters that one optimizer moves.

    Attributes:
        paths: The parameters.
        told: What was told about the optimizer.
        settled: Whether that is all that was ever known, so that nothing shall be assumed besides.
    """

    paths: tuple[str, ...]
    told: Settings
    settled: bool = False


@dataclass(frozen=True)
class Known:
    """What the manifest of a conversion says of its state."""

    variant: str | None
    schedule: int
    groups: tuple[Member, ...]
    rules: Mapping[str, Any]
    assumptions: tuple[str, ...]


def manifest_state(checkpoint: Checkpoint, schema: str) -> Known | None:
    """Reads what a conversion's manifest says of the state, if it is one of this schema.

    Raises:
        StateError: The manifest's record is incomplete.
    """
    state = from_json((checkpoint.manifest or {}).get("state"))
    if not isinstance(state, Mapping) or state.get("schema") != schema:
        return None
    try:
        groups = tuple(
            Member(tuple(g["paths"]), Settings({**g["hyperparameters"]}, {**g["known_from"]}), settled=True)
            for g in state["groups"]
        )
        schedule = int(state["counts"]["schedule"])
        return Known(state["variant"], schedule, groups, {**state["rules"]}, tuple(state["assumptions"]))
    except (KeyError, TypeError, ValueError) as error:
        found = f"{type(error).__name__}: {error}"
        raise StateError(
            "The manifest's record of the state is incomplete.", place=checkpoint.path, found=found
        ) from error
