"""The jobs: one table in which work is asked for, leased to one worker at a time, and ends exactly once.

A lease lasts for a while and must be renewed; its token is a number that grows with each lease of the job, and
whoever writes with an older one writes nothing. Time is the machine's since its start, which nobody sets; after
another start all leases are over. Work is begun again only where its worker has died, and not for ever.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from sqlalchemy import Connection, Row, and_, exists, func, not_, or_, select, update
from sqlalchemy.sql import ColumnElement

from statekit.errors import NotFoundError, RefusedError, UsageError, printable, some
from statekit.service.catalogue import (
    checkpoint_of,
    decoded_cursor,
    encoded_cursor,
    learned,
    of_row,
    subjects_of,
    utc,
    utc_or_none,
)
from statekit.service.database import Database
from statekit.service.lineage import check_thinning
from statekit.service.options import checked
from statekit.service.records import ENDED, Event, EventKind, Job, Page, State
from statekit.service.tables import CHECKPOINTS, EVENTS, JOBS, RESULTS, SUBJECTS, TAGS
from statekit.service.tasks import processes
from statekit.service.tasks.failures import crash

LEASE_SECONDS = 15.0
MOST_ATTEMPTS = 3
"""How often a job is begun whose workers die."""
MOST_WAITING = 10_000
"""Jobs that may wait at a time."""
MOST_ITEMS = 500
MOST_LOGS = 2000
"""Lines of a job's log; what comes after them is left out."""
WRITING = ("seal", "convert", "thin")
"""Kinds after which there are other files than before."""
LASTING = (*WRITING, "verify")
"""Kinds that a lineage is made of: of them only the events go with time."""
_PRUNED = 200
"""Jobs that are pruned in one transaction: nobody waits long for it."""


@dataclass(frozen=True)
class Lease:
    """That a worker has a job for itself, until it ends or isn't renewed.

    Attributes:
        job: The job as it was when it was leased.
        token: What the worker writes with.
    """

    job: Job
    token: int


class Lost(Exception):
    """The lease is over: another has the job, or it has ended."""


