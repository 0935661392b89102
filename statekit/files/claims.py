"""Who writes a target in a store: records beside it that keep two writers apart and tell what a killed one left.

    <folder>/.statekit-work-<name>/claim-0001.json

A claim is created only if there is none of its number; a later number takes over from a writer that runs no more. As
long as there is a claim, no reader of ours sees the target. What a writer puts carries the mark of its claim, and only
what carries the mark of a dead one is removed.
"""

from __future__ import annotations

import json
import os
import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from fnmatch import fnmatch
from typing import Any

from blake3 import blake3

from statekit.errors import CommitError, StatekitError, TargetExistsError, UsageError
from statekit.files.durable import is_dead, owner_of
from statekit.files.manifest import FILE, parse
from statekit.files.objects import Objects
from statekit.files.tree import WORK, Facts

_NUMBERED = re.compile(r"claim-(\d{4})\.json")
_MOST_BYTES = 2**16
_HOUR = 3600.0


@dataclass(frozen=True)
class Claim:
    """A writer's record.

    Attributes:
        number: Which claim of its target it is.
        mark: What its objects carry.
        target: The target's name in the bucket.
        entries: The files by which the format's readers find the target, as patterns.
        owner: The process, as `statekit.files.durable.owner_of` describes it; the machine by a digest.
        begun: When, in seconds since 1970.
    """

    number: int
    mark: str
    target: str
    entries: tuple[str, ...]
    owner: Mapping[str, Any]
    begun: float

    @property
    def name(self) -> str:
        """The name of its object."""
        return f"{work_of(self.target)}/claim-{self.number:04}.json"

    def to_bytes(self) -> bytes:
        """Returns the record."""
        document = {**vars(self), "entries": list(self.entries), "owner": dict(self.owner)}
        return json.dumps(document, sort_keys=True).encode("ascii")

    @classmethod
    def of_bytes(cls, number: int, data: bytes | None) -> Claim | None:
        """Returns the claim that a record says; None if it says none, or was removed meanwhile."""
        try:
            document = json.loads(data or b"")
            return cls(
                number,
                str(document["mark"]),
                str(document["target"]),
                tuple(map(str, document["entries"])),
                dict(document["owner"]),
                float(document["begun"]),
            )
        except (ValueError, KeyError, TypeError):
            return None

    @property
    def is_dead(self) -> bool:
        """Whether its process provably runs no more; never of another machine's."""
        here = owner_of(os.getpid())
        same = self.owner.get("machine") == _digest(here["machine"])
        return same and is_dead({**self.owner, "machine": here["machine"]})

    def __str__(self) -> str:
        begun = datetime.fromtimestamp(self.begun, UTC).strftime("%Y-%m-%d %H:%M")
        return f"process {self.owner.get('pid')} on {self.owner.get('host')}, since {begun} UTC"


def work_of(target: str) -> str:
    """Returns the name of the folder with a target's claims."""
    folder, slash, name = target.rpartition("/")
    return f"{folder}{slash}{WORK}{name}"


@contextmanager
def claimed(objects: Objects, target: str, entries: Sequence[str]) -> Iterator[Claim]:
    """Claims a target for a while; what a dead writer left of it is removed first, and what this one does at an error.

    Args:
        objects: The bucket; what is put carries the claim's mark from now on.
        target: The target's name.
        entries: As in `Claim`.

    Raises:
        TargetExistsError: The target exists, or another process writes it.
        UsageError: The store has no conditional writes.
        CommitError: The store doesn't take it.
    """
    earlier = _claims(objects, target)
    for claim in earlier[-1:]:
        if not claim.is_dead:
            raise _being_written(objects, claim)
    claim = _next(objects, target, entries, earlier)
    try:
        _prepare(objects, claim, earlier)
    except BaseException:
        with suppress(StatekitError):
            objects.delete([claim.name], (claim.mark,))
        raise
    try:
        yield claim
    except BaseException:
        with suppress(StatekitError):  # else the claim stays, and tells of what is left
            remove(objects, claim, (claim.mark,))
            release(objects, claim)
        raise
    release(objects, claim)


