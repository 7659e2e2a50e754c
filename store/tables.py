"""The tables. The migrations under `migrations/` build the same ones; a test compares them.

Individuals have the natural key (search, index), so that parents are written without looking up surrogate ids.
An evaluation belongs to a phenotype in a context (model, engine, task split), and all individuals with that phenotype
share it.
"""

from __future__ import annotations

from datetime import UTC, datetime

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    DateTime,
    Dialect,
    Double,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Text,
    UniqueConstraint,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.types import TypeDecorator


class UtcDateTime(TypeDecorator[datetime]):
    """An aware UTC datetime on every backend; SQLite stores no time zone."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        return None if value is None else value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class FreeText(TypeDecorator[str]):
    """Text from unknown sources such as exceptions; NUL and lone surrogates, which databases refuse, are replaced."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        return None if value is None else value.replace("\0", "\ufffd").encode(errors="replace").decode()


class Words(TypeDecorator[tuple[str, ...]]):
    """Words without white space, in order."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: tuple[str, ...] | None, dialect: Dialect) -> str | None:
        return None if value is None else " ".join(value)

    def process_result_value(self, value: str | None, dialect: Dialect) -> tuple[str, ...]:
        return tuple((value or "").split())


# SQLite numbers rows by itself only for a column of type INTEGER.
RowId = BigInteger().with_variant(Integer(), "sqlite")


class Base(DeclarativeBase):
    """Base class of the tables, with the naming convention of their constraints."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s",
            "pk": "pk_%(table_name)s",
        }
    )


class Search(Base):
    """A search."""

    __tablename__ = "searches"
    id: Mapped[str] = mapped_column(String, primary_key=True)
    name: Mapped[str] = mapped_column(String, unique=True)
    config: Mapped[str] = mapped_column(Text)
    config_hash: Mapped[str] = mapped_column(String)
    model_fingerprint: Mapped[str] = mapped_column(String)
    model_path: Mapped[str] = mapped_column(String)
    engine_fingerprint: Mapped[str] = mapped_column(String)
    seed: Mapped[int] = mapped_column(BigInteger)
    genome_kind: Mapped[str] = mapped_column(String)
    software_version: Mapped[str] = mapped_column(String)
    model_facts: Mapped[str | None] = mapped_column(Text)
    status: Mapped[str] = mapped_column(String)
    status_reason: Mapped[str | None] = mapped_column(FreeText)
    winner: Mapped[int | None] = mapped_column(BigInteger)
    tags: Mapped[tuple[str, ...]] = mapped_column(Words)
    note: Mapped[str] = mapped_column(FreeText)
    archived: Mapped[bool] = mapped_column(Boolean)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    updated_at: Mapped[datetime] = mapped_column(UtcDateTime)


class SearchTask(Base):
    """A task split of a search."""

    __tablename__ = "search_tasks"
    __table_args__ = (UniqueConstraint("search_id", "task", "split"),)
    search_id: Mapped[str] = mapped_column(ForeignKey("searches.id"), primary_key=True)
    position: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    task: Mapped[str] = mapped_column(String)
    split: Mapped[str] = mapped_column(String)
    task_fingerprint: Mapped[str] = mapped_column(String)
    weight: Mapped[float] = mapped_column(Double)


class SearchLease(Base):
    """A search's lease: its driver, the driver's state, and what users ask of it.

    `events` is the number of the search's events. Appending one locks this row, so they are numbered as they commit.
    """

    __tablename__ = "leases"
    search_id: Mapped[str] = mapped_column(ForeignKey("searches.id"), primary_key=True)
    owner: Mapped[str | None] = mapped_column(String)
    epoch: Mapped[int] = mapped_column(BigInteger)
    expires_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    desired_state: Mapped[str] = mapped_column(String)
    workers: Mapped[int | None] = mapped_column(Integer)
    priority: Mapped[int] = mapped_column(Integer)
    stage: Mapped[str | None] = mapped_column(FreeText)
    progress: Mapped[str | None] = mapped_column(Text)
    claim: Mapped[str | None] = mapped_column(Text)
    events: Mapped[int] = mapped_column(BigInteger)


