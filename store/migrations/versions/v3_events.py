"""Events: what happened to searches, and who was told; leases say how many, a search's standing, priority and claim."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "moevolve_v3"
down_revision = "moevolve_v2"
branch_labels = None
depends_on = None

_ADDED = ("priority", "stage", "progress", "claim", "events")


def upgrade() -> None:
    """Makes the table and the columns."""
    op.create_table(
        "events",
        sa.Column("search_id", sa.String(), nullable=False),
        sa.Column("seq", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.Column("idx", sa.BigInteger(), nullable=True),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["search_id"], ["searches.id"], name="fk_events_search_id"),
        sa.PrimaryKeyConstraint("search_id", "seq", name="pk_events"),
    )
    op.create_index("ix_events_at", "events", ["at"])
    op.create_table(
        "deliveries",
        sa.Column("search_id", sa.String(), nullable=False),
        sa.Column("seq", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("target", sa.String(), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("next_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("outcome", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(
            ["search_id", "seq"], ["events.search_id", "events.seq"], name="fk_deliveries_search_id_seq"
        ),
        sa.PrimaryKeyConstraint("search_id", "seq", "target", name="pk_deliveries"),
    )
    with op.batch_alter_table("leases") as leases:
        leases.add_column(sa.Column("priority", sa.Integer(), nullable=False, server_default="0"))
        leases.add_column(sa.Column("stage", sa.Text(), nullable=True))
        leases.add_column(sa.Column("progress", sa.Text(), nullable=True))
        leases.add_column(sa.Column("claim", sa.Text(), nullable=True))
        leases.add_column(sa.Column("events", sa.BigInteger(), nullable=False, server_default="0"))
    with op.batch_alter_table("leases") as leases:
        leases.alter_column("priority", server_default=None)
        leases.alter_column("events", server_default=None)


def downgrade() -> None:
    """Drops both."""
    with op.batch_alter_table("leases") as leases:
        for name in _ADDED:
            leases.drop_column(name)
    op.drop_table("deliveries")
    op.drop_table("events")
