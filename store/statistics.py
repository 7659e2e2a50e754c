"""Fixed planner statistics for SQLite: how a grown store looks.

A store is made empty and grows while it is used. Without statistics SQLite takes every index for equally selective and
picks one by coincidence: "all rows of this search" in place of "this row". Gathered ones would come after the damage is
felt, and plans would change with them. So a typical grown store is described to the planner when the schema is made,
which SQLite's documentation allows for (https://www.sqlite.org/optoverview.html, on manual control of query plans).
PostgreSQL gathers its own.
"""

from __future__ import annotations

from sqlalchemy import Connection, text

# (table, index, "rows, then rows per value of the first column, of the first two columns, ...").
_TYPICAL = (
    ("searches", "sqlite_autoindex_searches_1", "10 1"),
    ("searches", "sqlite_autoindex_searches_2", "10 1"),
    ("individuals", "sqlite_autoindex_individuals_1", "1000000 100000 1"),
    ("individuals", "ix_individuals_rank", "1000000 100000 50000 500 2 1"),
    ("individuals", "ix_individuals_phenotype", "1000000 2 2 2 1"),
    ("parents", "sqlite_autoindex_parents_1", "2000000 200000 2 1"),
    ("parents", "ix_parents_descendants", "2000000 200000 20 1"),
    ("evaluation_contexts", "sqlite_autoindex_evaluation_contexts_1", "100 20 10 1"),
    ("evaluation_contexts", "ix_evaluation_contexts_task_split", "100 10 3"),
    ("evaluations", "sqlite_autoindex_evaluations_1", "1000000 100000 1"),
    ("evaluations", "ix_evaluations_rank", "1000000 100000 1000 2 1 1"),
    ("evaluations", "ix_evaluations_experts", "1000000 100000 25000 250 2 1 1"),
    ("evaluations", "ix_evaluations_parameters", "1000000 100000 25000 250 2 1"),
)


def describe_typical(connection: Connection) -> None:
    """Writes the statistics of a typical store; does nothing on other databases than SQLite."""
    if connection.dialect.name != "sqlite":
        return
    connection.execute(text("ANALYZE"))
    connection.execute(text("DELETE FROM sqlite_stat1"))
    insert = text("INSERT INTO sqlite_stat1 (tbl, idx, stat) VALUES (:tbl, :idx, :stat)")
    connection.execute(insert, [dict(zip(("tbl", "idx", "stat"), row, strict=True)) for row in _TYPICAL])
    connection.execute(text("ANALYZE sqlite_schema"))
