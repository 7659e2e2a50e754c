"""Searches of a store: list them, look one up, and its final table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY
from typing import Annotated, Literal

from moevolve.search.config.files import parse_stored_config
from moevolve.search.interface.parameters import SearchRef
from moevolve.search.interface.request import Request, about, record
from moevolve.search.interface.tables import Rows
from moevolve.search.loop.final_table import FinalTable, build_final_table
from moevolve.store.reader import StoreReader
from moevolve.store.records import SearchRecord, SearchStatus, SearchSummary

# The scores put the highest first: the best on `search`, or the winner's on `dev` or `test`.
SearchOrder = Literal["oldest", "newest", "name", "best", "dev", "test"]


@record
class SearchesRequest(Request):
    """List the searches of the store."""

    route = "/searches"
    _: KW_ONLY
    text: Annotated[str | None, about("List only searches with this in name, model or genome.", max_length=200)] = None
    status: Annotated[SearchStatus | None, about("List only searches with this status.")] = None
    task: Annotated[str | None, about("List only searches with this task.", max_length=200)] = None
    sort: Annotated[
        SearchOrder,
        about(
            "Order: by age, by name, or the highest score first (`best` on the split search; the winner's "
            "on `dev` or `test`)."
        ),
    ] = "oldest"

    def answer(self, store: StoreReader) -> Rows[SearchSummary]:
        return Rows(self.selected(store.searches()))

    def selected(self, found: Sequence[SearchSummary]) -> list[SearchSummary]:
        """Filter and sort all searches, which are given oldest first."""
        text = (self.text or "").casefold()
        rows = []
        for row in found:
            search = row.search
            texts = search.name, search.model_path, search.genome_kind
            if (
                self.status in (None, search.status)
                and (self.task is None or self.task in row.tasks)
                and any(text in each.casefold() for each in texts)
            ):
                rows.append(row)
        match self.sort:
            case "oldest":
                return rows
            case "newest":
                return rows[::-1]
            case "name":
                return sorted(rows, key=lambda row: row.search.name.casefold())
            case "best" | "dev" | "test":
                scores = [row.best_fitness if self.sort == "best" else getattr(row, self.sort) for row in rows]
                order = sorted(range(len(rows)), key=lambda place: (scores[place] is None, -(scores[place] or 0.0)))
                return [rows[place] for place in order]


@record
class SearchRequest(Request):
    """Look up one search."""

    route = "/searches/{search}"
    search: SearchRef

    def answer(self, store: StoreReader) -> SearchRecord:
        return store.search(self.search)


@record
class FinalTableRequest(Request):
    """Look up a search's winner and its final table; before the end, the measured part."""

    route = "/searches/{search}/standings"
    search: SearchRef

    def answer(self, store: StoreReader) -> FinalTable:
        search = store.search(self.search)
        config = parse_stored_config(search.config, search.name)  # first, to fail before all rows are read
        return build_final_table(store, search, config, store.history(search.id))
