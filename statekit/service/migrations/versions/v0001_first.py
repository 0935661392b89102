"""The first version: roots, runs, checkpoints and tags; jobs with their subjects, events and results."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision: str | None = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Makes all tables."""
    op.create_table(
        "jobs",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("options", sa.JSON(), nullable=False),
        sa.Column("cache_key", sa.String(length=64), nullable=False),
        sa.Column("idempotency_key", sa.Text(), nullable=True),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("token", sa.Integer(), nullable=False),
        sa.Column("holder", sa.Text(), nullable=True),
        sa.Column("lease_boot", sa.Text(), nullable=True),
        sa.Column("lease_until", sa.BigInteger(), nullable=True),
        sa.Column("cancelling", sa.Boolean(), nullable=False),
        sa.Column("created", sa.Float(), nullable=False),
        sa.Column("started", sa.Float(), nullable=True),
        sa.Column("ended", sa.Float(), nullable=True),
        sa.Column("fraction", sa.Float(), nullable=True),
        sa.Column("text", sa.Text(), nullable=False),
        sa.Column("problem", sa.JSON(), nullable=True),
        sa.Column("requested_by", sa.Text(), nullable=False),
        sa.Column("last_event", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("idempotency_key"),
        sqlite_autoincrement=True,
    )
    op.create_index("jobs_cache_key", "jobs", ["cache_key"], unique=False)
    op.create_index("jobs_state", "jobs", ["state", "id"], unique=False)
    op.create_table(
        "roots",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("place", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("place"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "events",
        sa.Column("job", sa.Integer(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("data", sa.JSON(), nullable=False),
        sa.Column("time", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(
            ["job"],
            ["jobs.id"],
        ),
        sa.PrimaryKeyConstraint("job", "number"),
    )
    op.create_table(
        "results",
        sa.Column("job", sa.Integer(), nullable=False),
        sa.Column("data", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(
            ["job"],
            ["jobs.id"],
        ),
        sa.PrimaryKeyConstraint("job"),
    )
    op.create_table(
        "runs",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("root", sa.Integer(), nullable=False),
        sa.Column("place", sa.LargeBinary(), nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["root"],
            ["roots.id"],
        ),
        sa.PrimaryKeyConstraint("id"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "checkpoints",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("root", sa.Integer(), nullable=False),
        sa.Column("place", sa.LargeBinary(), nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("run", sa.Integer(), nullable=True),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("modified", sa.Float(), nullable=False),
        sa.Column("print", sa.String(length=64), nullable=False),
        sa.Column("proof", sa.String(length=64), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=True),
        sa.Column("container", sa.String(length=64), nullable=True),
        sa.Column("layout", sa.String(length=64), nullable=True),
        sa.Column("optimizer", sa.String(length=128), nullable=True),
        sa.Column("tensors", sa.Integer(), nullable=True),
        sa.Column("parameters", sa.Integer(), nullable=True),
        sa.Column("elements", sa.BigInteger(), nullable=True),
        sa.Column("resumable", sa.Boolean(), nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=True),
        sa.Column("made", sa.JSON(), nullable=True),
        sa.Column("source_digest", sa.String(length=64), nullable=True),
        sa.Column("seal", sa.String(length=16), nullable=False),
        sa.Column("checked", sa.Float(), nullable=True),
        sa.Column("verdict", sa.String(length=16), nullable=True),
        sa.Column("unreadable", sa.Text(), nullable=True),
        sa.Column("status", sa.String(length=16), nullable=False),
        sa.Column("replaced_by", sa.Integer(), nullable=True),
        sa.Column("note", sa.Text(), server_default="", nullable=False),
        sa.Column("first_seen", sa.Float(), nullable=False),
        sa.Column("seen", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(
            ["replaced_by"],
            ["checkpoints.id"],
        ),
        sa.ForeignKeyConstraint(
            ["root"],
            ["roots.id"],
        ),
        sa.ForeignKeyConstraint(
            ["run"],
            ["runs.id"],
        ),
        sa.PrimaryKeyConstraint("id"),
        sqlite_autoincrement=True,
    )
    op.create_index("checkpoints_digest", "checkpoints", ["digest"], unique=False)
    op.create_index("checkpoints_modified", "checkpoints", ["status", "modified"], unique=False)
    op.create_index("checkpoints_place", "checkpoints", ["root", "place"], unique=False)
    op.create_index("checkpoints_run", "checkpoints", ["run"], unique=False)
    op.create_index("checkpoints_source_digest", "checkpoints", ["source_digest"], unique=False)
    op.create_table(
        "subjects",
        sa.Column("job", sa.Integer(), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("checkpoint", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(
            ["checkpoint"],
            ["checkpoints.id"],
        ),
        sa.ForeignKeyConstraint(
            ["job"],
            ["jobs.id"],
        ),
        sa.PrimaryKeyConstraint("job", "position"),
    )
    op.create_index("subjects_checkpoint", "subjects", ["checkpoint"], unique=False)
    op.create_table(
        "tags",
        sa.Column("checkpoint", sa.Integer(), nullable=False),
        sa.Column("tag", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["checkpoint"],
            ["checkpoints.id"],
        ),
        sa.PrimaryKeyConstraint("checkpoint", "tag"),
    )
    op.create_index("tags_tag", "tags", ["tag"], unique=False)


def downgrade() -> None:
    """Removes them."""
    op.drop_index("tags_tag", table_name="tags")
    op.drop_table("tags")
    op.drop_index("subjects_checkpoint", table_name="subjects")
    op.drop_table("subjects")
    op.drop_index("checkpoints_source_digest", table_name="checkpoints")
    op.drop_index("checkpoints_run", table_name="checkpoints")
    op.drop_index("checkpoints_place", table_name="checkpoints")
    op.drop_index("checkpoints_modified", table_name="checkpoints")
    op.drop_index("checkpoints_digest", table_name="checkpoints")
    op.drop_table("checkpoints")
    op.drop_table("runs")
    op.drop_table("results")
    op.drop_table("events")
    op.drop_table("roots")
    op.drop_index("jobs_state", table_name="jobs")
    op.drop_index("jobs_cache_key", table_name="jobs")
    op.drop_table("jobs")
