"""Searches of a store: list them, look one up, label one, and its final table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY
from typing import Annotated, Literal

from moevolve.evaluators.errors import UserError
from moevolve.search.config.files import parse_stored_config
from moevolve.search.config.run import LONGEST_NAME
from moevolve.search.interface.parameters import SearchRef
from moevolve.search.interface.request import Flag, Request, about, record
from moevolve.search.interface.tables import Rows
from moevolve.search.loop.final_table import FinalTable, build_final_table
from moevolve.store.reader import StoreReader
from moevolve.store.records import SearchRecord, SearchStatus, SearchSummary
from moevolve.store.repository import Store

# The scores put the highest first: the best on `search`, or the winner's on `dev` or `test`.
SearchOrder = Literal["oldest", "newest", "name", "best", "dev", "test"]


@record
class SearchesRequest(Request):
    """List the searches of the store."""

    route = "/searches"
    _: KW_ONLY
    text: Annotated[
        str | None, about("List only searches with this in name, tags, note, model or genome.", max_length=200)
    ] = None
    status: Annotated[SearchStatus | None, about("List only searches with this status.")] = None
    tag: Annotated[str | None, about("List only searches with this tag.", max_length=LONGEST_NAME)] = None
    task: Annotated[str | None, about("List only searches with this task.", max_length=200)] = None
    archived: Annotated[bool, about("List the archived searches instead."), Flag("--archived")] = False
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
            texts = search.name, " ".join(search.tags), search.note, search.model_path, search.genome_kind
            if (
                search.archived == self.archived
                and self.status in (None, search.status)
                and (self.tag is None or self.tag in search.tags)
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
class LabelRequest(Request):
    """Tag a search, note something on it, or archive it; its results stay as they are.

    Raises:
        StoreError: the store or search doesn't exist.
        UserError: nothing is to be changed.
    """

    route = "/searches/{search}/label"
    writes = True
    needs_one = ("tags", "note", "archived")
    search: SearchRef
    _: KW_ONLY
    tags: Annotated[
        str | None,
        about("Its tags, separated by blanks; empty removes all.", max_length=500, pattern=r"^[^\x00-\x1f\x7f]*$"),
    ] = None
    note: Annotated[str | None, about("Its note; empty removes it.", max_length=4000, pattern=r"^[^\x00]*$")] = None
    archived: Annotated[bool | None, about("Whether listings leave it out."), Flag("--archive/--restore")] = None

    def answer(self, store: Store) -> SearchRecord:
        if self.tags is None and self.note is None and self.archived is None:
            raise UserError("say which tags or which note the search is to have, or whether it is to be archived")
        tags = None if self.tags is None else list(dict.fromkeys(self.tags.split()))
        search_id = store.search(self.search).id
        store.label(search_id, tags, self.note, self.archived)
        return store.search(search_id)


@record
class FinalTableRequest(Request):
    """Look up a search's winner and its final table; before the end, the measured part."""

    route = "/searches/{search}/standings"
    search: SearchRef

    def answer(self, store: StoreReader) -> FinalTable:
        search = store.search(self.search)
        config = parse_stored_config(search.config, search.name)  # first, to fail before all rows are read
        return build_final_table(store, search, config, store.history(search.id))