class Jobs:
    """The jobs of a service.

    Args:
        database: Where they are written down.
        clock: Gives nanoseconds since the machine was started.
        boot: Names that start of the machine.
    """

    def __init__(
        self,
        database: Database,
        clock: Callable[[], int] = processes.now,
        boot: Callable[[], str] = processes.boot_id,
    ) -> None:
        self._database = database
        self._clock, self._boot = clock, boot

    def submit(
        self,
        kind: str,
        subjects: Sequence[int],
        options: Mapping[str, Any] | None = None,
        *,
        idempotency_key: str | None = None,
        requested_by: str = "",
    ) -> Job:
        """Asks for work; asked for again with the same key, it is the same job.

        Args:
            kind: What shall be done.
            subjects: The numbers of the checkpoints that it is about.
            options: What is said beside (options.py).
            idempotency_key: Names this request; whoever doesn't know whether it arrived sends it again.
            requested_by: Who asks.

        Raises:
            UsageError: That is no work, the key was used for other work, or too much waits already.
            NotFoundError: There is no such checkpoint, or it isn't there any more.
            RefusedError: It mustn't be thinned.
        """
        given = checked(kind, subjects, options or {})
        if idempotency_key is not None and not 0 < len(idempotency_key) <= 200:
            raise UsageError(
                "The idempotency key is invalid.", place="Idempotency-Key", expected="1 to 200 characters"
            )
        with self._database.writing() as connection:
            if idempotency_key is not None:
                same = select(JOBS).where(JOBS.c.idempotency_key == idempotency_key)
                before = connection.execute(same).one_or_none()
                if before is not None:
                    return self._same(connection, before, kind, subjects, given)
            return self._added(connection, kind, subjects, given, idempotency_key, requested_by)

    def submit_each(self, kind: str, subjects: Sequence[int], *, requested_by: str = "") -> list[Job]:
        """Asks for the same work about each of some checkpoints: for all of it, or for none.

        Raises:
            UsageError, NotFoundError, RefusedError: As `submit`, of one of them.
        """
        given = [(number, checked(kind, (number,), {})) for number in subjects]
        with self._database.writing() as connection:
            kept = select(TAGS.c.checkpoint).where(TAGS.c.checkpoint.in_(list(subjects)))
            if kind == "thin" and (tagged := connection.execute(kept.distinct()).scalars().all()):
                raise RefusedError(
                    "Steps with a tag are kept: somebody gave one meanwhile.",
                    place=some([f"checkpoint {number}" for number in tagged]),
                    remedy="look at the list again, or take the tag away",
                )
            return [
                self._added(connection, kind, (number,), options, None, requested_by)
                for number, options in given
            ]

    def _added(
        self,
        connection: Connection,
        kind: str,
        subjects: Sequence[int],
        given: Mapping[str, Any],
        idempotency_key: str | None,
        requested_by: str,
    ) -> Job:
        """Writes a job down, once what it is about allows it."""
        for number in subjects:
            checkpoint = checkpoint_of(connection, number)
            if checkpoint.status != "present":
                raise NotFoundError(
                    f"The checkpoint is {checkpoint.status}.",
                    place=f"checkpoint {number}",
                    found=f"checkpoint {checkpoint.replaced_by} has its place"
                    if checkpoint.replaced_by
                    else None,
                    remedy="choose one that is there",
                )
            if kind == "thin":
                check_thinning(connection, number)
        waiting = select(func.count()).where(JOBS.c.state == "queued").select_from(JOBS)
        if (connection.scalar(waiting) or 0) >= MOST_WAITING:
            raise UsageError(
                "Too many jobs are waiting.",
                expected=f"at most {MOST_WAITING}",
                remedy="wait, or cancel some",
            )
        statement = JOBS.insert().values(
            kind=kind, options=given, cache_key=_cache_key(connection, kind, subjects, given),
            idempotency_key=idempotency_key, state="queued", attempts=0, token=0, cancelling=False,
            created=time.time(), text="", requested_by=printable(requested_by)[:200], last_event=0,
        )  # fmt: skip
        job = connection.execute(statement).lastrowid
        rows = [{"job": job, "position": i, "checkpoint": subject} for i, subject in enumerate(subjects)]
        connection.execute(SUBJECTS.insert(), rows)
        _add_event(connection, job, "state", {"state": "queued"})
        return _job_of(connection, job)

    def _same(
        self,
        connection: Connection,
        before: Row[Any],
        kind: str,
        subjects: Sequence[int],
        given: Mapping[str, Any],
    ) -> Job:
        if (before.kind, subjects_of(connection, before.id), before.options) != (
            kind,
            tuple(subjects),
            given,
        ):
            raise UsageError(
                "The idempotency key was used for another request.",
                place="Idempotency-Key",
                found=f"job {before.id}",
                remedy="make a new key for each request",
            )
        return _job_of(connection, before.id)

    def job(self, number: int) -> Job:
        """Returns a job.

        Raises:
            NotFoundError: There is none of that number.
        """
        with self._database.reading() as connection:
            return _job_of(connection, number)

    def jobs(
        self,
        *,
        state: str | None = None,
        kind: str | None = None,
        subject: int | None = None,
        cursor: str | None = None,
        limit: int = 50,
    ) -> Page[Job]:
        """Returns a page of jobs, the latest first.

        Args:
            state: Those in this state; `open` for those that haven't ended.
            kind: Those of this kind.
            subject: Those about this checkpoint.
            cursor: Where an earlier page has ended.
            limit: Items of a page.

        Raises:
            UsageError: The cursor isn't one.
        """
        limit = min(max(limit, 1), MOST_ITEMS)
        wanted: list[ColumnElement[bool]] = []
        if state is not None:
            wanted.append(JOBS.c.state.not_in(ENDED) if state == "open" else JOBS.c.state == state)
        if kind is not None:
            wanted.append(JOBS.c.kind == kind)
        if subject is not None:
            wanted.append(JOBS.c.id.in_(select(SUBJECTS.c.job).where(SUBJECTS.c.checkpoint == subject)))
        behind = [] if cursor is None else [JOBS.c.id < decoded_cursor(cursor, False)[1]]
        with self._database.reading() as connection:
            total = connection.scalar(select(func.count()).select_from(JOBS).where(and_(True, *wanted))) or 0
            chosen = (
                select(JOBS).where(and_(True, *wanted, *behind)).order_by(JOBS.c.id.desc()).limit(limit + 1)
            )
            rows = connection.execute(chosen).all()
            items = tuple(_job(connection, row) for row in rows[:limit])
        ahead = None if len(rows) <= limit else encoded_cursor(0, rows[limit - 1].id)
        return Page(items, ahead, total)

    def counts(self) -> dict[str, int]:
        """Returns how many jobs are in each state."""
        with self._database.reading() as connection:
            rows = connection.execute(select(JOBS.c.state, func.count()).group_by(JOBS.c.state)).all()
        return {state: count for state, count in rows}  # noqa: C416 - rows are no pairs to mypy

    def result(self, number: int) -> Any:
        """Returns what came of a job.

        Raises:
            NotFoundError: There is no such job, or it has no result.
        """
        with self._database.reading() as connection:
            row = connection.execute(select(RESULTS.c.data).where(RESULTS.c.job == number)).one_or_none()
            if row is None:
                job = _job_of(connection, number)
                raise NotFoundError(
                    "The job has no result.", place=f"job {number}", found=f"it is {job.state}"
                )
            return row.data

    def earlier(
        self, kind: str, subjects: Sequence[int], options: Mapping[str, Any] | None = None
    ) -> Job | None:
        """Returns the latest job that has done the same with the same contents, by this statekit; None of none."""
        given = checked(kind, subjects, options or {})
        with self._database.reading() as connection:
            key = _cache_key(connection, kind, subjects, given)
            chosen = (
                select(JOBS).where(JOBS.c.cache_key == key, JOBS.c.state == "done").order_by(JOBS.c.id.desc())
            )
            row = connection.execute(chosen.limit(1)).one_or_none()
            return None if row is None else _job(connection, row)

    def events(self, number: int, after: int = 0, limit: int = MOST_ITEMS) -> list[Event]:
        """Returns what has befallen a job since one of its events, in order.

        Raises:
            NotFoundError: There is no such job.
        """
        with self._database.reading() as connection:
            _job_of(connection, number)
            chosen = (
                select(EVENTS)
                .where(EVENTS.c.job == number, EVENTS.c.number > after)
                .order_by(EVENTS.c.number)
            )
            rows = connection.execute(chosen.limit(limit)).all()
        return [Event(row.job, row.number, row.kind, row.data, utc(row.time)) for row in rows]

    def log(self, number: int, limit: int = MOST_ITEMS) -> list[str]:
        """Returns the last lines of a job's log, in order; none of a job that there isn't."""
        lines = select(EVENTS.c.data).where(EVENTS.c.job == number, EVENTS.c.kind == "log")
        with self._database.reading() as connection:
            rows = connection.execute(lines.order_by(EVENTS.c.number.desc()).limit(limit)).scalars().all()
        return [str(data["line"]) for data in reversed(rows)]

    def cancel(self, number: int) -> Job:
        """Ends a job that waits, and asks for the end of one that runs; one that has ended stays as it is.

        Raises:
            NotFoundError: There is no such job.
        """
        with self._database.writing() as connection:
            job = _job_of(connection, number)
            if job.state == "queued":
                _end(connection, number, "cancelled", None, None)
            elif job.state == "running" and not job.cancelling:
                connection.execute(update(JOBS).where(JOBS.c.id == number).values(cancelling=True))
                _add_event(connection, number, "state", {"state": "running", "cancelling": True})
            return _job_of(connection, number)

    def lease(self, holder: str) -> Lease | None:
        """Gives a worker the oldest job that waits; None if there is none.

        Args:
            holder: The worker's name, which tells whether it is alive (processes.py).
        """
        with self._database.reading() as connection:
            if connection.scalar(select(JOBS.c.id).where(JOBS.c.state == "queued").limit(1)) is None:
                return None
        with self._database.writing() as connection:
            chosen = select(JOBS).where(JOBS.c.state == "queued").order_by(JOBS.c.id).limit(1)
            row = connection.execute(chosen).one_or_none()
            if row is None:
                return None
            values = {
                "state": "running", "attempts": row.attempts + 1, "token": row.token + 1, "holder": holder,
                "lease_boot": self._boot(), "lease_until": self._until(), "started": time.time(),
                "fraction": None, "text": "",
            }  # fmt: skip
            connection.execute(update(JOBS).where(JOBS.c.id == row.id).values(**values))
            _add_event(connection, row.id, "state", {"state": "running", "attempt": row.attempts + 1})
            return Lease(_job_of(connection, row.id), row.token + 1)

    def _until(self) -> int:
        return self._clock() + round(LEASE_SECONDS * 1e9)

    def heartbeat(
        self, lease: Lease, fraction: float | None = None, text: str = "", lines: Sequence[str] = ()
    ) -> bool:
        """Renews a lease, and says how far the work is; returns whether somebody has asked for its end.

        Raises:
            Lost: It is over.
        """
        with self._database.writing() as connection:
            row = self._held(connection, lease)
            if row is None:
                raise Lost
            values = {
                "lease_boot": self._boot(),
                "lease_until": self._until(),
                "fraction": fraction,
                "text": printable(text)[:500],
            }
            connection.execute(update(JOBS).where(JOBS.c.id == lease.job.id).values(**values))
            if (fraction, values["text"]) != (row.fraction, row.text):
                _add_event(
                    connection, lease.job.id, "progress", {"fraction": fraction, "text": values["text"]}
                )
            _add_lines(connection, lease.job.id, lines)
            return bool(row.cancelling)

    def finish(
        self,
        lease: Lease,
        state: State,
        result: Any = None,
        problem: Mapping[str, Any] | None = None,
        lines: Sequence[str] = (),
    ) -> bool:
        """Ends a job; returns False, and changes nothing, if the lease is over."""
        with self._database.writing() as connection:
            if self._held(connection, lease) is None:
                return False
            _add_lines(connection, lease.job.id, lines)
            _end(connection, lease.job.id, state, result, problem)
            if state == "done":
                learned(connection, lease.job, result)
            return True

    def release(self, lease: Lease, lines: Sequence[str] = ()) -> bool:
        """Lets a job wait again that was begun and not done, as if it hadn't been; False if the lease is over."""
        with self._database.writing() as connection:
            row = self._held(connection, lease)
            if row is None:
                return False
            _add_lines(connection, lease.job.id, lines)
            _wait_again(connection, row, "the service ends", row.attempts - 1)
            return True

    def _held(self, connection: Connection, lease: Lease) -> Row[Any] | None:
        is_held = and_(JOBS.c.id == lease.job.id, JOBS.c.token == lease.token, JOBS.c.state == "running")
        return connection.execute(select(JOBS).where(is_held)).one_or_none()

    def reap(self, is_dead: Callable[[str | None], bool] = processes.holder_is_dead) -> int:
        """Takes back the jobs whose lease is over or whose worker is proven dead; returns how many.

        They wait again, unless they have been begun too often, or somebody has asked for their end.
        """
        running = JOBS.c.state == "running"
        with self._database.reading() as connection:
            rows = connection.execute(select(JOBS).where(running)).all()
        over = [row for row in rows if self._is_over(row) or is_dead(row.holder)]
        if not over:
            return 0
        count = 0
        with self._database.writing() as connection:
            for row in over:
                same = and_(running, JOBS.c.id == row.id, JOBS.c.token == row.token)
                now = connection.execute(select(JOBS).where(same)).one_or_none()
                if now is None or not (self._is_over(now) or is_dead(now.holder)):
                    continue
                count += 1
                if now.cancelling:
                    _end(connection, now.id, "cancelled", None, None)
                elif now.attempts >= MOST_ATTEMPTS:
                    _end(
                        connection,
                        now.id,
                        "crashed",
                        None,
                        crash(f"its worker has died {now.attempts} times"),
                    )
                else:
                    _wait_again(connection, now, "its worker has died", now.attempts)
        return count

    def _is_over(self, row: Row[Any]) -> bool:
        return row.lease_boot != self._boot() or (row.lease_until or 0) < self._clock()

    def prune(self, days: float) -> int:
        """Removes what nobody needs of jobs that ended some days ago; returns how many jobs are gone wholly.

        Their events go. They go themselves, with their results, unless pages or lineages show what they found: those
        that wrote or proved something stay, and the latest of equal work about the same checkpoints, while these are
        there.
        """
        before = time.time() - days * 86400
        ended = and_(JOBS.c.state.in_(ENDED), JOBS.c.ended < before)
        gone = CHECKPOINTS.c.status != "present"
        about_gone = (
            select(SUBJECTS.c.job).join(CHECKPOINTS, SUBJECTS.c.checkpoint == CHECKPOINTS.c.id).where(gone)
        )
        later = JOBS.alias()
        subject, other_subject = SUBJECTS.alias(), SUBJECTS.alias()
        same = select(other_subject.c.job).where(
            other_subject.c.job == later.c.id,
            other_subject.c.position == subject.c.position,
            other_subject.c.checkpoint == subject.c.checkpoint,
        )
        another = select(subject.c.job).where(
            subject.c.job == JOBS.c.id, not_(same.correlate(later, subject).exists())
        )
        is_again = exists().where(
            later.c.cache_key == JOBS.c.cache_key,
            later.c.id > JOBS.c.id,
            later.c.state == "done",
            not_(another.correlate(later, JOBS).exists()),  # a copy has a page of its own
        )
        useless = or_(JOBS.c.state != "done", JOBS.c.id.in_(about_gone), is_again)
        lasts = and_(JOBS.c.kind.in_(LASTING), JOBS.c.state == "done")
        whole = select(JOBS.c.id).where(ended, not_(lasts), useless).order_by(JOBS.c.id)
        logged = select(EVENTS.c.job).distinct().where(EVENTS.c.job.in_(select(JOBS.c.id).where(ended)))
        count = 0
        while True:
            with self._database.writing() as connection:
                numbers = connection.execute(whole.limit(_PRUNED)).scalars().all()
                jobs = connection.execute(logged.limit(_PRUNED)).scalars().all()
                connection.execute(EVENTS.delete().where(EVENTS.c.job.in_({*numbers, *jobs})))
                for table in (RESULTS, SUBJECTS):
                    connection.execute(table.delete().where(table.c.job.in_(numbers)))
                connection.execute(JOBS.delete().where(JOBS.c.id.in_(numbers)))
            count += len(numbers)
            if len(numbers) < _PRUNED and len(jobs) < _PRUNED:
                return count

    def written(self) -> tuple[int, int]:
        """Returns what is another after each job after which there may be other files, whatever clock was set."""
        wanted = and_(JOBS.c.kind.in_(WRITING), JOBS.c.state.in_(ENDED))
        chosen = select(func.count(), func.coalesce(func.sum(JOBS.c.id), 0)).where(wanted)
        with self._database.reading() as connection:
            count, total = connection.execute(chosen.select_from(JOBS)).one()
        return int(count), int(total)


