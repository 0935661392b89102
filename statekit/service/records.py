"""What the service tells: checkpoints, runs, jobs, events and lineage, as frozen records that become JSON as they are.

Text in them is fit to be shown: names of files have no control characters and no bytes that aren't UTF-8. Paths are
relative to their root, and lead to no file by themselves: only the catalogue goes from an id to a path.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime
from typing import Any, Generic, Literal, TypeAlias, TypeVar

from statekit.tensors.tree import report_json

Seal: TypeAlias = Literal["sealed", "unsealed", "changed", "damaged", "unknown"]
Verdict: TypeAlias = Literal["clean", "findings"]
Status: TypeAlias = Literal["present", "changed", "gone"]
Kind: TypeAlias = Literal[
    "inspect", "parameter", "check", "seal", "doctor", "diff", "verify", "convert", "thin"
]
State: TypeAlias = Literal["queued", "running", "done", "failed", "cancelled", "crashed"]
EventKind: TypeAlias = Literal["progress", "log", "state"]

ENDED: tuple[State, ...] = ("done", "failed", "cancelled", "crashed")
"""States that a job stays in."""
KINDS: Mapping[Kind, tuple[int, int | None]] = {
    "inspect": (1, 1),
    "parameter": (1, None),
    "check": (1, 1),
    "seal": (1, 1),
    "doctor": (1, None),
    "diff": (2, 2),
    "verify": (2, 2),
    "convert": (1, 1),
    "thin": (1, 1),
}
"""How many checkpoints each kind of job is about: at least, and at most (None: any number)."""

T = TypeVar("T")


class _Record:
    """What all records have in common."""

    def to_json(self) -> dict[str, Any]:
        """Returns the record as plain data: times in ISO 8601, records as mappings, tuples as lists."""
        return {field.name: report_json(getattr(self, field.name)) for field in fields(self)}  # type: ignore[arg-type]


@dataclass(frozen=True)
class Root(_Record):
    """A folder that is scanned; nothing outside of it is read or written.

    Attributes:
        id: Its number, by which targets are named.
        path: The folder.
    """

    id: int
    path: str


@dataclass(frozen=True)
class Checkpoint(_Record):
    """A checkpoint as it was seen; one whose files have changed since is another.

    Attributes:
        id: Its number, which never means another.
        root: The number of the root that it lies in.
        path: Where it is, relative to the root.
        run: The number of the run that it is a step of, if there is one.
        name: The last part of the path.
        size: Bytes of all its files.
        modified: When the youngest of its files was written to, in UTC.
        step: The step in its name, else the updates that its optimizer has done.
        container: How its arrays lie in files.
        layout: What its names mean; None where no layout fits.
        optimizer: The schema of its optimizer, with the variant behind a slash; None of weights alone.
        tensors: How many tensors it has, all that are listed.
        parameters: How many of them are parameters.
        elements: How many numbers these have together.
        resumable: Whether it has an optimizer's state to go on from.
        digest: The digest of names, shapes, dtypes and values of its tensors, where a manifest or a job says it.
        seal: What its manifest says of it, as far as opening it looks, or as `check` has found.
        checked: When `check` has read every byte and found no fault, in UTC.
        verdict: What doctor has found, if it was asked.
        unreadable: Why it can't be read.
        undecoded: Why no state is made of what is read; None where one is.
        status: Whether it is still there, and the same.
        replaced_by: The number of the one that is there now, of one that has changed.
        tags: Words that somebody gave it.
        note: What somebody wrote of it.
        note_by: Who wrote that: a user that the proxy names; else empty.
        first_seen: When a scan saw it first, in UTC.
        seen: When one saw it last.
    """

    id: int
    root: int
    path: str
    run: int | None
    name: str
    size: int
    modified: datetime
    step: int | None
    container: str | None
    layout: str | None
    optimizer: str | None
    tensors: int | None
    parameters: int | None
    elements: int | None
    resumable: bool
    digest: str | None
    seal: Seal
    checked: datetime | None
    verdict: Verdict | None
    unreadable: str | None
    undecoded: str | None
    status: Status
    replaced_by: int | None
    tags: tuple[str, ...]
    note: str
    note_by: str
    first_seen: datetime
    seen: datetime


@dataclass(frozen=True)
class Run(_Record):
    """Checkpoints that are steps of one training run.

    Attributes:
        id: Its number.
        root: The number of the root that it lies in.
        path: The folder that holds the steps, relative to the root.
        name: The last part of the path.
        steps: How many of its checkpoints are there now.
        first_step: The least step.
        last_step: The greatest.
        size: Bytes of all of them.
        modified: When the youngest was written to, in UTC.
        good: The number of the checkpoint of the newest good step; None if no step is good.
        good_step: That step.
        examined: Whether doctor has read its values.
        why: Why the newest step isn't good; empty if it is.
        spare: How many steps nobody needs: older than the last three good ones, and without a tag.
        spare_size: Bytes of these.
    """

    id: int
    root: int
    path: str
    name: str
    steps: int
    first_step: int | None
    last_step: int | None
    size: int
    modified: datetime | None
    good: int | None
    good_step: int | None
    examined: bool
    why: str
    spare: int
    spare_size: int


@dataclass(frozen=True)
class Job(_Record):
    """Work that was asked for.

    Attributes:
        id: Its number.
        kind: What is done.
        subjects: The numbers of the checkpoints that it is about, in order.
        options: What was said beside.
        state: Where it stands; one that has ended stays as it is.
        attempts: How often it was begun: again only after the machine, the service or a worker has died.
        created: When it was asked for, in UTC.
        started: When it was begun last.
        ended: When it ended.
        fraction: How much is done, from 0 to 1; None where unknown.
        text: What is being done.
        cancelling: Whether somebody has asked for its end.
        problem: Why it failed: kind, subject, place, expected, found, remedy.
        requested_by: Who asked for it.
        has_result: Whether there is a result to read.
    """

    id: int
    kind: Kind
    subjects: tuple[int, ...]
    options: Mapping[str, Any]
    state: State
    attempts: int
    created: datetime
    started: datetime | None
    ended: datetime | None
    fraction: float | None
    text: str
    cancelling: bool
    problem: Mapping[str, Any] | None
    requested_by: str
    has_result: bool


@dataclass(frozen=True)
class Event(_Record):
    """Something that befell a job.

    Attributes:
        job: The job's number.
        number: Counts a job's events from 1.
        kind: `state` of a change of state, `progress`, or a line of the `log`.
        data: What it says.
        time: When, in UTC. The order is that of the numbers.
    """

    job: int
    number: int
    kind: EventKind
    data: Mapping[str, Any]
    time: datetime


@dataclass(frozen=True)
class Node(_Record):
    """A checkpoint in a lineage.

    Attributes:
        id: `checkpoint-<number>`, or `digest-<digest>` of one that the catalogue doesn't know.
        checkpoint: The record; None of one that the catalogue doesn't know.
        said: What is known of one that isn't in the catalogue: container, layout, step, digest.
    """

    id: str
    checkpoint: Checkpoint | None
    said: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Edge(_Record):
    """That one checkpoint was made of another, or held against it.

    Attributes:
        source: The node it was made of.
        target: The node that was made.
        kind: `convert` or `thin`, or `verify` of a proof.
        job: The number of the job that did it; None if it was done elsewhere.
        tool: Which version of statekit did it.
        options: What was asked for.
        plan: The digest of the plan that was carried out.
        verdict: Of a proof, what it came to.
        certificate: The digest of the proof's certificate.
    """

    source: str
    target: str
    kind: Literal["convert", "thin", "verify"]
    job: int | None
    tool: str | None
    options: Mapping[str, Any]
    plan: str | None = None
    verdict: str | None = None
    certificate: str | None = None


@dataclass(frozen=True)
class Lineage(_Record):
    """Who was made of whom, as far as one checkpoint is concerned.

    Attributes:
        nodes: The checkpoints, sources before what was made of them.
        edges: How each was made.
        more: Whether there may be more, beyond the nearest that are here.
    """

    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    more: bool = False


@dataclass(frozen=True)
class Page(_Record, Generic[T]):
    """A part of a list.

    Attributes:
        items: The records.
        next_cursor: What to ask with for those behind them; None at the end.
        total: How many there are in all.
    """

    items: tuple[T, ...]
    next_cursor: str | None
    total: int


@dataclass(frozen=True)
class Query(_Record):
    """Which checkpoints are asked for; what isn't said leaves none out.

    Attributes:
        text: Words that the path, the note or a tag has, in any order.
        root, run: The number of a root, or of a run.
        container, layout, optimizer, tag, seal, verdict: What they are; `none` asks for those without.
        status: Whether they are still there; `any` for all.
        readable: Whether they can be read.
        sort: A name in `SORTS`, with `-` in front for the reverse.
    """

    text: str = ""
    root: int | None = None
    run: int | None = None
    container: str | None = None
    layout: str | None = None
    optimizer: str | None = None
    tag: str | None = None
    seal: str | None = None
    verdict: str | None = None
    status: str = "present"
    readable: bool | None = None
    sort: str = "-modified"


SORTS = ("id", "path", "name", "size", "modified", "step", "parameters", "container", "optimizer", "seen")
"""By what checkpoints can be sorted."""


@dataclass(frozen=True)
class Scan(_Record):
    """What a scan of the roots came to.

    Attributes:
        looked: How many files and folders were looked into.
        seen: How many checkpoints are there.
        new: How many of them weren't known.
        changed: How many of the known ones are others now.
        gone: How many are there no more.
        unreadable: How many of those that are there can't be read.
        seconds: How long it took.
    """

    looked: int
    seen: int
    new: int
    changed: int
    gone: int
    unreadable: int
    seconds: float


@dataclass(frozen=True)
class Scanning(_Record):
    """How far the service is in looking for checkpoints.

    Attributes:
        number: The number of the scan that was asked for, or of the last that was begun.
        done: The number of the last that has ended: one that was asked for is over when this has reached its number.
        running: Whether one runs now.
        entries: How many files and folders it has listed, or the last had.
        looked: How many of them it has looked into; those that haven't changed are passed over.
        last: What the last one came to; None before the first.
        problem: Why the last one has failed.
    """

    number: int
    done: int
    running: bool
    entries: int
    looked: int
    last: Scan | None
    problem: str | None
