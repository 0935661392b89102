"""Where a run stands: from which of its steps it can go on, and which of them nobody needs."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Rule:
    """Which steps of a run are kept; those with a tag are kept whatever it says.

    Attributes:
        last: How many good steps, the newest first; at least one.
        every: Of which number the steps are kept that are a multiple of it; 0 keeps none for that.
    """

    last: int = 3
    every: int = 0


@dataclass(frozen=True)
class Standing:
    """Where a run stands.

    Attributes:
        good: The number of the checkpoint of the newest good step; None if no step is good.
        good_step: That step.
        examined: Whether doctor has read its values.
        why: Why the newest step isn't good; empty if it is.
        spare: How many steps nobody needs: older than the last good ones, and without a tag.
        spare_size: Bytes of these.
    """

    good: int | None
    good_step: int | None
    examined: bool
    why: str
    spare: int
    spare_size: int


def standing(steps: Sequence[Any], tagged: Container[int]) -> Standing:
    """Returns where a run stands.

    A step is good if an optimizer's state can be read and neither its manifest nor doctor contradicts it.

    Args:
        steps: The run's checkpoints with what the catalogue knows of each, the oldest first; at least one.
        tagged: Numbers of checkpoints that somebody gave a tag.
    """
    newest = next((step for step in reversed(steps) if not fault_of(step)), None)
    spare = spare_of(steps, tagged)
    return Standing(
        newest.id if newest else None,
        newest.step if newest else None,
        newest is not None and newest.verdict == "clean",
        fault_of(steps[-1]),
        len(spare),
        sum(step.size for step in spare),
    )


def spare_of(steps: Sequence[Any], tagged: Container[int], rule: Rule = Rule()) -> list[Any]:
    """Returns the steps of a run that nobody needs: older than the good ones that a rule keeps, and without a tag.

    Args:
        steps: As of `standing`.
        tagged: As of `standing`.
        rule: Which steps are kept.
    """
    good = [i for i, step in enumerate(steps) if not fault_of(step)]
    oldest_kept = good[-rule.last :][0] if good else 0
    return [
        step for step in steps[:oldest_kept] if step.id not in tagged and not _is_multiple(step, rule.every)
    ]


def _is_multiple(step: Any, every: int) -> bool:
    return every > 0 and step.step is not None and step.step % every == 0


def fault_of(step: Any) -> str:
    """Returns why nobody should go on from a checkpoint; empty if nothing speaks against it."""
    if step.unreadable:
        return "it can't be read"
    if step.seal in ("damaged", "changed"):
        return "it isn't what its manifest says"
    if step.verdict == "findings":
        return "doctor found faults in its values"
    return "" if step.resumable else step.undecoded or "it holds no optimizer's state"
