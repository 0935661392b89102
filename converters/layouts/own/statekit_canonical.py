"""Layout `statekit`, the canonical one: a TrainState as it is, without another implementation's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from statekit.conversion.contracts import Encoded, Evidence, Hints
from statekit.errors import StateError
from statekit.files.checkpoint import Checkpoint
from statekit.state.schema import WEIGHTS, all_variants, schema_names
from statekit.state.train_state import Counts, Group, Optimizer, Rule, TrainState
from statekit.tensors.tensor import Tensor


@dataclass(frozen=True)
class Canonical:
    """The canonical names, for every optimizer that has a schema."""

    name: str = "statekit"
    title: str = "canonical names: params, slots, groups, extra, state"
    variants: Mapping[str, tuple[str, ...]] = field(
        default_factory=lambda: {**all_variants(schema_names()), WEIGHTS: ()}
    )
    containers: tuple[str, ...] = ("statekit",)
    keeps_masters: bool = True
    keeps_encoding: bool = True
    holds_several: bool = True

    def detect(self, checkpoint: Checkpoint) -> Evidence | None:
        """Looks for the five parts."""
        tree = checkpoint.tree
        if not isinstance(tree, Mapping) or tree.keys() != _PARTS:
            return None
        state = tree["state"]
        return (
            Evidence(30, "a state beside its params, slots, groups and extra") if _is_state(state) else None
        )

    def decode(self, checkpoint: Checkpoint, hints: Hints) -> TrainState:
        """Returns the state that was encoded; hints override hyperparameters by their canonical names.

        Raises:
            StateError: The parts don't describe a state.
            UsageError: A hint that the schema doesn't know.
        """
        tree = checkpoint.tree
        try:
            state = _state(tree, tree["state"])
        except (TypeError, ValueError, AttributeError, LookupError) as error:
            if isinstance(error, StateError):
                raise
            fault = f"{type(error).__name__}: {error}"
            raise StateError(
                "The record of a state is incomplete.", place=checkpoint.path, found=fault
            ) from None
        return hints.applied(state)

    def encode(self, state: TrainState) -> Encoded:
        """Returns the five parts; every tensor as it is."""
        tree = {
            "params": dict(state.params),
            "slots": {path: dict(named) for path, named in state.slots.items()},
            "groups": [dict(group.slots) for group in state.optimizer.groups],
            "extra": dict(state.extra),
            "state": state.to_json(),
        }
        return Encoded(tree, state.counts.updates)


_PARTS = {"params", "slots", "groups", "extra", "state"}


def _is_state(record: Any) -> bool:
    return isinstance(record, Mapping) and record.keys() >= {"schema", "variant", "counts", "groups", "rules"}


def _state(tree: Mapping[str, Any], record: Mapping[str, Any]) -> TrainState:
    counts = record["counts"]
    groups = tuple(
        Group(
            tuple(g["paths"]),
            g["hyperparameters"],
            g["known_from"],
            _tensors(slots),
            g.get("schema"),
            g.get("variant"),
        )
        for g, slots in zip(record["groups"], tree["groups"], strict=True)
    )
    return TrainState(
        params=_tensors(tree["params"]),
        slots={path: _tensors(slots) for path, slots in tree["slots"].items()},
        optimizer=Optimizer(record["schema"], record["variant"], groups),
        counts=Counts(int(counts["updates"]), int(counts["schedule"]), dict(counts.get("behind", {}))),
        rules={path: Rule.from_json(rule) for path, rule in record["rules"].items()},
        extra=tree["extra"],
        assumptions=tuple(record["assumptions"]),
    )


def _tensors(part: Mapping[str, Any]) -> Mapping[str, Tensor]:
    for name, leaf in part.items():
        if not isinstance(leaf, Tensor):
            raise TypeError(f"{name} isn't a tensor")
    return part


LAYOUT = Canonical()
