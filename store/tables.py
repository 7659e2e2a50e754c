"""The tables. The migrations under `migrations/` build the same ones; a test compares them.

Individuals have the natural key (search, index), so that parents are written without looking up surrogate ids.
An evaluation belongs to a phenotype in a context (model, engine, task split), and all individuals with that phenotype
share it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, get_args

import numpy as np
from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
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
    Table,
    Text,
    UniqueConstraint,
)
from sqlalchemy.sql.operators import OperatorType
from sqlalchemy.types import TypeDecorator, to_instance

from moevolve.evaluators.errors import FailureKind
from moevolve.evaluators.types import SPLITS
from moevolve.store.errors import damaged
from moevolve.store.records import SEARCH_STATUSES, DesiredState, EventKind, IndividualStatus


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


class Outcomes(TypeDecorator[bytes]):
    """Little-endian float32 values, all finite."""

    impl = LargeBinary
    cache_ok = True

    def process_result_value(self, value: bytes | None, dialect: Dialect) -> bytes | None:
        if value is not None and not np.isfinite(np.frombuffer(value, "<f4")).all():
            raise ValueError("outcomes must be finite")
        return value


# Types of the values that database drivers return, where they aren't the one of the column.
_DRIVERS: Mapping[type, tuple[type, ...]] = {bool: (bool, int), datetime: (datetime, str)}


class Checked(TypeDecorator[Any]):
    """The values that a column may have. Any other, which SQLite lets any program write, is refused when it is read.

    Args:
        kind: Type of the column.
        name: Name of the column, for errors.
        nullable: Whether a row needn't have a value.
        words: What a text may be; anything if empty.
        lowest: What a number may be at least. It is finite, unless it is the lowest.
    """

    impl = String
    cache_ok = True

    def __init__(self, kind: Any, name: str, nullable: bool, words: tuple[str, ...], lowest: float) -> None:
        self.kind = self.impl = self.impl_instance = to_instance(kind)
        self.name, self.nullable, self.words, self.lowest = name, nullable, words, lowest

    def coerce_compared_value(self, op: OperatorType | None, value: object) -> Any:
        return self.impl_instance.coerce_compared_value(op, value)  # results of arithmetic are no values of the column

    def result_processor(self, dialect: Dialect, coltype: object) -> Callable[[Any], Any]:
        """Return the function that parses a value; it raises a DamagedError for one that the column can't have."""
        process = super().result_processor(dialect, coltype)
        python = getattr(self.impl_instance, "impl", self.impl_instance).python_type
        types, name, nullable = frozenset(_DRIVERS.get(python, (python,))), self.name, self.nullable
        words = frozenset((0, 1) if python is bool else self.words)
        is_number, lowest = python in (int, float), self.lowest

        def read(value: Any) -> Any:
            if value is None and nullable:
                return None
            fits = type(value) in types and (not words or value in words)
            if not fits or (is_number and not lowest <= value < math.inf):
                raise damaged(f"the {name} {value!r:.50}")
            try:
                return value if process is None else process(value)
            except (TypeError, ValueError) as error:
                raise damaged(f"the {name} {value!r:.50}") from error

        return read


# SQLite numbers rows by itself only for a column of type INTEGER.
RowId = BigInteger().with_variant(Integer(), "sqlite")


METADATA = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)


# Numbers are counts and sizes, except for these.
_ANY, _LOG_PROBABILITY = -sys.float_info.max, -math.inf


def _column(
    name: str,
    kind: Any,
    *reference: ForeignKey,
    nullable: bool = False,
    words: tuple[str, ...] = (),
    lowest: float = 0,
    **options: Any,
) -> Column[Any]:
    """Return a column that has a value in every row, unless it is `nullable`; see `Checked`."""
    checked = Checked(kind, name, nullable, words, lowest)
    return Column(name, checked, *reference, nullable=nullable, **options)