class SearchEvent(Base):
    """An event of a search. Rows are only added, with `seq` = 1, 2, ... for each search."""

    __tablename__ = "events"
    __table_args__ = (Index(None, "kind", "at"),)
    search_id: Mapped[str] = mapped_column(ForeignKey("searches.id"), primary_key=True)
    seq: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    kind: Mapped[str] = mapped_column(String)
    text: Mapped[str] = mapped_column(FreeText)
    idx: Mapped[int | None] = mapped_column(BigInteger)
    at: Mapped[datetime] = mapped_column(UtcDateTime, index=True)


class Individual(Base):
    """A genome in its search, with its 0-based index `idx`."""

    __tablename__ = "individuals"
    __table_args__ = (
        CheckConstraint(
            "(status = 'pending' AND fitness IS NULL AND tie_break IS NULL AND failure IS NULL)"
            " OR (status = 'ok' AND fitness IS NOT NULL AND tie_break IS NOT NULL AND failure IS NULL)"
            " OR (status = 'failed' AND fitness IS NULL AND tie_break IS NULL AND failure IS NOT NULL"
            " AND failure_kind IS NOT NULL)",
            name="ok_or_failed",
        ),
    )
    search_id: Mapped[str] = mapped_column(ForeignKey("searches.id"), primary_key=True)
    idx: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    phase: Mapped[str] = mapped_column(String)
    operator: Mapped[str] = mapped_column(Text)
    genome: Mapped[bytes] = mapped_column(LargeBinary)
    content_hash: Mapped[str] = mapped_column(String)
    phenotype_hash: Mapped[str] = mapped_column(String)
    experts: Mapped[int] = mapped_column(Integer)
    active: Mapped[int] = mapped_column(Integer)
    parameters: Mapped[int] = mapped_column(BigInteger)
    active_parameters: Mapped[int] = mapped_column(BigInteger)
    parameters_full: Mapped[int] = mapped_column(BigInteger)
    summary: Mapped[str] = mapped_column(Text)
    depth: Mapped[int] = mapped_column(Integer)
    status: Mapped[str] = mapped_column(String)
    fitness: Mapped[float | None] = mapped_column(Double)
    tie_break: Mapped[float | None] = mapped_column(Double)
    failure: Mapped[str | None] = mapped_column(FreeText)
    failure_kind: Mapped[str | None] = mapped_column(String)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)


# For the best of a search, in the order of ranks, and for counts per status.
Index(
    "ix_individuals_rank",
    Individual.search_id,
    Individual.status,
    Individual.fitness.desc(),
    Individual.tie_break.desc(),
    Individual.idx,
)
# For the individuals with a phenotype, earliest first.
Index("ix_individuals_phenotype", Individual.phenotype_hash, Individual.search_id, Individual.status, Individual.idx)


class Parent(Base):
    """An edge of the lineage."""

    __tablename__ = "parents"
    __table_args__ = (
        CheckConstraint("parent_idx < child_idx", name="earlier"),
        ForeignKeyConstraint(["search_id", "child_idx"], ["individuals.search_id", "individuals.idx"]),
        ForeignKeyConstraint(["search_id", "parent_idx"], ["individuals.search_id", "individuals.idx"]),
        Index("ix_parents_descendants", "search_id", "parent_idx", "child_idx"),
    )
    search_id: Mapped[str] = mapped_column(String, primary_key=True)
    child_idx: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    position: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    parent_idx: Mapped[int] = mapped_column(BigInteger)


class Context(Base):
    """All that an evaluation depends on besides the phenotype, in a table of its own to keep evaluations small."""

    __tablename__ = "evaluation_contexts"
    __table_args__ = (
        UniqueConstraint(
            "model_fingerprint", "engine_fingerprint", "task_fingerprint", name="uq_evaluation_contexts_key"
        ),
        Index(None, "task", "split"),
    )
    id: Mapped[int] = mapped_column(RowId, primary_key=True)
    model_fingerprint: Mapped[str] = mapped_column(String)
    engine_fingerprint: Mapped[str] = mapped_column(String)
    task_fingerprint: Mapped[str] = mapped_column(String)
    task: Mapped[str] = mapped_column(String)
    split: Mapped[str] = mapped_column(String)
    metric: Mapped[str] = mapped_column(String)


