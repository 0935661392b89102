"""Doctor by itself: one new step after the other is examined, as long as the day's budget lasts."""

from __future__ import annotations

import time
from typing import Any

from sqlalchemy import Connection, Row, and_, func, select

from statekit.service.records import ENDED, Job
from statekit.service.service import Service
from statekit.service.tables import CHECKPOINTS, JOBS, SUBJECTS

BY_ITSELF = "statekit"
"""Who asks for these jobs."""
DAY_SECONDS = 86_400
SETTLED_SECONDS = 60
"""How long nobody has written to a checkpoint that is examined."""


def examine_next(service: Service, budget: int) -> Job | None:
    """Asks for an examination of the youngest step that doctor has never seen, with the step before it.

    One such job is open at a time, and each checkpoint is asked about once, whatever came of it.

    Args:
        service: The service.
        budget: Bytes that such jobs may read in 24 hours; 0 asks for nothing.

    Returns:
        The job; None if there is nothing to examine, or not now.
    """
    if not budget:
        return None
    with service.database.reading() as connection:
        subjects = _subjects(connection, budget - _read(connection))
    return service.jobs.submit("doctor", subjects, requested_by=BY_ITSELF) if subjects else None


def _read(connection: Connection) -> int:
    """Returns the bytes of what was examined by itself within a day."""
    recent = and_(JOBS.c.requested_by == BY_ITSELF, JOBS.c.created > time.time() - DAY_SECONDS)
    read = (
        select(func.sum(CHECKPOINTS.c.size))
        .join(SUBJECTS, SUBJECTS.c.checkpoint == CHECKPOINTS.c.id)
        .join(JOBS, JOBS.c.id == SUBJECTS.c.job)
        .where(recent)
    )
    return connection.scalar(read) or 0


def _subjects(connection: Connection, left: int) -> tuple[int, ...]:
    """Returns the checkpoint to examine next, behind the step before it; empty if there is none that may be read."""
    is_open = and_(JOBS.c.requested_by == BY_ITSELF, JOBS.c.state.not_in(ENDED))
    if connection.scalar(select(JOBS.c.id).where(is_open).limit(1)) is not None:
        return ()
    table = CHECKPOINTS.c
    asked = (
        select(SUBJECTS.c.checkpoint).join(JOBS, JOBS.c.id == SUBJECTS.c.job).where(JOBS.c.kind == "doctor")
    )
    is_new = and_(
        table.status == "present",
        table.resumable,
        table.verdict.is_(None),
        table.unreadable.is_(None),
        table.modified < time.time() - SETTLED_SECONDS,
        table.size <= left,
        table.id.not_in(asked),
    )
    newest = select(CHECKPOINTS).where(is_new).order_by(table.modified.desc(), table.id.desc()).limit(1)
    row = connection.execute(newest).one_or_none()
    if row is None:
        return ()
    before = _before(connection, row, left - row.size)
    return (row.id,) if before is None else (before, row.id)


def _before(connection: Connection, row: Row[Any], left: int) -> int | None:
    """Returns the step before a checkpoint in its run, where it can be read with it."""
    table = CHECKPOINTS.c
    is_earlier = and_(
        table.run == row.run,
        table.status == "present",
        table.resumable,
        table.unreadable.is_(None),
        table.step < row.step,
        table.size <= left,
    )
    number: int | None = connection.scalar(
        select(table.id).where(is_earlier).order_by(table.step.desc()).limit(1)
    )
    return number
