"""Lineage: which checkpoint was made of which, by what, and what proves it.

A conversion's manifest has the digest of what it was made of: so it doesn't matter who ran it, or where. What the
catalogue doesn't know is a node by its digest alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from sqlalchemy import Connection, Row, and_, or_, select

from statekit.errors import RefusedError
from statekit.service.catalogue import checkpoint_of, checkpoints_of, spare_steps, subjects_of
from statekit.service.database import Database
from statekit.service.options import FILES
from statekit.service.records import Checkpoint, Edge, Lineage, Node
from statekit.service.standing import Rule
from statekit.service.tables import CHECKPOINTS, JOBS, RESULTS, ROOTS, SUBJECTS

MOST_NODES = 500
"""Checkpoints of a lineage at most; those that are nearest are shown."""


def lineage_of(database: Database, number: int) -> Lineage:
    """Returns all that a checkpoint was made of, and all that was made of it, step by step.

    Raises:
        NotFoundError: There is no such checkpoint.
    """
    with database.reading() as connection:
        first = checkpoint_of(connection, number)
        nodes: dict[str, Node] = {_name(first): Node(_name(first), first)}
        edges: dict[tuple[Any, ...], Edge] = {}
        ahead, written, left_out = [first], _Written(connection), False
        while ahead and len(nodes) < MOST_NODES:
            for edge, other in _edges(connection, ahead.pop(0), written):
                edges.setdefault((edge.source, edge.target, edge.kind, edge.job), edge)
                if other.id in nodes:
                    continue
                left_out = len(nodes) >= MOST_NODES
                if not left_out:
                    nodes[other.id] = other
                    if other.checkpoint is not None:
                        ahead.append(other.checkpoint)
    kept = [edge for edge in edges.values() if edge.source in nodes and edge.target in nodes]
    return Lineage(tuple(_in_order(list(nodes.values()), kept)), tuple(kept), left_out or bool(ahead))


def _name(checkpoint: Checkpoint) -> str:
    return f"checkpoint-{checkpoint.id}"


def _edges(connection: Connection, checkpoint: Checkpoint, written: _Written) -> Iterator[tuple[Edge, Node]]:
    """Yields the edges at a checkpoint, each with the node at its other end."""
    table = CHECKPOINTS.c
    row = connection.execute(select(CHECKPOINTS).where(table.id == checkpoint.id)).one()
    if row.made is not None:
        sources = [
            source
            for source in _with_digest(connection, row.source_digest)
            if _is_of(source, row) and _is_before(connection, source, row)
        ]
        for source in sources:
            yield _made(source, row, written), Node(_name(source), source)
        if not sources:
            told_source = row.made["source"]
            node = Node(f"digest-{told_source.get('digest') or f'of-{checkpoint.id}'}", None, told_source)
            yield _edge(node.id, row, None), node
    for target in _made_of(connection, checkpoint):
        yield (
            _made(checkpoint, target, written),
            Node(f"checkpoint-{target.id}", checkpoint_of(connection, target.id)),
        )
    proofs = select(JOBS.c.id).join(SUBJECTS, SUBJECTS.c.job == JOBS.c.id)
    proven = proofs.where(
        JOBS.c.kind == "verify", JOBS.c.state == "done", SUBJECTS.c.checkpoint == checkpoint.id
    )
    for job in connection.execute(proven.order_by(JOBS.c.id)).scalars().all():
        numbers = subjects_of(connection, job)
        data = connection.scalar(select(RESULTS.c.data).where(RESULTS.c.job == job)) or {}
        ends = [f"checkpoint-{number}" for number in numbers]
        other = checkpoint_of(connection, numbers[1] if numbers[0] == checkpoint.id else numbers[0])
        edge = Edge(ends[0], ends[1], "verify", job, None, {}, None, data.get("verdict"), data.get("digest"))
        yield edge, Node(_name(other), other)


def _with_digest(connection: Connection, digest: str | None) -> tuple[Checkpoint, ...]:
    return checkpoints_of(connection, CHECKPOINTS.c.digest == digest) if digest else ()


def _made_of(connection: Connection, checkpoint: Checkpoint) -> list[Row[Any]]:
    """Returns the rows of what was made of a checkpoint."""
    if checkpoint.digest is None:
        return []
    rows: Sequence[Any] = connection.execute(
        select(CHECKPOINTS).where(CHECKPOINTS.c.source_digest == checkpoint.digest).order_by(CHECKPOINTS.c.id)
    ).all()
    return [row for row in rows if _is_of(checkpoint, row) and _is_before(connection, checkpoint, row)]


def _is_of(source: Checkpoint, target: Row[Any]) -> bool:
    """Tells whether a manifest's source may be this one among those of equal content: by its step, if it says one."""
    recorded = (target.made or {}).get("source") or {}
    return source.id != target.id and (recorded.get("step") is None or recorded["step"] == source.step)


