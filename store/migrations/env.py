"""Run by Alembic. The connection, already inside a transaction, comes from `moevolve.store.schema`."""

from __future__ import annotations

from alembic import context

from moevolve.store.tables import Base

connection = context.config.attributes["connection"]
# Batch mode: SQLite can't alter most things in place, so later migrations rebuild the table there.
context.configure(connection=connection, target_metadata=Base.metadata, render_as_batch=True, transactional_ddl=True)
with context.begin_transaction():
    context.run_migrations()
