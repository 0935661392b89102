"""The optimizer that the user names, where a checkpoint's structure fits several.

In go a decoded state, whose groups have the candidates that the layout saw, and the name. Out comes the state of that
optimizer, or, of one that statekit doesn't step, a state that only its own system goes on with.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from importlib import resources

from statekit.errors import UsageError
from statekit.state.evidence import BEYOND, OPTIMIZER, Fact
from statekit.state.train_state import TrainState


def with_optimizer(state: TrainState, name: str | None) -> TrainState:
    """Returns a state whose optimizer is the one that the user names.

    Args:
        state: The state, as its layout decoded it.
        name: What the user says; None where nothing is said.

    Raises:
        UsageError: The state can't be of that optimizer.
    """
    if name is None:
        return state
    facts = [fact for group in state.optimizer.groups for fact in group.facts if fact.name == OPTIMIZER]
    fitting = dict.fromkeys(one for fact in facts for one in (fact.value, *fact.others) if one is not None)
    if name not in (fitting or {schema for schema, _ in state.optimizer.kinds}):
        raise UsageError(
            "The optimizer can't be that.",
            place="--optimizer",
            expected=", ".join(fitting or [schema for schema, _ in state.optimizer.kinds]),
            found=name,
        )
    return state.with_facts(lambda facts: _told(facts, name))


def _told(facts: Sequence[Fact], name: str) -> Iterable[Fact]:
    """Yields the facts of a group whose optimizer is told; one without steps can only be carried."""
    for fact in facts:
        if fact.name != OPTIMIZER:
            yield fact
    yield Fact(OPTIMIZER, name, "given")
    if (reason := _without_steps().get(name)) is not None and not any(f.name == BEYOND for f in facts):
        yield Fact(BEYOND, None, "given", f"it is {name}, of which statekit has no steps: {reason}")


def _without_steps() -> dict[str, str]:
    """Returns optimizers that Adam's state may be of and statekit doesn't step: name -> what they do otherwise."""
    text = resources.files("statekit.converters").joinpath("look_alikes.json").read_text(encoding="utf-8")
    return dict(json.loads(text)["without_steps"])
