"""Where a run can go on from a checkpoint, how exactly, and by which lines of code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from statekit.conversion import registry
from statekit.conversion.contracts import Exactness
from statekit.conversion.open_state import OpenState
from statekit.conversion.plan import losses_in
from statekit.conversion.prepared import encoded_in, rule_change_to
from statekit.conversion.registry import LayoutCard
from statekit.conversion.resume import frameworks, of_checkpoint, resume_lines
from statekit.conversion.rule_change import RuleChange
from statekit.conversion.target import check_said, is_carried, unsaid
from statekit.errors import InexactError, StateError, UnknownRuleError, UsageError
from statekit.state.evidence import Fact
from statekit.state.schema import WEIGHTS
from statekit.tensors.tree import to_json


@dataclass(frozen=True)
class Resumption:
    """How a run goes on in one layout.

    Attributes:
        layout: Its name.
        title: What it is.
        containers: What it is written in, the usual one first.
        exactness: How exactly the run goes on.
        reasons: Why it isn't equal in real arithmetic, a sentence each.
        made_up: By which hyperparameters differences are made up for.
        here: Whether the checkpoint has this layout already.
        dropped: What it has no place for, by canonical name, each with the reason.
        refusal: Why it can't take the run as it is, and what to say beside it; None if it can.
        asks: Names of the facts that it stores and nobody gave; with them it takes the run.
    """

    layout: str
    title: str
    containers: tuple[str, ...]
    exactness: Exactness
    reasons: tuple[str, ...]
    made_up: tuple[str, ...]
    here: bool
    dropped: Mapping[str, str] = field(default_factory=dict)
    refusal: str | None = None
    asks: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        lists = {name: list(getattr(self, name)) for name in ("containers", "reasons", "made_up", "asks")}
        return {
            **vars(self),
            **lists,
            "dropped": dict(self.dropped),
            "exactness": self.exactness.name.lower(),
        }


def resumes_in(opened: OpenState) -> tuple[Resumption, ...]:
    """Returns each layout that holds a checkpoint's optimizers, with how exactly its run goes on there.

    It goes by the rules and by the checkpoint's own hyperparameters, the most exact first, those that can't take it
    last; what a container can't hold, a plan of the conversion says. None of weights alone: they have no run.
    """
    state = opened.state
    if state.optimizer.schema == WEIGHTS:
        return ()
    schemas = [schema for schema, _ in state.optimizer.kinds]
    cards = [card for card in map(registry.layout_card, registry.layout_names()) if card.holds(schemas)]
    own_card = registry.layout_card(opened.layout)
    resumptions = [_resumption(opened, card, own_card) for card in cards]
    return tuple(
        sorted(
            resumptions,
            key=lambda resumption: (
                resumption.refusal is not None,
                not resumption.here,
                resumption.exactness,
            ),
        )
    )


def _resumption(opened: OpenState, card: LayoutCard, own_card: LayoutCard) -> Resumption:
    """Returns how a run goes on in a layout; why it doesn't is the refusal."""
    state, here = opened.state, card.name == opened.layout
    change: RuleChange | None = None
    dropped: Mapping[str, str] = {}
    losses: Mapping[str, Exactness] = {}
    refusal = None
    asks: list[Fact] = []
    # In its own layout the run goes on as it is.
    if not here:
        try:
            change = rule_change_to(card, state, opened.layout)
            target_state = change.state if change else state
            if card.stores_values and not is_carried(state, opened.layout, card, own_card):
                asks = unsaid(state, target_state, opened.ref)
                check_said(asks, opened.ref.path, card.name)
            encoded, _ = encoded_in(registry.layout(card.name), target_state)
            dropped = encoded.dropped
            losses = losses_in(encoded)
        except (InexactError, UnknownRuleError, UsageError) as error:
            refusal = str(error)
    differences = change.differences if change else ()
    return Resumption(
        layout=card.name,
        title=card.title,
        containers=card.containers,
        exactness=max([change.exactness if change else Exactness.BITWISE, *losses.values()]),
        reasons=(
            *(str(difference) for difference in differences if difference.exactness > Exactness.ROUNDING),
            *(reason for reason, exactness in losses.items() if exactness > Exactness.ROUNDING),
        ),
        made_up=tuple(change.compensated_by) if change else (),
        here=here,
        dropped=dropped,
        refusal=refusal,
        asks=tuple(fact.name for fact in asks),
    )


def resume_code(opened: OpenState) -> dict[str, tuple[str, ...]]:
    """Returns the lines that go on from a checkpoint: by `""` in its own system, else by the name of a framework.

    What nobody has told how to go on from, or can't take its optimizers, is left out.
    """
    state, place = to_json(opened.state.to_json()), of_checkpoint(opened)
    code = {}
    for framework in ("", *frameworks()):
        try:
            lines = resume_lines(place, state, framework or None)
        except StateError:  # a framework that has no place for several optimizers
            continue
        if lines:
            code[framework] = tuple(lines)
    return code