searches = Table(
    "searches",
    METADATA,
    _column("id", String, primary_key=True),
    _column("name", String, unique=True),
    _column("config", Text),
    _column("config_hash", String),
    _column("model_fingerprint", String),
    _column("model_path", String),
    _column("engine_fingerprint", String),
    _column("seed", BigInteger, lowest=_ANY),
    _column("genome_kind", String),
    _column("software_version", String),
    _column("model_facts", Text, nullable=True),
    _column("status", String, words=SEARCH_STATUSES),
    _column("status_reason", FreeText, nullable=True),
    _column("winner", BigInteger, nullable=True),
    _column("created_at", UtcDateTime),
    _column("updated_at", UtcDateTime),
)
search_tasks = Table(
    "search_tasks",
    METADATA,
    _column("search_id", String, ForeignKey("searches.id"), primary_key=True),
    _column("position", Integer, primary_key=True, autoincrement=False),
    _column("task", String),
    _column("split", String, words=SPLITS),
    _column("task_fingerprint", String),
    _column("weight", Double),
    UniqueConstraint("search_id", "task", "split"),
)
# A search's lease: its driver, the driver's state, and what users ask of it.
leases = Table(
    "leases",
    METADATA,
    _column("search_id", String, ForeignKey("searches.id"), primary_key=True),
    _column("owner", String, nullable=True),
    _column("epoch", BigInteger),
    _column("expires_at", UtcDateTime, nullable=True),
    _column("desired_state", String, words=get_args(DesiredState)),
    _column("workers", Integer, nullable=True),
    _column("stage", FreeText, nullable=True),
    _column("progress", Text, nullable=True),
    # The number of the search's events. Appending one locks this row, so they are numbered as they commit.
    _column("events", BigInteger),
)
# Rows are only added, with `seq` = 1, 2, ... for each search.
events = Table(
    "events",
    METADATA,
    _column("search_id", String, ForeignKey("searches.id"), primary_key=True),
    _column("seq", BigInteger, primary_key=True, autoincrement=False),
    _column("kind", String, words=get_args(EventKind)),
    _column("text", FreeText),
    _column("idx", BigInteger, nullable=True),
    _column("at", UtcDateTime, index=True),
    Index(None, "kind", "at"),
)
individuals = Table(
    "individuals",
    METADATA,
    _column("search_id", String, ForeignKey("searches.id"), primary_key=True),
    _column("idx", BigInteger, primary_key=True, autoincrement=False),
    _column("phase", String),
    _column("operator", Text),
    _column("genome", LargeBinary),
    _column("content_hash", String),
    _column("phenotype_hash", String),
    _column("experts", Integer),
    _column("active", Integer),
    _column("parameters", BigInteger),
    _column("active_parameters", BigInteger),
    _column("parameters_full", BigInteger, lowest=1),
    _column("active_parameters_full", BigInteger, lowest=1),
    _column("stock", Boolean),
    _column("summary", Text),
    _column("depth", Integer),
    _column("status", String, words=get_args(IndividualStatus)),
    _column("fitness", Double, nullable=True, lowest=_ANY),
    _column("tie_break", Double, nullable=True, lowest=_LOG_PROBABILITY),
    _column("failure", FreeText, nullable=True),
    _column("failure_kind", String, nullable=True, words=get_args(FailureKind)),
    _column("created_at", UtcDateTime),
    CheckConstraint(
        "(status = 'pending' AND fitness IS NULL AND tie_break IS NULL AND failure IS NULL)"
        " OR (status = 'ok' AND fitness IS NOT NULL AND tie_break IS NOT NULL AND failure IS NULL)"
        " OR (status = 'failed' AND fitness IS NULL AND tie_break IS NULL AND failure IS NOT NULL"
        " AND failure_kind IS NOT NULL)",
        name="ok_or_failed",
    ),
    # Lists the individuals with a phenotype, earliest first.
    Index("ix_individuals_phenotype", "phenotype_hash", "search_id", "status", "idx"),
)
# Finds the best of a search, in the order of ranks, and counts per status.
Index(
    "ix_individuals_rank",
    individuals.c.search_id,
    individuals.c.status,
    individuals.c.fitness.desc(),
    individuals.c.tie_break.desc(),
    individuals.c.idx,
)
# The edges of the lineage.
parents = Table(
    "parents",
    METADATA,
    _column("search_id", String, primary_key=True),
    _column("child_idx", BigInteger, primary_key=True, autoincrement=False),
    _column("position", Integer, primary_key=True, autoincrement=False),
    _column("parent_idx", BigInteger),
    CheckConstraint("parent_idx < child_idx", name="earlier"),
    ForeignKeyConstraint(["search_id", "child_idx"], ["individuals.search_id", "individuals.idx"]),
    ForeignKeyConstraint(["search_id", "parent_idx"], ["individuals.search_id", "individuals.idx"]),
    Index("ix_parents_descendants", "search_id", "parent_idx", "child_idx"),
)
# All that an evaluation depends on besides the phenotype, in a table of its own to keep evaluations small.
contexts = Table(
    "evaluation_contexts",
    METADATA,
    _column("id", RowId, primary_key=True),
    _column("model_fingerprint", String),
    _column("engine_fingerprint", String),
    _column("task_fingerprint", String),
    _column("task", String),
    _column("split", String, words=SPLITS),
    _column("metric", String),
    UniqueConstraint("model_fingerprint", "engine_fingerprint", "task_fingerprint", name="uq_evaluation_contexts_key"),
    Index(None, "task", "split"),
)
evaluations = Table(
    "evaluations",
    METADATA,
    _column("context_id", BigInteger, ForeignKey("evaluation_contexts.id"), primary_key=True, autoincrement=False),
    _column("phenotype_hash", String, primary_key=True),
    _column("score", Double, nullable=True, lowest=_ANY),
    _column("gold_logprob", Double, nullable=True, lowest=_LOG_PROBABILITY),
    _column("outcomes", Outcomes, nullable=True),
    _column("examples_seen", Integer),
    _column("failure", FreeText, nullable=True),
    _column("seconds", Double),
    _column("worker", String),
    _column("attempt", Integer),
    _column("experts", Integer, nullable=True),
    _column("active", Integer, nullable=True),
    _column("parameters", BigInteger, nullable=True),
    _column("active_parameters", BigInteger, nullable=True),
    _column("created_at", UtcDateTime),
    CheckConstraint(
        "(failure IS NULL AND score IS NOT NULL AND gold_logprob IS NOT NULL)"
        " OR (failure IS NOT NULL AND score IS NULL AND gold_logprob IS NULL)",
        name="scored_or_failed",
    ),
    # Read backwards, best first. The hash makes the order total; `active` allows filtering without reading the row.
    Index("ix_evaluations_rank", "context_id", "score", "gold_logprob", "phenotype_hash", "active"),
    Index("ix_evaluations_experts", "context_id", "experts", "score", "gold_logprob", "phenotype_hash", "active"),
    Index(
        "ix_evaluations_active_parameters", "context_id", "active_parameters", "score", "gold_logprob", "phenotype_hash"
    ),
    Index("ix_evaluations_parameters", "context_id", "parameters", "score", "gold_logprob", "phenotype_hash"),
    # All that costs are summed from, so that rows with their long outcomes aren't read for it.
    Index("ix_evaluations_costs", "context_id", "phenotype_hash", "score", "examples_seen", "seconds", "created_at"),
)
exports = Table(
    "exports",
    METADATA,
    _column("id", RowId, primary_key=True),
    _column("search_id", String),
    _column("idx", BigInteger),
    _column("path", String),
    _column("form", String),
    _column("checks", Text),
    _column("created_at", UtcDateTime),
    ForeignKeyConstraint(["search_id", "idx"], ["individuals.search_id", "individuals.idx"]),
    UniqueConstraint("search_id", "idx", "path"),
)
# One row for each shrink: what it has decided, done and found, as JSON that this part doesn't read.
shrinks = Table(
    "shrinks",
    METADATA,
    _column("name", String, primary_key=True),
    # Names of the searches that it has made or may make, separated by blanks.
    _column("searches", Words),
    _column("content", Text),
    _column("updated_at", UtcDateTime),
)
# Statistics that a genome kind starts from, measured once per model and data.
calibrations = Table(
    "calibrations",
    METADATA,
    _column("fingerprint", String, primary_key=True),
    _column("content", LargeBinary),
    _column("created_at", UtcDateTime),
)
