"""The initial schema."""

from __future__ import annotations

from alembic import op

from moevolve.store.tables import METADATA

revision = "moevolve_v1"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create all tables."""
    # No store with another schema was ever released. Whoever adds a second revision writes these tables out here first:
    # `alembic revision --autogenerate` prints the statements for an empty database.
    METADATA.create_all(op.get_bind(), checkfirst=False)
