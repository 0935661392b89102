"""What a conversion asks before it goes on: which optimizer it is, and the facts that the target would fill in.

In go the source's state and the card of the target's layout. A layout that leaves a fact open gets the state as it is.
One that stores a value asks for it by name; so does every target of another framework for an optimizer that the file
doesn't tell from others.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace

from statekit.conversion.cards import LayoutCard
from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.conversion.plan import Request
from statekit.errors import Faults, InexactError, UnknownRuleError
from statekit.state.evidence import BEYOND, OPTIMIZER, Fact
from statekit.state.facts import candidates, facts_of
from statekit.state.schema import WEIGHTS
from statekit.state.train_state import TrainState

NEUTRAL = "statekit"
"""The layout that holds any state as it is."""


def is_carried(state: TrainState, source: str, target: LayoutCard, sources: LayoutCard) -> bool:
    """Tells whether a state stays in its own system, or goes into the neutral folder: nothing is asked there.

    Args:
        state: The state.
        source: Name of the layout it is from.
        target: The target's layout.
        sources: The source's layout.
    """
    if target.name in (source, NEUTRAL) or state.optimizer.schema == WEIGHTS:
        return True
    return all(
        {*target.variants.get(schema, ())} <= _homes(variant, sources.variants.get(schema, ()), source)
        for schema, variant in state.optimizer.kinds
    )


def _homes(variant: str | None, followed: Sequence[str], source: str) -> set[str]:
    """Returns the variants in whose files a state is at home; statekit's own layouts hold those of any system."""
    itself = set() if variant is None else {variant}
    return itself if source.startswith(NEUTRAL) else itself | {*followed}


def check_optimizer(state: TrainState, request: Request | None = None, place: object = None) -> None:
    """Refuses a state that may be of several optimizers, or whose run does more than its schema's steps.

    Args:
        state: A state that another system's rule shall step.
        request: The conversion; None where the state is only stepped.
        place: The checkpoint.

    Raises:
        UnknownRuleError: Nobody said which optimizer it is; the remedy is the whole command.
        InexactError: What the run does besides has no place there; lists it.
    """
    open_fact = candidates(state)
    if open_fact is not None:
        remedy = 'name it: --optimizer NAME, in Python optimizer="NAME"'
        if request is not None:
            commands = [shlex.join(_command(request, name)) for name in open_fact.others[:1]]
            remedy = f"name it: {' or '.join(commands)}"
        raise UnknownRuleError(
            "The file doesn't tell which optimizer its state is of.",
            place=place if request is None else request.source,
            expected=f"--optimizer NAME, one of {', '.join(open_fact.others)}",
            found=open_fact.because,
            remedy=remedy,
        )
    besides = dict.fromkeys(
        fact.because for group in state.optimizer.groups for fact in group.facts if fact.name == BEYOND
    )
    Faults((sentence, state.optimizer.schema) for sentence in besides).check(
        InexactError,
        "The run does more than its optimizer's steps, and the target has no place for that",
        remedy="carry it within its own system, or into a folder of statekit (--to statekit)",
    )


def _command(request: Request, optimizer: str) -> list[str]:
    """Returns the command that asks for the same conversion and names the optimizer."""
    words = ["statekit", "convert", str(request.source), str(request.target)]
    words += replace(request.ref, optimizer=optimizer).words()
    named = {"--to": request.to, "--layout": request.layout}
    for flag, value in named.items():
        words += [] if value is None else [flag, str(value)]
    return words


def unsaid(state: TrainState, hints: CheckpointRef) -> list[Fact]:
    """Returns the facts that nobody says, of a state as the target has it; with a flag, defaults are said."""
    allowed = ("assumed",) if hints.assume_defaults else ()
    facts = (fact for fact in facts_of(state) if fact.source in ("assumed", "unknown"))
    return [fact for fact in facts if fact.source not in allowed and fact.name != OPTIMIZER]


def check_said(facts: Sequence[Fact], request: Request, layout: str) -> None:
    """Refuses a target that would store values which nobody gave.

    Raises:
        UnknownRuleError: Names every one, with its documented default where there is one.
    """
    if not facts:
        return
    assumed = [fact for fact in facts if fact.source == "assumed"]
    unknown = [fact for fact in facts if fact.source == "unknown"]
    said = [f"{fact.name} ({fact.because})" for fact in unknown]
    said += [f"{fact.name} ({fact.value} is {fact.because})" for fact in assumed]
    options = " ".join(f"--hparams {fact.name}=..." for fact in (unknown if assumed else facts))
    accept = "--assume-defaults" if assumed else ""
    raise UnknownRuleError(
        f"The layout {layout} stores what no file says and nobody gave.",
        place=request.source,
        expected=", ".join(fact.name for fact in facts),
        found="; ".join(said),
        remedy=f"say it: {' '.join(part for part in (options, accept) if part)}",
    )
