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
import shlex
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from fnmatch import fnmatch
from typing import Annotated, Any, TypeAlias, TypedDict

from blake3 import blake3

from statekit.errors import CommitError, StatekitError, TargetExistsError, UsageError
from statekit.files.durable import is_dead, owner_of
from statekit.files.manifest import FILE, parse
from statekit.files.objects import Objects
from statekit.files.tree import WORK
from statekit.tensors.tree import strict_json
from statekit.tensors.typed import Limit, Name, typed

_NUMBERED = re.compile(r"claim-(\d{4})\.json")
_MOST_BYTES = 2**16
_MOST_MANIFEST = 2**28


_Moment: TypeAlias = Annotated[float, Limit("seconds since 1970", lambda seconds: 0 <= seconds < 2**37)]


class ClaimDocument(TypedDict):
    """The fields of a claim's record."""

    mark: Name
    target: Name
    entries: list[Name]
    owner: dict[str, Any]
    begun: _Moment


@dataclass(frozen=True)
class Claim:
    """A writer's record.

    Attributes:
        number: Which claim of its target it is.
        mark: What its objects carry.
        target: The target's name in the bucket.
        entries: The files by which the format's readers find the target, as patterns.
        owner: The process, as `statekit.files.durable.owner_of` describes it, the machine by a digest; or the work.
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
    def of_bytes(cls, number: int, target: str, data: bytes | None) -> Claim | None:
        """Returns the claim that a record says; None if it says none of its target, or was removed meanwhile.

        Args:
            number: The number in its name.
            target: The target that it lies beside: a claim of any other would have another's objects removed.
            data: The record.
        """
        try:
            says = typed(strict_json(data or b"", target), ClaimDocument, target)
        except StatekitError:
            return None
        if says["target"] != target:
            return None
        return cls(number, says["mark"], target, tuple(says["entries"]), says["owner"], float(says["begun"]))

    @property
    def work(self) -> str:
        """The address of the work whose processes write under it; "" if one process does."""
        return f"{self.owner.get('work', '')}"

    @property
    def is_dead(self) -> bool:
        """Whether its process provably runs no more; never of another machine's."""
        here = owner_of(os.getpid())
        same = self.owner.get("machine") == _digest(here["machine"])
        return same and is_dead({**self.owner, "machine": here["machine"]})

    def __str__(self) -> str:
        begun = datetime.fromtimestamp(self.begun, UTC).strftime("%Y-%m-%d %H:%M")
        process = f"process {self.owner.get('pid')} on {self.owner.get('host')}"
        return f"{'work ' + self.work if self.work else process}, since {begun} UTC"


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
    claim = claim_target(objects, target, entries)
    try:
        yield claim
    except BaseException:
        with suppress(StatekitError):  # else the claim stays, and tells of what is left
            remove(objects, claim, (claim.mark,))
            release(objects, claim)
        raise
    release(objects, claim)


def claim_target(objects: Objects, target: str, entries: Sequence[str], work: str = "") -> Claim:
    """Claims a target, and removes what a dead writer left of it.

    Args:
        objects: The bucket; what is put carries the claim's mark from now on.
        target: The target's name.
        entries: As in `Claim`.
        work: The address of a work (`statekit.scale`) whose processes all write under the claim, with the mark that
            `objects` has; "" if this process writes alone.

    Raises:
        As `claimed`.
    """
    earlier = claims_of(objects, target)
    for claim in earlier[-1:]:
        if work and (claim.mark, claim.work) == (objects.mark, work):
            return claim
        if not claim.is_dead:
            raise _being_written(objects, claim)
    try:
        claim = next_claim(objects, target, entries, earlier, work)
    except TargetExistsError:
        claims = claims_of(objects, target)
        if work and claims and (claims[-1].mark, claims[-1].work) == (objects.mark, work):
            return claims[-1]  # another process split the same plan
        raise
    try:
        _prepare(objects, claim, earlier)
    except BaseException:
        with suppress(StatekitError):
            objects.delete([claim.name], (claim.mark,))
        raise
    return claim


