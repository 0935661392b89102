"""Mends rows of the catalogue that hold what nothing of ours has written, so that a scan goes on from them.

Another program may have changed the file. Until the next scan whoever asks for such a row gets an error that says so.
A row that doesn't say where its checkpoint lies is nobody's any more: the scan makes another. Of jobs, their events and
their results nothing is mended: what they say lies nowhere else.
"""

from __future__ import annotations

import time
from typing import Any

import structlog
from sqlalchemy import Column, ColumnElement, Connection, Table, case, delete, func, or_, select, update

from statekit.service.roots import shown
from statekit.service.tables import CHECKPOINTS, RUNS, TAGS, Held

_LOG = structlog.get_logger("statekit.service")
_STORED = {str: "text", bytes: "blob", int: "integer", float: "real"}
"""How SQLite calls the types of values."""
_ANEW: dict[str, Any] = {
    "size": 0, "modified": 0.0, "print": "", "proof": "", "seal": "unknown", "note": "", "note_by": "",
}  # fmt: skip
"""What a scan finds anew, or nobody knows any more; columns that may lack a value lack it."""


def mend(connection: Connection, root: int) -> int:
    """Mends the checkpoints, runs and tags, within a transaction; returns how many rows it had to change.

    Args:
        connection: The transaction, which writes.
        root: A root, for rows that name none.
    """
    for number in (runs := _odd_rows(connection, RUNS)):  # grouping makes them again
        connection.execute(update(CHECKPOINTS).where(CHECKPOINTS.c.run == number).values(run=None))
        connection.execute(delete(RUNS).where(RUNS.c.id == number))
    for number, names in (rows := _odd_rows(connection, CHECKPOINTS)).items():
        values = {name: _ANEW.get(name) for name in names}
        values |= {name: time.time() for name in names & {"seen", "first_seen"}}
        if "status" in names:
            values["status"] = "gone"
        if {"root", "place"} & names:
            values |= {"root": root, "place": b"", "status": "changed", "path": ".", "name": "."}
        elif {"path", "name"} & names:
            place = connection.scalar(select(CHECKPOINTS.c.place).where(CHECKPOINTS.c.id == number))
            path = shown(place or b"")
            values |= {"path": path, "name": path.rpartition("/")[2]}
        connection.execute(update(CHECKPOINTS).where(CHECKPOINTS.c.id == number).values(values))
    tags = connection.execute(delete(TAGS).where(or_(*map(_is_odd, TAGS.c)))).rowcount
    if mended := len(runs) + len(rows) + tags:
        _LOG.warning("mended the catalogue, which another program has changed", rows=mended)
    return mended


def _odd_rows(connection: Connection, table: Table) -> dict[int, set[str]]:
    """Returns the rows with odd values, by their numbers, and the columns of these."""
    odd = {column.name: _is_odd(column) for column in table.c if isinstance(column.type, Held)}
    if "run" in odd:
        odd["run"] |= table.c.run.is_not(None) & table.c.run.not_in(select(RUNS.c.id))
    chosen = select(table.c.id, *(is_odd.label(name) for name, is_odd in odd.items())).where(
        or_(*odd.values())
    )
    rows = connection.execute(chosen).all()
    return {row.id: {name for name in odd if row._mapping[name]} for row in rows}


def _is_odd(column: Column[Any]) -> ColumnElement[bool]:
    """Returns whether a row's value in a column isn't of the column's form."""
    form: Held = column.type  # type: ignore[assignment]  # columns that may be asked have these
    stored = _STORED.get(form.form)
    if stored is None:
        kind = case((func.json_valid(column) == 1, func.json_type(column)), else_="none")
        return column.is_not(None) & kind.not_in(("object", "null"))
    odd: ColumnElement[bool] = func.typeof(column).not_in((stored, "null"))
    if form.among:
        odd |= column.not_in(form.among)
    if form.most is not None:
        odd |= ~column.between(0, form.most)
    return odd