def _wait_again(connection: Connection, row: Row[Any], why: str, attempts: int) -> None:
    values = {
        "state": "queued", "token": row.token + 1, "attempts": attempts, "holder": None, "lease_boot": None,
        "lease_until": None, "fraction": None, "text": "",
    }  # fmt: skip
    connection.execute(update(JOBS).where(JOBS.c.id == row.id).values(**values))
    _add_event(connection, row.id, "state", {"state": "queued", "because": why})


def _end(
    connection: Connection, number: int, state: State, result: Any, problem: Mapping[str, Any] | None
) -> None:
    values = {
        "state": state, "ended": time.time(), "holder": None, "lease_boot": None, "lease_until": None,
        "problem": problem, "token": JOBS.c.token + 1,
    }  # fmt: skip
    if state == "done":
        values["fraction"] = 1.0
    connection.execute(update(JOBS).where(JOBS.c.id == number).values(**values))
    if result is not None:
        connection.execute(RESULTS.insert().values(job=number, data=result))
    _add_event(connection, number, "state", {"state": state, "problem": problem})


def _add_lines(connection: Connection, number: int, lines: Sequence[str]) -> None:
    if not lines:
        return
    logged = select(func.count()).select_from(EVENTS).where(EVENTS.c.job == number, EVENTS.c.kind == "log")
    for line in lines[: max(MOST_LOGS - (connection.scalar(logged) or 0), 0)]:
        _add_event(connection, number, "log", {"line": printable(line)})


