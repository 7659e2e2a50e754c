"""Searches: listed, looked at one by one, and beside each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from moevolve.evaluators.records import short_repr
from moevolve.evaluators.scales import ScaleName
from moevolve.search.config.files import parse_stored_config
from moevolve.search.config.run import LONGEST_NAME, RunConfig
from moevolve.search.interface.parameters import SearchRef
from moevolve.search.interface.request import Flag, Request, about, record
from moevolve.search.loop.final_table import FinalTable, build_final_table
from moevolve.search.results.comparison import Comparison, compare_searches
from moevolve.search.results.effects import Effects, effects
from moevolve.search.strategies.schedule import make_schedule
from moevolve.store.reader import StoreReader
from moevolve.store.records import Control, IndividualRecord, SearchRecord, SearchStatus, SearchSummary

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

    def answer(self, store: StoreReader) -> list[SearchSummary]:
        return self.selected(store.searches())

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


@dataclass(frozen=True, slots=True)
class PhaseCounts:
    """What a phase of a search has made.

    Attributes:
        planned: Number of individuals that the configuration asks for; None for an imported search.
        best: Largest fitness of its individuals; None before the first.
    """

    phase: str
    planned: int | None
    individuals: int
    failed: int
    best: float | None


@dataclass(frozen=True, slots=True)
class SearchOverview:
    """A search with its settings and phases.

    Attributes:
        facts: Names and values of the search's settings: model, tasks, genome, phases ...
        best: The best individual by fitness, as SEARCH:INDEX, and its fitness; None before the first.
        full: Fitness of the full model; None while it isn't known.
        scale: Scale that fitness is shown on.
    """

    __repr__ = short_repr

    search: SearchRecord
    control: Control
    facts: tuple[tuple[str, str], ...] = field(repr=False)
    phases: tuple[PhaseCounts, ...]
    best: tuple[str, float] | None
    full: float | None
    scale: ScaleName


@record
class OverviewRequest(Request):
    """Show what a search is about: its settings, phases, status and best.

    Raises:
        StoreError: the store or search doesn't exist.
        UserError: another version stored the search.
    """

    route = "/searches/{search}"
    search: SearchRef

    def answer(self, store: StoreReader) -> SearchOverview:
        from moevolve.search.loop.scores import full_fitness
        from moevolve.search.report.contents import facts_of

        search = store.search(self.search)
        config = parse_stored_config(search.config, search.name)
        rows = store.history(search.id)
        best = next(iter(store.best_of_search(search.id, 1)), None)
        return SearchOverview(
            search=search,
            control=store.control(search.id),
            facts=tuple(facts_of(store, search, config)),
            phases=tuple(_phases(config, rows)),
            best=None if best is None or best.fitness is None else (f"{search.name}:{best.index}", best.fitness),
            full=full_fitness(store, search),
            scale=store.scales(search.id).fitness,
        )


def _phases(config: RunConfig, rows: Sequence[IndividualRecord]) -> Iterator[PhaseCounts]:
    parts: list[tuple[str, int | None, Sequence[IndividualRecord]]] = [("imported", None, rows)]
    if not config.is_imported:
        spans = make_schedule(config).spans
        parts = [(span.kind, span.stop - span.start, rows[span.start : span.stop]) for span in spans]
    for phase, planned, made in parts:
        fitness = [row.fitness for row in made if row.fitness is not None]
        failed = sum(row.status == "failed" for row in made)
        yield PhaseCounts(phase, planned, len(made), failed, max(fitness, default=None))


@record
class FinalTableRequest(Request):
    """Look up a search's winner and its final table; before the end, the measured part."""

    route = "/searches/{search}/standings"
    search: SearchRef

    def answer(self, store: StoreReader) -> FinalTable:
        search = store.search(self.search)
        config = parse_stored_config(search.config, search.name)  # first, to fail before all rows are read
        return build_final_table(store, search, config, store.history(search.id))


@record
class CompareRequest(Request):
    """Show searches beside each other: the settings that differ, and their winners' scores with paired tests.

    Searches that differ only in the seed are a group, whose means are shown. Nothing is evaluated.

    Raises:
        StoreError: the store or search doesn't exist.
    """

    route = "/compare"
    searches: Annotated[
        Sequence[Annotated[str, Field(max_length=LONGEST_NAME)]],
        about("Names or ids of the searches; tests are against the first.", min_length=1, max_length=64),
        Flag(metavar="SEARCH...", kind=list[str]),
    ]

    def answer(self, store: StoreReader) -> Comparison:
        return compare_searches(store, self.searches)


@record
class EffectsRequest(Request):
    """Tell what came of the individuals that each operator made in each phase. Nothing is evaluated.

    Raises:
        StoreError: the store or search doesn't exist.
    """

    route = "/searches/{search}/effects"
    search: SearchRef

    def answer(self, store: StoreReader) -> Effects:
        return effects(store, self.search)