class Evaluation(Base):
    """The evaluation of one phenotype in one context, either scored or failed."""

    __tablename__ = "evaluations"
    __table_args__ = (
        CheckConstraint(
            "(failure IS NULL AND score IS NOT NULL AND gold_logprob IS NOT NULL)"
            " OR (failure IS NOT NULL AND score IS NULL AND gold_logprob IS NULL)",
            name="scored_or_failed",
        ),
        # Read backwards, best first. The hash makes the order total; `active` allows filtering without reading the row.
        Index("ix_evaluations_rank", "context_id", "score", "gold_logprob", "phenotype_hash", "active"),
        Index("ix_evaluations_experts", "context_id", "experts", "score", "gold_logprob", "phenotype_hash", "active"),
        Index(
            "ix_evaluations_active_parameters",
            *("context_id", "active_parameters", "score", "gold_logprob", "phenotype_hash"),
        ),
        Index("ix_evaluations_parameters", "context_id", "parameters", "score", "gold_logprob", "phenotype_hash"),
        # All that costs are summed from, so that rows with their long outcomes aren't read for it.
        Index(
            "ix_evaluations_costs", "context_id", "phenotype_hash", "score", "examples_seen", "seconds", "created_at"
        ),
    )
    context_id: Mapped[int] = mapped_column(
        BigInteger, ForeignKey("evaluation_contexts.id"), primary_key=True, autoincrement=False
    )
    phenotype_hash: Mapped[str] = mapped_column(String, primary_key=True)
    score: Mapped[float | None] = mapped_column(Double)
    gold_logprob: Mapped[float | None] = mapped_column(Double)
    outcomes: Mapped[bytes | None] = mapped_column(LargeBinary)
    examples_seen: Mapped[int] = mapped_column(Integer)
    failure: Mapped[str | None] = mapped_column(FreeText)
    seconds: Mapped[float] = mapped_column(Double)
    worker: Mapped[str] = mapped_column(String)
    attempt: Mapped[int] = mapped_column(Integer)
    experts: Mapped[int | None] = mapped_column(Integer)
    active: Mapped[int | None] = mapped_column(Integer)
    parameters: Mapped[int | None] = mapped_column(BigInteger)
    active_parameters: Mapped[int | None] = mapped_column(BigInteger)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)


class Export(Base):
    """An exported checkpoint of an individual."""

    __tablename__ = "exports"
    __table_args__ = (
        ForeignKeyConstraint(["search_id", "idx"], ["individuals.search_id", "individuals.idx"]),
        UniqueConstraint("search_id", "idx", "path"),
    )
    id: Mapped[int] = mapped_column(RowId, primary_key=True)
    search_id: Mapped[str] = mapped_column(String)
    idx: Mapped[int] = mapped_column(BigInteger)
    path: Mapped[str] = mapped_column(String)
    form: Mapped[str] = mapped_column(String)
    checks: Mapped[str] = mapped_column(Text)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)


class CalibrationContent(Base):
    """Calibration statistics that a genome kind starts from, measured once per model and data."""

    __tablename__ = "calibrations"
    fingerprint: Mapped[str] = mapped_column(String, primary_key=True)
    content: Mapped[bytes] = mapped_column(LargeBinary)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)


# The tables for SQLAlchemy Core, which the store uses; the classes above are their typed declaration.
searches = Base.metadata.tables["searches"]
search_tasks = Base.metadata.tables["search_tasks"]
leases = Base.metadata.tables["leases"]
events = Base.metadata.tables["events"]
individuals = Base.metadata.tables["individuals"]
parents = Base.metadata.tables["parents"]
contexts = Base.metadata.tables["evaluation_contexts"]
evaluations = Base.metadata.tables["evaluations"]
exports = Base.metadata.tables["exports"]
calibrations = Base.metadata.tables["calibrations"]