def _add_event(connection: Connection, number: int, kind: EventKind, data: Mapping[str, Any]) -> None:
    count = update(JOBS).where(JOBS.c.id == number).values(last_event=JOBS.c.last_event + 1)
    connection.execute(count)
    last = connection.scalar(select(JOBS.c.last_event).where(JOBS.c.id == number))
    connection.execute(
        EVENTS.insert().values(job=number, number=last, kind=kind, data=data, time=time.time())
    )


def _cache_key(connection: Connection, kind: str, subjects: Sequence[int], options: Mapping[str, Any]) -> str:
    """Returns the digest of what decides the result: equal contents give equal results."""
    chosen = select(CHECKPOINTS.c.id, CHECKPOINTS.c.digest).where(CHECKPOINTS.c.id.in_(list(subjects)))
    digests = {row.id: row.digest for row in connection.execute(chosen)}
    contents = [digests.get(number) or f"checkpoint {number}" for number in subjects]
    text = json.dumps([version("statekit"), kind, contents, options], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=32).hexdigest()


def _job_of(connection: Connection, number: int) -> Job:
    row = connection.execute(select(JOBS).where(JOBS.c.id == number)).one_or_none()
    if row is None:
        raise NotFoundError("There is no such job.", place=f"job {number}", remedy="list the jobs")
    return _job(connection, row)


def _job(connection: Connection, row: Row[Any]) -> Job:
    has_result = connection.scalar(select(func.count()).select_from(RESULTS).where(RESULTS.c.job == row.id))
    return of_row(
        Job,
        row,
        subjects=subjects_of(connection, row.id),
        created=utc(row.created),
        started=utc_or_none(row.started),
        ended=utc_or_none(row.ended),
        cancelling=row.cancelling and row.state == "running",
        has_result=bool(has_result),
    )