def _next(objects: Objects, target: str, entries: Sequence[str], earlier: Sequence[Claim]) -> Claim:
    """Makes the claim after earlier ones, and makes sure that a second one like it is refused."""
    here = owner_of(os.getpid())
    owner = {**here, "machine": _digest(here["machine"])}
    number = earlier[-1].number + 1 if earlier else 1
    claim = Claim(number, uuid.uuid4().hex, target, (FILE, *entries), owner, time.time())
    objects.mark = claim.mark
    try:
        objects.create(claim.name, claim.to_bytes())
    except TargetExistsError:
        raise TargetExistsError(
            "The target is being written by another process.",
            place=f"{objects.place}/{target}",
            remedy="wait for it, or choose another name",
        ) from None
    try:
        objects.create(claim.name, claim.to_bytes() + b" ")
    except TargetExistsError:
        return claim
    objects.delete([claim.name], (claim.mark,))
    raise UsageError(
        "This store has no conditional writes, so that two writers could mix their files.",
        place=objects.place,
        expected="a second object of one name to be refused",
        remedy="write to a disk, and copy from there",
    )


def _prepare(objects: Objects, claim: Claim, earlier: Sequence[Claim]) -> None:
    """Makes room for a target: nobody else claims it, nothing is there but what dead writers left, and that goes."""
    check_held(objects, claim, earlier)
    marks = [other.mark for other in earlier]
    if earlier and is_complete(objects, claim.target):
        release(objects, claim)
        raise TargetExistsError(
            "The target exists: a process that was killed afterwards had completed it.",
            place=f"{objects.place}/{claim.target}",
            remedy="use it, or choose another name",
        )
    for other in earlier:
        remove(objects, other, marks)
    if objects.below(claim.target):
        raise exists(f"{objects.place}/{claim.target}")


def exists(place: object) -> TargetExistsError:
    """Returns the error of a target that is there."""
    return TargetExistsError(
        "The target exists.",
        place=place,
        remedy="choose another name: a store can't exchange two targets in one step",
    )


def check_held(objects: Objects, claim: Claim, earlier: Sequence[Claim] | None = None) -> None:
    """Makes sure that a claim holds still.

    Args:
        objects: The bucket.
        claim: The claim.
        earlier: Those that it took over from; None if that has been looked at.

    Raises:
        CommitError: Another one has taken over, or it was swept.
    """
    now = _claims(objects, claim.target)
    marks = {other.mark for other in earlier} if earlier is not None else {other.mark for other in now[:-1]}
    if not now or now[-1].mark != claim.mark or not {other.mark for other in now[:-1]} <= marks:
        raise CommitError(
            "Another process has taken over the target meanwhile.",
            place=f"{objects.place}/{claim.target}",
            remedy="let one process write a target",
        )


def release(objects: Objects, claim: Claim) -> None:
    """Removes the claims of a target, the last one last: from then on it is found."""
    claims = _claims(objects, claim.target)
    for other in claims:
        objects.delete([other.name], (other.mark,))


def remove(objects: Objects, claim: Claim, marks: Sequence[str]) -> list[str]:
    """Removes what a writer put, its entries first; returns the names of what somebody else put there."""
    names = list(objects.below(claim.target))
    rank = ranks(claim.entries)
    entries = sorted((name for name in names if rank(name) >= 0), key=rank, reverse=True)
    left: list[str] = []
    for name in entries:
        left += objects.delete([name], marks)
    return left + objects.delete([name for name in names if rank(name) < 0], marks)


