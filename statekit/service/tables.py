"""The tables of the service's database. What changes here needs a revision in migrations/versions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    ColumnElement,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    cast,
    func,
)
from sqlalchemy.types import TypeDecorator, TypeEngine

from statekit.service.records import EventKind, Kind, Seal, State, Status, Verdict

METADATA = MetaData()
LATEST = 253402300799.0
"""The last second that a date has, in seconds since 1970."""


class OddValue(ValueError):
    """A value of a row that nothing of ours has written: SQLite keeps whatever it is given."""


class Held(TypeDecorator[Any]):
    """The type of a column whose values are held against it when they are read.

    Args:
        stored: The type that the database knows.
        form: What a value is in Python.
        among: The texts that there are, or the names that a mapping has at least; empty if any.
        most: The largest number, none below 0; None if any.
        lacks: Whether a row may lack it.
    """

    impl: Any = Text
    cache_ok = True

    def __init__(
        self,
        stored: TypeEngine[Any],
        form: type,
        among: tuple[str, ...] = (),
        most: float | None = None,
        lacks: bool = True,
    ) -> None:
        super().__init__()
        self.impl = stored
        self.stored = stored
        self.form: Any = form
        self.among, self.most, self.lacks = among, most, lacks

    def process_result_value(self, value: Any, dialect: Any) -> Any:
        """Returns a value.

        Raises:
            OddValue: It isn't of this form.
        """
        if value is None and self.lacks:
            return value
        is_odd = not isinstance(value, self.form) or (self.most is not None and not 0 <= value <= self.most)
        if not is_odd and (not self.among or self._is_whole(value)):
            return value
        raise OddValue(f"a row has {value!r:.80} where it must have {self.among or self.form.__name__}")

    def _is_whole(self, value: Any) -> bool:
        return value in self.among if isinstance(value, str) else not value or value.keys() >= {*self.among}


def _one_of(kinds: Any) -> Held:
    return Held(String(16), str, get_args(kinds))


_BLOB, TEXT, _WHOLE, _BIG = (
    Held(LargeBinary(), bytes),
    Held(Text(), str),
    Held(Integer(), int),
    Held(BigInteger(), int),
)
_REAL, _TIME, _NAMES = Held(Float(), float), Held(Float(), float, most=LATEST), Held(JSON(), Mapping)
_OPTIONS = Held(JSON(), Mapping, lacks=False)
_PROBLEM = Held(JSON(), Mapping, ("kind", "subject", "place", "expected", "found", "remedy"))


def bytes_of(sizes: Column[Any]) -> ColumnElement[int]:
    """Returns the sum of sizes: as a number with a point first, since a sum of whole numbers may overflow."""
    return cast(func.total(sizes), BigInteger)


def _short(length: int) -> Held:
    return Held(String(length), str)


ROOTS = Table(
    "roots",
    METADATA,
    Column("id", Integer, primary_key=True),
    Column("place", _BLOB, nullable=False, unique=True),  # a path's bytes: not all of them are UTF-8
    sqlite_autoincrement=True,
)

RUNS = Table(
    "runs",
    METADATA,
    Column("id", Integer, primary_key=True),
    Column("root", _WHOLE, ForeignKey("roots.id"), nullable=False),
    Column("place", _BLOB, nullable=False),
    Column("path", TEXT, nullable=False),
    Column("name", TEXT, nullable=False),
    sqlite_autoincrement=True,
)

CHECKPOINTS = Table(
    "checkpoints",
    METADATA,
    Column("id", Integer, primary_key=True),
    Column("root", _WHOLE, ForeignKey("roots.id"), nullable=False),
    Column("place", _BLOB, nullable=False),
    Column("path", TEXT, nullable=False),
    Column("name", TEXT, nullable=False),
    Column("run", _WHOLE, ForeignKey("runs.id")),
    Column("size", _BIG, nullable=False),
    Column("modified", _TIME, nullable=False),  # seconds since 1970 in UTC, as all times are
    Column("print", _short(64), nullable=False),  # of names, sizes and times of its files
    Column("proof", _short(64), nullable=False),  # the same of the manifests among and beside them
    Column("step", _BIG),
    Column("container", _short(64)),
    Column("layout", _short(64)),
    Column("optimizer", _short(128)),
    Column("tensors", _WHOLE),
    Column("parameters", _WHOLE),
    Column("elements", _BIG),
    Column("resumable", Boolean, nullable=False),
    Column("digest", _short(64)),
    Column("made", _NAMES),  # what its manifest says of the conversion that made it
    Column("source_digest", _short(64)),
    Column("seal", _one_of(Seal), nullable=False),
    Column("checked", _TIME),
    Column("verdict", _one_of(Verdict)),
    Column("unreadable", TEXT),
    Column("undecoded", TEXT),
    Column("status", _one_of(Status), nullable=False),
    Column("replaced_by", _WHOLE, ForeignKey("checkpoints.id")),
    Column("note", TEXT, nullable=False, server_default=""),
    Column("note_by", TEXT, nullable=False, server_default=""),
    Column("first_seen", _TIME, nullable=False),
    Column("seen", _TIME, nullable=False),
    Index("checkpoints_place", "root", "place"),
    Index("checkpoints_run", "run"),
    Index("checkpoints_modified", "status", "modified"),
    Index("checkpoints_digest", "digest"),
    Index("checkpoints_source_digest", "source_digest"),
    sqlite_autoincrement=True,
)

TAGS = Table(
    "tags",
    METADATA,
    Column("checkpoint", _WHOLE, ForeignKey("checkpoints.id"), primary_key=True),
    Column("tag", TEXT, primary_key=True),
    Index("tags_tag", "tag"),
)

CHANGES = Table(
    "changes",
    METADATA,
    Column("id", Integer, primary_key=True),
    Column("number", _WHOLE, nullable=False),  # triggers count it: checkpoints, runs and tags were changed
)

JOBS = Table(
    "jobs",
    METADATA,
    Column("id", Integer, primary_key=True),
    Column("kind", _one_of(Kind), nullable=False),
    Column("options", _OPTIONS, nullable=False),
    Column("cache_key", _short(64), nullable=False),  # of kind, contents, options and tool: equal work
    Column("idempotency_key", TEXT, unique=True),
    Column("state", _one_of(State), nullable=False),
    Column("attempts", _WHOLE, nullable=False),
    Column("token", _WHOLE, nullable=False),  # fences: whoever doesn't have it writes nothing
    Column("holder", TEXT),  # the worker that has leased it
    Column("lease_boot", TEXT),  # of which start of the machine `lease_until` counts
    Column("lease_until", _BIG),  # nanoseconds
    Column("cancelling", Boolean, nullable=False),
    Column("created", _TIME, nullable=False),
    Column("started", _TIME),
    Column("ended", _TIME),
    Column("fraction", _REAL),
    Column("text", TEXT, nullable=False),
    Column("problem", _PROBLEM),
    Column("requested_by", TEXT, nullable=False),
    Column("last_event", _WHOLE, nullable=False),
    Index("jobs_state", "state", "id"),
    Index("jobs_cache_key", "cache_key"),
    sqlite_autoincrement=True,
)

SUBJECTS = Table(
    "subjects",
    METADATA,
    Column("job", _WHOLE, ForeignKey("jobs.id"), primary_key=True),
    Column("position", Integer, primary_key=True),
    Column("checkpoint", _WHOLE, ForeignKey("checkpoints.id"), nullable=False),
    Index("subjects_checkpoint", "checkpoint"),
)

EVENTS = Table(
    "events",
    METADATA,
    Column("job", _WHOLE, ForeignKey("jobs.id"), primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("kind", _one_of(EventKind), nullable=False),
    Column("data", _OPTIONS, nullable=False),
    Column("time", _TIME, nullable=False),
)

RESULTS = Table(
    "results",
    METADATA,
    Column("job", Integer, ForeignKey("jobs.id"), primary_key=True),
    Column("data", JSON, nullable=False),
)
