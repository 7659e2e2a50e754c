"""`best`."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

import moevolve
from moevolve.search.cli._console import millions, percent, print_json, print_table
from moevolve.search.cli._options import DEFAULT_STORE, JsonOption, StoreOption
from moevolve.search.genomes.registry import KINDS, parts_of


def best(
    task: Annotated[str | None, typer.Option("--task", help="Rank for this task; default: every task.")] = None,
    experts: Annotated[int | None, typer.Option("--experts", help="Only with this many experts, or blocks.")] = None,
    active: Annotated[int | None, typer.Option("--active", help="Only with this many of them active.")] = None,
    search: Annotated[str | None, typer.Option("--search", help="Only from this search.")] = None,
    by: Annotated[
        Literal["dev", "search", "test"],
        typer.Option("--by", help="Split that ranks; `dev` falls back to `search` for what was not re-ranked."),
    ] = "dev",
    limit: Annotated[int, typer.Option("--limit", min=1, help="Rows per task.")] = 10,
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
) -> None:
    """The best configurations per task."""
    found = moevolve.best(store, task=task, experts=experts, active=active, search=search, by=by, limit=limit)
    if as_json:
        print_json(found)
        return
    columns = [
        ("individual", False),
        ("task", False),
        ("search", True),
        ("dev", True),
        ("test", True),
        (parts_of({row.genome_kind for row in found} or KINDS), True),
        ("active", True),
        ("parameters", True),
        ("genome", False),
        ("depth", True),
    ]
    rows = [
        [
            row.ref,
            row.task,
            percent(row.search_score),
            percent(row.dev_score),
            percent(row.test_score),
            str(row.experts),
            str(row.active),
            f"{millions(row.parameters)} ({100 * row.parameters / row.parameters_full:.0f} %)",
            row.summary,
            str(row.depth),
        ]
        for row in found
    ]
    print_table(None, columns, rows)
