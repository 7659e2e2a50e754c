"""Leases: who runs a search, and what is asked of it."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "moevolve_v2"
down_revision = "moevolve_v1"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Makes the table, and a row for every search that there is."""
    op.create_table(
        "leases",
        sa.Column("search_id", sa.String(), nullable=False),
        sa.Column("owner", sa.String(), nullable=True),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("wanted", sa.String(), nullable=False),
        sa.Column("workers", sa.Integer(), nullable=True),
        sa.ForeignKeyConstraint(["search_id"], ["searches.id"], name="fk_leases_search_id"),
        sa.PrimaryKeyConstraint("search_id", name="pk_leases"),
    )
    op.execute("INSERT INTO leases (search_id, epoch, wanted) SELECT id, 0, 'running' FROM searches")


def downgrade() -> None:
    """Drops the table."""
    op.drop_table("leases")