def _is_before(connection: Connection, source: Checkpoint, target: Row[Any]) -> bool:
    """Tells whether a checkpoint was there before another: what comes back from a system has its source's digest.

    Only of a conversion the time of its files says when it was made: an original may be sealed, or copied, later.
    """
    table = CHECKPOINTS.c
    row = connection.execute(select(table.made, table.modified).where(table.id == source.id)).one()
    return row.made is None or bool(row.modified <= target.modified)


@dataclass(frozen=True)
class _Writer:
    """A job that has written a checkpoint: what an edge says of it, and by which plan; None of whatever plan."""

    id: int
    kind: Literal["convert", "thin"]
    plan: str | None
    verdict: Any
    digest: Any


@dataclass(frozen=True)
class _Written:
    """The jobs that wrote something of a checkpoint, each read once, however much was made of it."""

    connection: Connection
    _known: dict[int, dict[str, list[_Writer]]] = field(default_factory=dict)

    def writers(self, source: int) -> dict[str, list[_Writer]]:
        """Returns the jobs about a checkpoint, the latest first, by the name of what they wrote."""
        if source not in self._known:
            about = select(SUBJECTS.c.job).where(SUBJECTS.c.checkpoint == source)
            jobs = select(JOBS.c.id, JOBS.c.kind, RESULTS.c.data).join(RESULTS, RESULTS.c.job == JOBS.c.id)
            done = and_(JOBS.c.kind.in_(("convert", "thin")), JOBS.c.state == "done", JOBS.c.id.in_(about))
            writers: dict[str, list[_Writer]] = {}
            rows: Sequence[Any] = self.connection.execute(jobs.where(done).order_by(JOBS.c.id.desc())).all()
            for job in rows:
                if (path := _place_of(job)) is not None:
                    plan = None if job.kind == "thin" else job.data.get("plan_digest")
                    writer = _Writer(job.id, job.kind, plan, job.data.get("verdict"), job.data.get("digest"))
                    writers.setdefault(os.path.basename(path), []).append(writer)
            self._known[source] = writers
        return self._known[source]


def _made(source: Checkpoint, target: Row[Any], written: _Written) -> Edge:
    """Returns the edge of a conversion, with the job that ran it where that was one of ours."""
    plan = target.made.get("plan")
    # A run's folder may be the target, and the step lie in it.
    names = os.fsdecode(target.place).split("/")[-2:]
    fitting = [
        job
        for name in reversed(names)
        for job in written.writers(source.id).get(name, ())
        if job.plan == plan or (job.kind == "thin" and name == names[-1])
    ]
    return _edge(_name(source), target, fitting[0] if fitting else None)


def _place_of(job: Row[Any]) -> str | None:
    """Returns where a job has written a checkpoint; None of one that has not."""
    if job.kind == "thin":
        return None if job.data["dry_run"] else str(job.data["target"])
    report = job.data.get("report")
    return report["target"] if report else None


def _edge(source: str, target: Row[Any], job: _Writer | None) -> Edge:
    maker = target.made
    return Edge(
        source,
        f"checkpoint-{target.id}",
        "convert" if job is None else job.kind,
        None if job is None else job.id,
        maker.get("tool"),
        maker.get("options") or {},
        maker.get("plan"),
        *(() if job is None else (job.verdict, job.digest)),
    )


def _in_order(nodes: list[Node], edges: list[Edge]) -> Iterator[Node]:
    """Yields sources before what was made of them, and by time; whatever is in a circle as it comes."""
    left = {node.id: node for node in sorted(nodes, key=_written_at)}
    sources: dict[str, set[str]] = {node.id: set() for node in nodes}
    for edge in edges:
        sources[edge.target].add(edge.source)
    while left:
        ready = (i for i in left if not (sources[i] - {i}) & left.keys())
        yield left.pop(next(ready, next(iter(left))))


