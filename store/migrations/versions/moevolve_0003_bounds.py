"""Bounds: what is known of individuals that were stopped before all their examples ran."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "moevolve_0003"
down_revision = "moevolve_0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "bounds",
        sa.Column("context_id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("phenotype_hash", sa.String(), nullable=False),
        sa.Column("bound", sa.Double(), nullable=False),
        sa.Column("outcomes", sa.LargeBinary(), nullable=False),
        sa.Column("examples_seen", sa.Integer(), nullable=False),
        sa.Column("seconds", sa.Double(), nullable=False),
        sa.Column("worker", sa.String(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["context_id"], ["evaluation_contexts.id"], name="fk_bounds_context_id"),
        sa.PrimaryKeyConstraint("context_id", "phenotype_hash", name="pk_bounds"),
    )
    op.add_column("individuals", sa.Column("bound", sa.Double(), nullable=True))


def downgrade() -> None:
    op.drop_column("individuals", "bound")
    op.drop_table("bounds")
