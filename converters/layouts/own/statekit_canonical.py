"""Layout `statekit`, the canonical one: a TrainState as it is, without another implementation's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypedDict

from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.conversion.contracts import Encoded, Evidence
from statekit.converters.layouts.own.lines import neutral_lines
from statekit.errors import StateError
from statekit.files.checkpoint import Checkpoint
from statekit.lines.printing import SavedRun, State
from statekit.state.evidence import Fact
from statekit.state.schema import NATIVE, WEIGHTS, all_variants, schema_names
from statekit.state.train_state import Counts, Group, Optimizer, Rule, StateRecord, TrainState
from statekit.tensors.quantized import Quantized, QuantizedParts
from statekit.tensors.tensor import Tensor
from statekit.tensors.typed import Name, typed


@dataclass(frozen=True)
class Canonical:
    """The canonical names, for every optimizer that has a schema."""

    name: str = "statekit"
    title: str = "canonical names: params, slots, groups, extra, state"
    variants: Mapping[str, tuple[str, ...]] = field(
        default_factory=lambda: {**all_variants(schema_names()), WEIGHTS: (), **dict.fromkeys(NATIVE, ())}
    )
    containers: tuple[str, ...] = ("statekit",)
    schedule_in: str = "apart"
    keeps_masters: bool = True
    keeps_encoding: bool = True
    holds_several: bool = True

    def detect(self, checkpoint: Checkpoint) -> Evidence | None:
        """Looks for the five parts."""
        tree = checkpoint.tree
        if not isinstance(tree, Mapping) or tree.keys() != Parts.__annotations__.keys():
            return None
        state = tree["state"]
        return (
            Evidence(30, "a state beside its params, slots, groups and extra") if _is_state(state) else None
        )

    def decode(self, checkpoint: Checkpoint, hints: CheckpointRef) -> TrainState:
        """Returns the state that was encoded; hints override hyperparameters by their canonical names."""
        tree = typed(
            checkpoint.tree, Parts, checkpoint.path, "The record of a state is incomplete", StateError
        )
        if len(tree["groups"]) != len(tree["state"]["groups"]):
            raise StateError(
                "The record of a state has other groups than there are slots of groups.",
                place=checkpoint.path,
                expected=len(tree["state"]["groups"]),
                found=len(tree["groups"]),
            )
        return hints.applied(_state(tree, tree["state"]))

    def encode(self, state: TrainState) -> Encoded:
        """Returns the five parts; every tensor as it is."""
        tree = {
            "params": dict(state.params),
            "slots": {
                path: {
                    name: tensor.as_tree() if isinstance(tensor, Quantized) else tensor
                    for name, tensor in named.items()
                }
                for path, named in state.slots.items()
            },
            "groups": [dict(group.slots) for group in state.optimizer.groups],
            "extra": dict(state.extra),
            "state": state.to_json(),
        }
        return Encoded(tree, state.counts.updates)

    def lines(self, state: State, saved: SavedRun) -> list[str]:
        return neutral_lines(state, saved)


class Parts(TypedDict):
    """The five parts."""

    params: dict[Name, Tensor]
    slots: dict[Name, dict[Name, Tensor | QuantizedParts]]
    groups: list[dict[Name, Tensor]]
    extra: dict[Name, Any]
    state: StateRecord


def _is_state(record: Any) -> bool:
    return isinstance(record, Mapping) and record.keys() >= {"schema", "variant", "counts", "groups", "rules"}


def _state(tree: Parts, record: StateRecord) -> TrainState:
    counts = record["counts"]
    groups = tuple(
        Group(
            tuple(g["paths"]),
            g["hyperparameters"],
            g["known_from"],
            slots,
            g.get("schema"),
            g.get("variant"),
            tuple(map(Fact.from_json, g.get("facts", ()))),
            g.get("label"),
        )
        for g, slots in zip(record["groups"], tree["groups"], strict=True)
    )
    return TrainState(
        params=tree["params"],
        slots={
            path: {
                name: Quantized.of_parts(part) if isinstance(part, Mapping) else part
                for name, part in named.items()
            }
            for path, named in tree["slots"].items()
        },
        optimizer=Optimizer(record["schema"], record["variant"], groups),
        counts=Counts(
            counts["updates"],
            counts["schedule"],
            counts.get("behind", {}),
            says_updates=counts.get("says_updates", True),
        ),
        rules={path: Rule.from_json(rule) for path, rule in record["rules"].items()},
        extra=tree["extra"],
        assumptions=tuple(record["assumptions"]),
    )


LAYOUT = Canonical()
