"""Doctor by itself: one new step after the other is examined, as long as the day's budget lasts."""

from __future__ import annotations

import time
from typing import Any

from sqlalchemy import ColumnElement, Connection, and_, or_, select

from statekit.service.records import ENDED, Job
from statekit.service.service import Service
from statekit.service.tables import CHECKPOINTS, JOBS, SUBJECTS, bytes_of

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
        select(bytes_of(CHECKPOINTS.c.size))
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
    step, earlier = CHECKPOINTS.alias(), CHECKPOINTS.alias()
    several = SUBJECTS.alias()
    asked = (  # the first of several had none before it
        select(SUBJECTS.c.checkpoint)
        .join(JOBS, JOBS.c.id == SUBJECTS.c.job)
        .where(
            JOBS.c.kind == "doctor",
            or_(
                SUBJECTS.c.position > 0,
                ~select(several.c.job).where(several.c.job == JOBS.c.id, several.c.position > 0).exists(),
            ),
        )
    )
    before = _is_before(earlier.c, step.c, left)
    is_new = and_(
        _can_be_read(step.c),
        or_(step.c.verdict.is_(None), select(earlier.c.id).where(before).exists()),
        step.c.modified < time.time() - SETTLED_SECONDS,
        step.c.size <= left,
        step.c.id.not_in(asked),
    )
    newest = select(step.c.id).where(is_new).order_by(step.c.modified.desc(), step.c.id.desc()).limit(1)
    number: int | None = connection.scalar(newest)
    if number is None:
        return ()
    those = select(earlier.c.id).where(before, step.c.id == number).order_by(earlier.c.step.desc())
    last: int | None = connection.scalar(those.limit(1))
    return (number,) if last is None else (last, number)


def _can_be_read(table: Any) -> ColumnElement[bool]:
    return and_(table.status == "present", table.resumable, table.unreadable.is_(None))


def _is_before(earlier: Any, step: Any, left: int) -> ColumnElement[bool]:
    """Tells whether one is an earlier step of the same run, and can be read with it; no run is no run's."""
    return and_(
        _can_be_read(earlier),
        earlier.run == step.run,
        earlier.step < step.step,
        earlier.size <= left - step.size,
    )
