"""The tables of the service's database. What changes here needs a revision in migrations/versions."""

from __future__ import annotations

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
)

METADATA = MetaData()

ROOTS = Table(
    "roots",
    METADATA,
    Column("id", Integer, primary_key=True),
    Column("place", LargeBinary, nullable=False, unique=True),  # a path's bytes: not all of them are UTF-8
    sqlite_autoincrement=True,
)

RUNS = Table(
    "runs",
    METADATA,
    Column("id", Integer, primary_key=True),
    Column("root", Integer, ForeignKey("roots.id"), nullable=False),
    Column("place", LargeBinary, nullable=False),
    Column("path", Text, nullable=False),
    Column("name", Text, nullable=False),
    sqlite_autoincrement=True,
)

CHECKPOINTS = Table(
    "checkpoints",
    METADATA,
    Column("id", Integer, primary_key=True),
    Column("root", Integer, ForeignKey("roots.id"), nullable=False),
    Column("place", LargeBinary, nullable=False),
    Column("path", Text, nullable=False),
    Column("name", Text, nullable=False),
    Column("run", Integer, ForeignKey("runs.id")),
    Column("size", BigInteger, nullable=False),
    Column("modified", Float, nullable=False),  # seconds since 1970 in UTC, as all times are
    Column("print", String(64), nullable=False),  # of names, sizes and times of its files
    Column("proof", String(64), nullable=False),  # the same of the manifests among and beside them
    Column("step", BigInteger),
    Column("container", String(64)),
    Column("layout", String(64)),
    Column("optimizer", String(128)),
    Column("tensors", Integer),
    Column("parameters", Integer),
    Column("elements", BigInteger),
    Column("resumable", Boolean, nullable=False),
    Column("digest", String(64)),
    Column("made", JSON),  # what its manifest says of the conversion that made it
    Column("source_digest", String(64)),
    Column("seal", String(16), nullable=False),
    Column("checked", Float),
    Column("verdict", String(16)),
    Column("unreadable", Text),
    Column("undecoded", Text),
    Column("status", String(16), nullable=False),
    Column("replaced_by", Integer, ForeignKey("checkpoints.id")),
    Column("note", Text, nullable=False, server_default=""),
    Column("note_by", Text, nullable=False, server_default=""),
    Column("first_seen", Float, nullable=False),
    Column("seen", Float, nullable=False),
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
    Column("checkpoint", Integer, ForeignKey("checkpoints.id"), primary_key=True),
    Column("tag", Text, primary_key=True),
    Index("tags_tag", "tag"),
)

CHANGES = Table(
    "changes",
    METADATA,
    Column("id", Integer, primary_key=True),
    Column("number", Integer, nullable=False),  # triggers count it: checkpoints, runs and tags were changed
)

JOBS = Table(
    "jobs",
    METADATA,
    Column("id", Integer, primary_key=True),
    Column("kind", String(16), nullable=False),
    Column("options", JSON, nullable=False),
    Column("cache_key", String(64), nullable=False),  # of kind, contents, options and tool: equal work
    Column("idempotency_key", Text, unique=True),
    Column("state", String(16), nullable=False),
    Column("attempts", Integer, nullable=False),
    Column("token", Integer, nullable=False),  # fences: whoever doesn't have it writes nothing
    Column("holder", Text),  # the worker that has leased it
    Column("lease_boot", Text),  # of which start of the machine `lease_until` counts
    Column("lease_until", BigInteger),  # nanoseconds
    Column("cancelling", Boolean, nullable=False),
    Column("created", Float, nullable=False),
    Column("started", Float),
    Column("ended", Float),
    Column("fraction", Float),
    Column("text", Text, nullable=False),
    Column("problem", JSON),
    Column("requested_by", Text, nullable=False),
    Column("last_event", Integer, nullable=False),
    Index("jobs_state", "state", "id"),
    Index("jobs_cache_key", "cache_key"),
    sqlite_autoincrement=True,
)

SUBJECTS = Table(
    "subjects",
    METADATA,
    Column("job", Integer, ForeignKey("jobs.id"), primary_key=True),
    Column("position", Integer, primary_key=True),
    Column("checkpoint", Integer, ForeignKey("checkpoints.id"), nullable=False),
    Index("subjects_checkpoint", "checkpoint"),
)

EVENTS = Table(
    "events",
    METADATA,
    Column("job", Integer, ForeignKey("jobs.id"), primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("kind", String(16), nullable=False),
    Column("data", JSON, nullable=False),
    Column("time", Float, nullable=False),
)

RESULTS = Table(
    "results",
    METADATA,
    Column("job", Integer, ForeignKey("jobs.id"), primary_key=True),
    Column("data", JSON, nullable=False),
)
