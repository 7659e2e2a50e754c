"""`searches`."""

from __future__ import annotations

import moevolve
from moevolve.search.cli._console import percent, print_json, print_table
from moevolve.search.cli._options import DEFAULT_STORE, JsonOption, StoreOption
from moevolve.store.records import SearchSummary


def searches(store: StoreOption = DEFAULT_STORE, as_json: JsonOption = False) -> None:
    """All searches of the store."""
    found = moevolve.searches(store)
    if as_json:
        print_json(found)
        return
    columns = [
        ("search", False),
        ("status", False),
        ("genome", False),
        ("tasks", False),
        ("individuals", True),
        ("failed", True),
        ("best on search", True),
        ("created", False),
    ]
    rows = [
        [
            row.search.name,
            row.search.status + (f" ({reason})" if (reason := _reason(row)) else ""),
            row.search.genome_kind,
            ", ".join(row.tasks),
            str(row.individuals),
            str(row.failed),
            percent(row.best_fitness),
            f"{row.search.created_at:%Y-%m-%d %H:%M}" if row.search.created_at else "",
        ]
        for row in found
    ]
    print_table(None, columns, rows)


def _reason(row: SearchSummary) -> str | None:
    return "its driver is gone: resume it" if row.is_left_behind else row.search.status_reason