def ranks(entries: Sequence[str]) -> Callable[[str], int]:
    """Returns what gives the place of a file among patterns of names; -1 if none fits."""

    def rank(name: str) -> int:
        last = name.rpartition("/")[2]
        return next((number for number, pattern in enumerate(entries) if fnmatch(last, pattern)), -1)

    return rank


def is_complete(objects: Objects, target: str) -> bool:
    """Tells whether a folder is there with a manifest and all files that it names."""
    data = objects.read(f"{target}/{FILE}", 2**30)
    try:
        manifest = parse(data or b"", target)
    except StatekitError:
        return False
    sizes = {name: facts.size for name, facts in objects.below(target).items()}
    return all(sizes.get(f"{target}/{name}") == entry["bytes"] for name, entry in manifest["files"].items())


@dataclass(frozen=True)
class Left:
    """What a writer left of a target, or is writing.

    Attributes:
        target: The target, as an address.
        writer: Who.
        what: What was done about it: `removed`, `completed` of one that only lacked its last step, `kept`.
        why: Why it was kept.
        objects: How many objects it has, or had.
    """

    target: str
    writer: str
    what: str
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
    works = {name.rpartition("/")[0] for name in {**names, **above} if _is_claim(name)}
    left = []
    for work in sorted(works):
        parent, slash, name = work.rpartition("/")
        left += _swept(objects, f"{parent}{slash}{name.removeprefix(WORK)}", idle_hours)
    return left


def _swept(objects: Objects, target: str, idle_hours: float | None) -> list[Left]:
    claims = _claims(objects, target)
    if not claims:
        return []
    there, last = objects.below(target), claims[-1]
    place = f"{objects.place}/{target}"
    if not last.is_dead and (idle_hours is None or _idle(last, there) < idle_hours):
        why = "it may run: wait for it, or say after how many idle hours it counts as dead (--idle-hours)"
        return [Left(place, f"{last}", "kept", why, len(there))]
    claim = _next(objects, target, last.entries, claims)  # so that nobody else takes over meanwhile
    check_held(objects, claim, claims)
    if is_complete(objects, target):
        release(objects, claim)
        return [Left(place, f"{last}", "completed", "", len(there))]
    foreign = [name for other in claims for name in remove(objects, other, [one.mark for one in claims])]
    release(objects, claim)
    why = f"{len(set(foreign))} objects that statekit didn't put stay" if foreign else ""
    return [Left(place, f"{last}", "removed", why, len(there) - len(set(foreign)))]


def _idle(claim: Claim, there: Mapping[str, Facts]) -> float:
    """Returns for how many hours nothing was written."""
    last = max([claim.begun, *((facts.changed or 0) / 1e9 for facts in there.values())])
    return (time.time() - last) / _HOUR


def _is_claim(name: str) -> bool:
    folder, _, last = name.rpartition("/")
    return bool(_NUMBERED.fullmatch(last)) and folder.rpartition("/")[2].startswith(WORK)


def _claims(objects: Objects, target: str) -> list[Claim]:
    """Returns the claims of a target, the earliest first."""
    names = sorted(filter(_is_claim, objects.below(work_of(target))))
    claims = []
    for name in names:
        match = _NUMBERED.fullmatch(name.rpartition("/")[2])
        assert match is not None  # as _is_claim has it
        claim = Claim.of_bytes(int(match[1]), objects.read(name, _MOST_BYTES))
        if claim is not None:
            claims.append(claim)
    return claims


def _being_written(objects: Objects, claim: Claim) -> TargetExistsError:
    folder = claim.target.rpartition("/")[0]
    return TargetExistsError(
        "The target is being written, or was left unfinished.",
        place=f"{objects.place}/{claim.target}",
        found=f"{claim}",
        remedy=f"wait for it; if it was killed: statekit sweep {objects.place}/{folder} --idle-hours 1",
    )


def _digest(text: str) -> str:
    """Returns a digest of what names a machine, which isn't for everybody to see."""
    return str(blake3(text.encode()).hexdigest()[:32])
