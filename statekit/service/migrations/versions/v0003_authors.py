"""Who wrote a note."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Adds the column; of older notes nobody is known."""
    op.add_column("checkpoints", sa.Column("note_by", sa.Text(), nullable=False, server_default=""))


def downgrade() -> None:
    """Removes it."""
    op.drop_column("checkpoints", "note_by")
