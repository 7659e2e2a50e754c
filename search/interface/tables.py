"""Listings as flat tables: the columns of each kind of record, as data frames."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar, get_args

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.scales import SCALES
from moevolve.store.records import SearchSummary

if TYPE_CHECKING:
    import pandas as pd
    from _typeshed import DataclassInstance

Row = TypeVar("Row", bound="DataclassInstance")

_CONTROLS = {code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}

# Columns with scores, and those with the scales that they are shown on.
_SCALED = {
    **dict.fromkeys(("search_score", "dev_score", "test_score", "best", "fitness"), "scale"),
    **dict.fromkeys(("dev", "test"), "mean_scale"),
}


class Rows(list[Row]):
    """A listing's records: a list that becomes a data frame."""

    def to_pandas(self) -> pd.DataFrame:
        """Return the records as a data frame with all their columns; scores are in %, or perplexities, as `scale` says.

        Raises:
            UserError: pandas isn't installed.
        """
        try:
            import pandas as pd
        except ImportError:
            raise UserError("pandas isn't installed: pip install pandas") from None
        return pd.DataFrame.from_records([_scaled(record) for record in self])

    def __repr__(self) -> str:
        kind = f" of {type(self[0]).__name__}" if self else ""
        return f"<{len(self)} rows{kind}: to_pandas() makes a data frame>"

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(cls, handler(list[get_args(source)[0]]))  # type: ignore[misc]


def flat(record: DataclassInstance) -> dict[str, Any]:
    """Return a record's columns: plain values by name, without bytes; several words are joined by blanks."""
    if isinstance(record, SearchSummary):
        return _flat_search(record)
    names = [one.name for one in fields(record)]
    own = {name: getattr(record, name) for name in names}
    ref = {"individual": record.ref} if hasattr(record, "ref") else {}
    return ref | {name: _plain(value) for name, value in own.items() if not isinstance(value, bytes)}


def _scaled(record: DataclassInstance) -> dict[str, object]:
    """Return a record's columns, with scores on the scales that people read them on."""
    columns = flat(record)
    for name, scale in _SCALED.items():
        if columns.get(name) is not None and scale in columns:
            columns[name] = SCALES[columns[scale]].value(columns[name])
    return columns


def _flat_search(row: SearchSummary) -> dict[str, object]:
    search = row.search
    return {
        "search": search.name,
        "status": row.state,
        "status_reason": row.reason,
        "tasks": _plain(row.tasks),
        "genome": search.genome_kind,
        "model": search.model_path,
        "seed": search.seed,
        "individuals": row.individuals,
        "failed": row.failed,
        "best": row.best_fitness,
        "scale": row.scale,
        "winner": search.winner,
        "dev": row.dev,
        "test": row.test,
        "mean_scale": row.mean_scale,
        "size": row.size,
        "created": search.created_at,
        "updated": search.updated_at,
        "id": search.id,
    }


def _plain(value: object) -> object:
    return " ".join(map(str, value)) if isinstance(value, tuple) else value


def plain(text: str) -> str:
    """Replace control characters, which could move a terminal's cursor or send it commands."""
    return text.translate(_CONTROLS)
