"""What Alembic runs to take a database from one version to another: on the connection that it was given."""

from __future__ import annotations

from alembic import context

from statekit.service.tables import METADATA

context.configure(
    connection=context.config.attributes["connection"], target_metadata=METADATA, render_as_batch=True
)
context.run_migrations()
