"""A number that grows with every change of the catalogue, whoever makes it: what was read under it is still so."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

TABLES = ("checkpoints", "runs", "tags")


def upgrade() -> None:
    """Makes the number, and what counts it."""
    op.create_table(
        "changes",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.execute("INSERT INTO changes VALUES (1, 0)")
    for table in TABLES:
        for event in ("INSERT", "UPDATE", "DELETE"):
            op.execute(
                f"CREATE TRIGGER {table}_{event.lower()} AFTER {event} ON {table} "
                "BEGIN UPDATE changes SET number = number + 1; END"
            )


def downgrade() -> None:
    """Removes them."""
    for table in TABLES:
        for event in ("insert", "update", "delete"):
            op.execute(f"DROP TRIGGER {table}_{event}")
    op.drop_table("changes")
