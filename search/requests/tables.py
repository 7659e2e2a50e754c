"""Listings as flat tables: the columns of each kind of record, and CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping
from dataclasses import fields
from datetime import datetime
from typing import Any

from moevolve.store.records import SearchSummary

_FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""What a spreadsheet takes for the beginning of a formula."""


def flat(record: Any) -> dict[str, Any]:
    """A record's columns: plain values by name, without bytes; several words are joined by blanks."""
    if isinstance(record, SearchSummary):
        return _flat_search(record)
    names = [one.name for one in fields(record)]
    own = {name: getattr(record, name) for name in names}
    ref = {"individual": record.ref} if hasattr(record, "ref") else {}
    return ref | {name: _plain(value) for name, value in own.items() if not isinstance(value, bytes)}


def _flat_search(row: SearchSummary) -> dict[str, Any]:
    search = row.search
    return {
        "search": search.name,
        "status": search.status,
        "status_reason": search.status_reason,
        "tags": _plain(search.tags),
        "note": search.note,
        "tasks": _plain(row.tasks),
        "genome": search.genome_kind,
        "model": search.model_path,
        "seed": search.seed,
        "individuals": row.individuals,
        "failed": row.failed,
        "best": row.best_fitness,
        "winner": search.winner,
        "dev": row.dev,
        "test": row.test,
        "created": search.created_at,
        "updated": search.updated_at,
        "id": search.id,
    }


def _plain(value: Any) -> Any:
    return " ".join(map(str, value)) if isinstance(value, tuple) else value


def csv_text(rows: Iterable[Mapping[str, Any]]) -> str:
    """Rows with the same columns as CSV with a heading; times in ISO 8601, and no cell that a spreadsheet would run."""
    written, writer = io.StringIO(), None
    for row in rows:
        if writer is None:
            writer = csv.DictWriter(written, list(row), lineterminator="\n")
            writer.writeheader()
        writer.writerow({name: _cell(value) for name, value in row.items()})
    return written.getvalue()


def _cell(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.isoformat(timespec="seconds")
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value
