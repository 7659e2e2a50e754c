"""Alembic environment of the store."""
