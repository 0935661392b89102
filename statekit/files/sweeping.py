"""Removes what killed writers left of targets in a store, and nothing that anybody else put there."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from statekit.files.claims import (
    Claim,
    check_held,
    claims_of,
    is_claim,
    is_complete,
    next_claim,
    release,
    remove,
    work_of,
)
from statekit.files.objects import Objects
from statekit.files.tree import WORK, Facts

_HOUR = 3600.0


@dataclass(frozen=True)
class Left:
    """What a writer left of a target, or is writing.

    Attributes:
        target: The target, as an address.
        writer: Who.
        done: What was done about it: `removed`, `completed` of one that only lacked its last step, `kept`.
        why: Why it was kept.
        objects: How many objects it has, or had.
    """

    target: str
    writer: str
    done: str
    why: str
    objects: int


def swept(objects: Objects, folder: str, idle_hours: float | None = None) -> list[Left]:
    """Removes what killed writers left below a folder.

    Args:
        objects: The bucket.
        folder: The name of the folder.
        idle_hours: After how long without a new object another machine's writer counts as dead; never if None.

    Raises:
        CommitError: The store doesn't let it be removed.
    """
    names = objects.below(folder)
    above = objects.below(work_of(folder)) if folder else {}
    works = {name.rpartition("/")[0] for name in {**names, **above} if is_claim(name)}
    left = []
    for work in sorted(works):
        parent, slash, name = work.rpartition("/")
        left += _swept(objects, f"{parent}{slash}{name.removeprefix(WORK)}", idle_hours)
    return left


def _swept(objects: Objects, target: str, idle_hours: float | None) -> list[Left]:
    claims = claims_of(objects, target)
    if not claims:
        return _unreadable(objects, target)
    objects_below, last = objects.below(target), claims[-1]
    place = f"{objects.place}/{target}"
    if not last.is_dead and (idle_hours is None or _idle(last, objects_below) < idle_hours):
        why = "it may run: wait for it, or say after how many idle hours it counts as dead (--idle-hours)"
        return [Left(place, f"{last}", "kept", why, len(objects_below))]
    claim = next_claim(objects, target, last.entries, claims)  # so that nobody else takes over meanwhile
    check_held(objects, claim, claims)
    if is_complete(objects, target):
        release(objects, claim)
        return [Left(place, f"{last}", "completed", "", len(objects_below))]
    foreign = [name for other in claims for name in remove(objects, other, [claim.mark for claim in claims])]
    release(objects, claim)
    why = f"{len(set(foreign))} objects that statekit didn't put stay" if foreign else ""
    return [Left(place, f"{last}", "removed", why, len(objects_below) - len(set(foreign)))]


def _unreadable(objects: Objects, target: str) -> list[Left]:
    """Returns the claims beside a target that do not name it. What they claim is unknown, so all objects stay."""
    names = [*filter(is_claim, objects.below(work_of(target)))]
    why = f"{', '.join(names)} isn't a claim of it: look who put it there, and delete it"
    if names:
        return [Left(f"{objects.place}/{target}", "unknown", "kept", why, len(objects.below(target)))]
    return []


def _idle(claim: Claim, there: Mapping[str, Facts]) -> float:
    """Returns for how many hours nothing was written."""
    last = max([claim.begun, *((facts.changed or 0) / 1e9 for facts in there.values())])
    return (time.time() - last) / _HOUR