def _written_at(node: Node) -> float:
    """Returns when a node was written, in seconds since 1970; 0 if the catalogue does not know it."""
    return 0.0 if node.checkpoint is None else node.checkpoint.modified.timestamp()


@dataclass(frozen=True)
class Spare:
    """A step that a rule doesn't keep.

    Attributes:
        checkpoint: It.
        refusal: Why it isn't thinned all the same; empty if it can be.
        remedy: What to do about that.
    """

    checkpoint: Checkpoint
    refusal: str = ""
    remedy: str = ""


def spare_by(database: Database, run: int, rule: Rule) -> list[Spare]:
    """Returns the steps of a run that a rule doesn't keep, the oldest first, each with why it can't be thinned."""
    spare = []
    with database.reading() as connection:
        for number in spare_steps(connection, run, rule):
            checkpoint = checkpoint_of(connection, number)
            try:
                check_thinning(connection, number)
                spare.append(Spare(checkpoint))
            except RefusedError as error:
                spare.append(Spare(checkpoint, error.subject, error.remedy or ""))
    return spare


def _has_later(connection: Connection, checkpoint: Checkpoint) -> bool:
    """Tells whether a run can be resumed from a later step than a checkpoint's."""
    if checkpoint.run is None:
        return False
    table = CHECKPOINTS.c
    others = checkpoints_of(connection, and_(table.run == checkpoint.run, table.status == "present"))
    return any(
        other.resumable and other.unreadable is None and other.verdict != "findings"
        and other.seal not in ("damaged", "changed") and (other.step or 0) > (checkpoint.step or 0)
        and _is_there(connection, other.id)
        for other in others
    )  # fmt: skip


def _is_there(connection: Connection, number: int) -> bool:
    """Tells whether a checkpoint lies where the last scan saw it: somebody may have removed it since."""
    places = select(ROOTS.c.place, CHECKPOINTS.c.place).join(ROOTS, ROOTS.c.id == CHECKPOINTS.c.root)
    return os.path.lexists(os.path.join(*connection.execute(places.where(CHECKPOINTS.c.id == number)).one()))


def check_thinning(connection: Connection, number: int, job: int | None = None) -> None:
    """Refuses to thin what is needed, or what isn't proven to be sound.

    Args:
        connection: A transaction.
        number: The checkpoint.
        job: The job that shall thin it, if there is one already.

    Raises:
        RefusedError: It isn't sealed, has no slots, is the last step of its run from which it can be resumed, something
            was made of it, or a job is about it.
    """
    checkpoint = checkpoint_of(connection, number)

    def refuse(why: str, remedy: str, place: object = checkpoint.path) -> None:
        raise RefusedError(f"The checkpoint isn't thinned: {why}.", place=place, remedy=remedy)

    if checkpoint.unreadable is not None or not checkpoint.resumable:
        refuse("it has no optimizer's state that could be removed", "choose one that has")
    if checkpoint.seal != "sealed":
        refuse(
            f"it is {checkpoint.seal}, and only what is sealed is proven to be what was written",
            "seal it, when you are sure of it",
        )
    if not _has_later(connection, checkpoint):
        refuse(
            "it is the last step of its run from which it can be resumed",
            "keep it, or thin it once there is a later one",
        )
    for row in _made_of(connection, checkpoint):
        if row.status == "present":
            refuse(
                "another was made of it, which nobody could hold against its source any more",
                "remove what was made of it, or keep both",
                f"{checkpoint.path}, of which {row.path} was made",
            )
    about = select(SUBJECTS.c.job).where(SUBJECTS.c.checkpoint == number)
    read = [JOBS.c.options[name].as_integer() == number for name in FILES]
    waiting = and_(or_(JOBS.c.id.in_(about), *read), JOBS.c.state.in_(("queued", "running")))
    busy = [i for i in connection.execute(select(JOBS.c.id).where(waiting)).scalars() if i != job]
    if busy:
        refuse(f"job {busy[0]} is about it", "wait until that has ended")
