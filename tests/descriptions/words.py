"""What descriptions of most systems' recordings have in common."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence
from typing import Any

from statekit.errors import Faults, NotFoundError, UnknownRuleError
from statekit.optim.steps import Execution
from statekit.verify.contract import FORMAT, TRAJECTORY


def kind(meta: Mapping[str, Any], kinds: Mapping[str, tuple[str, str]]) -> tuple[str, str]:
    """Returns schema and variant of a recorded optimizer, by a word in its name.

    Raises:
        NotFoundError: No word of `kinds` is in it.
        UnknownRuleError: Words of several optimizers are.
    """
    named = [names for word, names in kinds.items() if word in str(meta["optimizer"])]
    several = Faults(
        ("names it, and not what it moves", schema) for schema in dict.fromkeys(s for s, _ in named)
    )
    if len(several) > 1:
        several.check(
            UnknownRuleError,
            "A recording is of several optimizers side by side",
            place=meta["optimizer"],
            remedy="say in every group of extra.param_groups which optimizer moves it (docs/recordings.md)",
        )
    if not named:
        raise NotFoundError(
            "statekit can't replay this system's optimizer yet.",
            expected=", ".join(kinds),
            found=meta["optimizer"],
        )
    return named[0]


def checkpoint_of(files: Sequence[str]) -> str:
    """Returns what is opened as a checkpoint: its only file, or the folder of its first."""
    return files[0] if len(files) == 1 else posixpath.dirname(files[0])


def described(
    meta: Mapping[str, Any],
    phases: Sequence[tuple[int, int, Mapping[str, Any]]],
    checkpoint: str,
    execution: Execution,
    *,
    first: int = 0,
    own_rate: bool = False,
    **trajectory: Any,
) -> dict[str, Any]:
    """Returns the content of `recording.json` for a system's `meta.json`, which counts updates from 1.

    Args:
        meta: The content of `meta.json`.
        phases: First update, last update, hyperparameters.
        checkpoint: The native checkpoint, relative to the folder.
        execution: How the original ran.
        first: Updates that the optimizer counts as done before the first one.
        own_rate: Whether the optimizer computes its learning rate, so that what `meta.json` says is its result.
        trajectory: What else there is to say of the trajectory, as `Trajectory` has it.
    """
    steps, rates = int(meta["steps"]), list(meta["learning_rate"])
    return {
        "format": FORMAT,
        "version": 1,
        "system": meta["system"],
        "steps": [first, first + steps],
        "numbered_from": 0,
        "phases": [
            {"updates": [first + begin, first + end], "hyperparameters": dict(spec)}
            for begin, end, spec in phases
        ],
        "learning_rate": [None] * steps if own_rate else rates,
        "trajectories": [{"file": TRAJECTORY, "execution": execution, **trajectory}],
        "checkpoint": {"path": checkpoint, "step": first + int(meta["checkpoint_step"])},
    }
