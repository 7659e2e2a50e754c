"""The initial schema."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "moevolve_v1"
down_revision = None
branch_labels = None
depends_on = None

ROW_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Creates all tables."""
    _create_searches()
    _create_search_tasks()
    _create_leases()
    _create_events()
    _create_individuals()
    _create_parents()
    _create_evaluation_contexts()
    _create_evaluations()
    _create_exports()
    _create_calibrations()


def downgrade() -> None:
    """Drops all tables."""
    for table in (
        "calibrations",
        "exports",
        "evaluations",
        "evaluation_contexts",
        "parents",
        "individuals",
        "events",
        "leases",
        "search_tasks",
        "searches",
    ):
        op.drop_table(table)


def _create_searches() -> None:
    op.create_table(
        "searches",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("config", sa.Text(), nullable=False),
        sa.Column("config_hash", sa.String(), nullable=False),
        sa.Column("model_fingerprint", sa.String(), nullable=False),
        sa.Column("model_path", sa.String(), nullable=False),
        sa.Column("engine_fingerprint", sa.String(), nullable=False),
        sa.Column("seed", sa.BigInteger(), nullable=False),
        sa.Column("genome_kind", sa.String(), nullable=False),
        sa.Column("software_version", sa.String(), nullable=False),
        sa.Column("model_facts", sa.Text(), nullable=True),
        sa.Column("status", sa.String(), nullable=False),
        sa.Column("status_reason", sa.Text(), nullable=True),
        sa.Column("winner", sa.BigInteger(), nullable=True),
        sa.Column("tags", sa.Text(), nullable=False),
        sa.Column("note", sa.Text(), nullable=False),
        sa.Column("archived", sa.Boolean(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("updated_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_searches"),
        sa.UniqueConstraint("name", name="uq_searches_name"),
    )


def _create_search_tasks() -> None:
    op.create_table(
        "search_tasks",
        sa.Column("search_id", sa.String(), nullable=False),
        sa.Column("position", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("task", sa.String(), nullable=False),
        sa.Column("split", sa.String(), nullable=False),
        sa.Column("task_fingerprint", sa.String(), nullable=False),
        sa.Column("weight", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("search_id", "position", name="pk_search_tasks"),
        sa.UniqueConstraint("search_id", "task", "split", name="uq_search_tasks_search_id_task_split"),
        sa.ForeignKeyConstraint(["search_id"], ["searches.id"], name="fk_search_tasks_search_id"),
    )


def _create_leases() -> None:
    op.create_table(
        "leases",
        sa.Column("search_id", sa.String(), nullable=False),
        sa.Column("owner", sa.String(), nullable=True),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("desired_state", sa.String(), nullable=False),
        sa.Column("workers", sa.Integer(), nullable=True),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("stage", sa.Text(), nullable=True),
        sa.Column("progress", sa.Text(), nullable=True),
        sa.Column("claim", sa.Text(), nullable=True),
        sa.Column("events", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["search_id"], ["searches.id"], name="fk_leases_search_id"),
        sa.PrimaryKeyConstraint("search_id", name="pk_leases"),
    )


def _create_events() -> None:
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
    op.create_index("ix_events_kind_at", "events", ["kind", "at"])


def _create_individuals() -> None:
    op.create_table(
        "individuals",
        sa.Column("search_id", sa.String(), nullable=False),
        sa.Column("idx", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("phase", sa.String(), nullable=False),
        sa.Column("operator", sa.Text(), nullable=False),
        sa.Column("genome", sa.LargeBinary(), nullable=False),
        sa.Column("content_hash", sa.String(), nullable=False),
        sa.Column("phenotype_hash", sa.String(), nullable=False),
        sa.Column("experts", sa.Integer(), nullable=False),
        sa.Column("active", sa.Integer(), nullable=False),
        sa.Column("parameters", sa.BigInteger(), nullable=False),
        sa.Column("active_parameters", sa.BigInteger(), nullable=False),
        sa.Column("parameters_full", sa.BigInteger(), nullable=False),
        sa.Column("summary", sa.Text(), nullable=False),
        sa.Column("depth", sa.Integer(), nullable=False),
        sa.Column("status", sa.String(), nullable=False),
        sa.Column("fitness", sa.Double(), nullable=True),
        sa.Column("tie_break", sa.Double(), nullable=True),
        sa.Column("failure", sa.Text(), nullable=True),
        sa.Column("failure_kind", sa.String(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["search_id"], ["searches.id"], name="fk_individuals_search_id"),
        sa.PrimaryKeyConstraint("search_id", "idx", name="pk_individuals"),
    )
    op.create_index("ix_individuals_phenotype", "individuals", ["phenotype_hash", "search_id", "status", "idx"])
    op.create_index(
        "ix_individuals_rank",
        "individuals",
        ["search_id", "status", sa.text("fitness DESC"), sa.text("tie_break DESC"), "idx"],
    )


def _create_parents() -> None:
    op.create_table(
        "parents",
        sa.Column("search_id", sa.String(), nullable=False),
        sa.Column("child_idx", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("position", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("parent_idx", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["search_id", "child_idx"],
            ["individuals.search_id", "individuals.idx"],
            name="fk_parents_search_id_child_idx",
        ),
        sa.ForeignKeyConstraint(
            ["search_id", "parent_idx"],
            ["individuals.search_id", "individuals.idx"],
            name="fk_parents_search_id_parent_idx",
        ),
        sa.PrimaryKeyConstraint("search_id", "child_idx", "position", name="pk_parents"),
    )
    op.create_index("ix_parents_descendants", "parents", ["search_id", "parent_idx", "child_idx"])


def _create_evaluation_contexts() -> None:
    op.create_table(
        "evaluation_contexts",
        sa.Column("id", ROW_ID, nullable=False),
        sa.Column("model_fingerprint", sa.String(), nullable=False),
        sa.Column("engine_fingerprint", sa.String(), nullable=False),
        sa.Column("task_fingerprint", sa.String(), nullable=False),
        sa.Column("task", sa.String(), nullable=False),
        sa.Column("split", sa.String(), nullable=False),
        sa.Column("metric", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_evaluation_contexts"),
        sa.UniqueConstraint(
            "model_fingerprint", "engine_fingerprint", "task_fingerprint", name="uq_evaluation_contexts_key"
        ),
    )
    op.create_index("ix_evaluation_contexts_task_split", "evaluation_contexts", ["task", "split"])


def _create_evaluations() -> None:
    op.create_table(
        "evaluations",
        sa.Column("context_id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("phenotype_hash", sa.String(), nullable=False),
        sa.Column("score", sa.Double(), nullable=True),
        sa.Column("gold_logprob", sa.Double(), nullable=True),
        sa.Column("outcomes", sa.LargeBinary(), nullable=True),
        sa.Column("examples_seen", sa.Integer(), nullable=False),
        sa.Column("failure", sa.Text(), nullable=True),
        sa.Column("seconds", sa.Double(), nullable=False),
        sa.Column("worker", sa.String(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("experts", sa.Integer(), nullable=True),
        sa.Column("active", sa.Integer(), nullable=True),
        sa.Column("parameters", sa.BigInteger(), nullable=True),
        sa.Column("active_parameters", sa.BigInteger(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.CheckConstraint(
            "(failure IS NULL AND score IS NOT NULL AND gold_logprob IS NOT NULL)"
            " OR (failure IS NOT NULL AND score IS NULL AND gold_logprob IS NULL)",
            name=op.f("ck_evaluations_scored_or_failed"),
        ),
        sa.ForeignKeyConstraint(["context_id"], ["evaluation_contexts.id"], name="fk_evaluations_context_id"),
        sa.PrimaryKeyConstraint("context_id", "phenotype_hash", name="pk_evaluations"),
    )
    op.create_index(
        "ix_evaluations_costs",
        "evaluations",
        ["context_id", "phenotype_hash", "score", "examples_seen", "seconds", "created_at"],
    )
    op.create_index(
        "ix_evaluations_active_parameters",
        "evaluations",
        ["context_id", "active_parameters", "score", "gold_logprob", "phenotype_hash"],
    )
    op.create_index(
        "ix_evaluations_experts",
        "evaluations",
        ["context_id", "experts", "score", "gold_logprob", "phenotype_hash", "active"],
    )
    op.create_index(
        "ix_evaluations_parameters",
        "evaluations",
        ["context_id", "parameters", "score", "gold_logprob", "phenotype_hash"],
    )
    op.create_index(
        "ix_evaluations_rank", "evaluations", ["context_id", "score", "gold_logprob", "phenotype_hash", "active"]
    )


def _create_exports() -> None:
    op.create_table(
        "exports",
        sa.Column("id", ROW_ID, nullable=False),
        sa.Column("search_id", sa.String(), nullable=False),
        sa.Column("idx", sa.BigInteger(), nullable=False),
        sa.Column("path", sa.String(), nullable=False),
        sa.Column("form", sa.String(), nullable=False),
        sa.Column("checks", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["search_id", "idx"], ["individuals.search_id", "individuals.idx"], name="fk_exports_search_id_idx"
        ),
        sa.PrimaryKeyConstraint("id", name="pk_exports"),
        sa.UniqueConstraint("search_id", "idx", "path", name="uq_exports_search_id_idx_path"),
    )


def _create_calibrations() -> None:
    op.create_table(
        "calibrations",
        sa.Column("fingerprint", sa.String(), nullable=False),
        sa.Column("content", sa.LargeBinary(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("fingerprint", name="pk_calibrations"),
    )
