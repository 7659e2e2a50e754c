"""Calibrations: what genomes of dense models start from."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "moevolve_0002"
down_revision = "moevolve_0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "calibrations",
        sa.Column("fingerprint", sa.String(), nullable=False),
        sa.Column("content", sa.LargeBinary(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("fingerprint", name="pk_calibrations"),
    )


def downgrade() -> None:
    op.drop_table("calibrations")
