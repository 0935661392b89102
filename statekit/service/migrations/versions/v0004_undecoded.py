"""Why no state is made of a checkpoint."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Adds the column; the next scan of a checkpoint fills it."""
    op.add_column("checkpoints", sa.Column("undecoded", sa.Text(), nullable=True))


def downgrade() -> None:
    """Removes it."""
    op.drop_column("checkpoints", "undecoded")
