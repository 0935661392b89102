"""What a conversion asks before it goes on: which optimizer it is, and the facts that the target would fill in.

In go the source's state and the card of the target's layout. A layout that leaves a fact open gets the state as it is.
One that stores a value asks for it by name; so does every target of another framework for an optimizer that the file
doesn't tell from others.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from statekit.conversion.cards import LayoutCard
from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.conversion.plan import Request
from statekit.errors import UnknownRuleError
from statekit.state.evidence import Fact
from statekit.state.exactness import Exactness
from statekit.state.facts import candidates, check_steps, facts_of
from statekit.state.schema import WEIGHTS
from statekit.state.train_state import TrainState

MASK = "exclude_from_weight_decay"
NAME_IT = "name it:"
"""Where a remedy begins that is the whole command to repeat."""
_WEAK = ("assumed", "unknown")
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


def check_optimizer(state: TrainState, request: Request) -> None:
    """Refuses a state that another system's rule would step, as `check_steps` does; the remedy is the whole command.

    Args:
        state: The source's state.
        request: The conversion.

    Raises:
        As `check_steps`.
    """
    fact = candidates(state)
    again = (
        "" if fact is None else f"{NAME_IT} {shlex.join(_command(request, next(iter(fact.others), 'NAME')))}"
    )
    check_steps(state, request.ref.place, again if request.asks else "")


def _command(request: Request, optimizer: str) -> list[str]:
    """Returns the command that asks for the same conversion and names the optimizer."""
    words = ["statekit", "convert", str(request.ref.place), str(request.target)]
    words += replace(request.ref, optimizer=optimizer).words()
    asked = {
        "--to": request.to,
        "--layout": request.layout,
        "--like": request.like,
        "--step-offset": None if request.step_offset == "keep" else request.step_offset,
        "--require": None if request.require == Exactness.ROUNDING else request.require.name.lower(),
    }
    pairs = [(flag, str(value)) for flag, value in asked.items() if value is not None]
    pairs += [pair for one in request.maps for pair in _said_of_map(one.to_json())]
    changed = request.changes.words() if request.changes is not None else []
    return [*words, *(word for pair in pairs for word in pair), *changed]


def _said_of_map(record: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields the options that make a map, as a plan has it; what lies beside a checkpoint is found again."""
    if "name" in record:
        yield "--map", str(record["name"])
    yield from (("--config", f"{key}={value}") for key, value in record.get("config", {}).items())
    yield from (("--rename", f"{pattern}={to}") for pattern, to in record.get("rename", ()))


def unsaid(state: TrainState, there: TrainState, hints: CheckpointRef) -> list[Fact]:
    """Returns the facts that a target stores and that nobody says; with a flag, documented defaults are said.

    Args:
        state: The source's state.
        there: The state as the target's rule goes on with it.
        hints: What the user says.
    """
    known = {fact.name: fact for fact in facts_of(state)}
    needed = {fact.name: fact for fact in facts_of(there)}
    # Groups say which parameters are decayed: a mask that nobody knows would be filled in by them.
    needed |= {name: fact for name, fact in known.items() if name.rpartition("/")[2] == MASK}
    facts = [known.get(name, fact) for name, fact in needed.items() if fact.source in _WEAK]
    accepted = ("assumed",) if hints.assume_defaults else ()
    return [fact for fact in facts if fact.source in _WEAK and fact.source not in accepted]


def check_said(facts: Sequence[Fact], place: object, layout: str) -> None:
    """Refuses a target that would store values which nobody gave.

    Args:
        facts: What is missing.
        place: The source.
        layout: The target's layout.

    Raises:
        UnknownRuleError: Names every one, with its documented default where there is one.
    """
    if not facts:
        return
    assumed = [fact for fact in facts if fact.source == "assumed"]
    unknown = [fact for fact in facts if fact.source == "unknown"]
    said = [f"{fact.name} ({fact.because})" for fact in unknown]
    said += [
        f"{fact.name} ({'none' if fact.value is None else fact.value} is {fact.because})" for fact in assumed
    ]
    options = " ".join(f"--hparams {fact.name}=..." for fact in (unknown if assumed else facts))
    accept = "--assume-defaults" if assumed else ""
    raise UnknownRuleError(
        f"The layout {layout} stores what no file says and nobody gave.",
        place=place,
        expected=", ".join(fact.name for fact in facts),
        found="; ".join(said),
        remedy=f"say it: {' '.join(part for part in (options, accept) if part)}",
    )
