"""Alembic's entry point; the connection, already in a transaction, comes from `moevolve.store.schema`."""

from __future__ import annotations

from alembic import context

from moevolve.store.tables import METADATA

connection = context.config.attributes["connection"]
# Batch mode lets later migrations rebuild a table on SQLite, which can alter little in place.
context.configure(connection=connection, target_metadata=METADATA, render_as_batch=True, transactional_ddl=True)
with context.begin_transaction():
    context.run_migrations()