def next_claim(
    objects: Objects, target: str, entries: Sequence[str], earlier: Sequence[Claim], work: str = ""
) -> Claim:
    """Makes the claim after earlier ones; `work` is that of `claim_target`."""
    here = owner_of(os.getpid())
    # The claim of a work outlives each of its processes.
    owner = {"work": work} if work else {**here, "machine": _digest(here["machine"])}
    number = earlier[-1].number + 1 if earlier else 1
    mark = objects.mark if work else uuid.uuid4().hex
    claim = Claim(number, mark, target, (FILE, *entries), owner, time.time())
    objects.mark = claim.mark
    try:
        objects.create(claim.name, claim.to_bytes())
    except TargetExistsError:
        raise TargetExistsError(
            "The target is being written by another process.",
            place=f"{objects.place}/{target}",
            remedy="wait for it, or choose another name",
        ) from None
    return claim


def _probe(objects: Objects, claim: Claim) -> None:
    """Makes sure that a store refuses a second object of one name, and lets an object be removed."""
    name = f"{work_of(claim.target)}/probe-{claim.mark}"
    refuses = False
    try:
        for data in (b"first", b"second"):
            objects.create(name, data)
    except TargetExistsError:
        refuses = True
    objects.delete([name], (claim.mark,))
    if not refuses:
        raise UsageError(
            "This store has no conditional writes, so that two writers could mix their files.",
            place=objects.place,
            expected="a second object of one name to be refused",
            remedy="write to a disk, and copy from there",
        )


def _prepare(objects: Objects, claim: Claim, earlier: Sequence[Claim]) -> None:
    """Makes room for a target: nobody else claims it, nothing is there but what dead writers left, and that goes."""
    _probe(objects, claim)
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
    # Processes of the same work may write already.
    if not all(objects.is_of(name, (claim.mark,)) for name in objects.below(claim.target)):
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
    now = claims_of(objects, claim.target)
    marks = {other.mark for other in earlier} if earlier is not None else {other.mark for other in now[:-1]}
    if not now or now[-1].mark != claim.mark or not {other.mark for other in now[:-1]} <= marks:
        raise taken_over(objects, claim.target)


def taken_over(objects: Objects, target: str) -> CommitError:
    """Returns the error of a writer whose claim holds no more."""
    return CommitError(
        "Another process has taken over the target meanwhile.",
        place=f"{objects.place}/{target}",
        remedy="let one process, or one work, write a target",
    )


def release(objects: Objects, claim: Claim) -> None:
    """Removes the claims of a target, the last one last: from then on it is found."""
    claims = claims_of(objects, claim.target)
    names = objects.below(work_of(claim.target))
    objects.delete([name for name in names if not is_claim(name)], [other.mark for other in claims])
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
    """Tells whether a target is complete: it is one object, or all files of its manifest are there."""
    objects_below = objects.below(target)
    if [*objects_below] == [target] and objects_below[target].size:
        return True
    data = objects.read(f"{target}/{FILE}", _MOST_MANIFEST)
    try:
        manifest = parse(data or b"", target)
    except StatekitError:
        return False
    sizes = {name: facts.size for name, facts in objects_below.items()}
    return all(sizes.get(f"{target}/{name}") == entry["bytes"] for name, entry in manifest["files"].items())


def is_claim(name: str) -> bool:
    """Tells whether an object's name is that of a claim."""
    folder, _, last = name.rpartition("/")
    return bool(_NUMBERED.fullmatch(last)) and folder.rpartition("/")[2].startswith(WORK)


def claims_of(objects: Objects, target: str) -> list[Claim]:
    """Returns the claims of a target, the earliest first."""
    names = sorted(filter(is_claim, objects.below(work_of(target))))
    claims = []
    for name in names:
        match = _NUMBERED.fullmatch(name.rpartition("/")[2])
        assert match is not None  # as is_claim has it
        claim = Claim.of_bytes(int(match[1]), target, objects.read(name, _MOST_BYTES))
        if claim is not None:
            claims.append(claim)
    return claims


def _being_written(objects: Objects, claim: Claim) -> TargetExistsError:
    folder, work = claim.target.rpartition("/")[0], shlex.quote(claim.work)
    return TargetExistsError(
        "The target is being written, or was left unfinished.",
        place=f"{objects.place}/{claim.target}",
        found=f"{claim}",
        remedy=f"statekit work status {work}; to give it up: statekit work drop {work}"
        if claim.work
        else f"wait for it; if it was killed: statekit sweep {objects.place}/{folder} --idle-hours 1",
    )


def _digest(text: str) -> str:
    """Returns a digest of what names a machine, which isn't for everybody to see."""
    return str(blake3(text.encode()).hexdigest()[:32])
