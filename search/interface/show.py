"""What is stored of one search, or of one individual: everything, its genome in columns, its lineage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from moevolve.evaluators.records import short_repr
from moevolve.evaluators.scales import ScaleName
from moevolve.search.config.files import parse_stored_config
from moevolve.search.config.run import RunConfig
from moevolve.search.genomes.contract.outline import GenomeOutline
from moevolve.search.genomes.registry import outline_of
from moevolve.search.interface.parameters import IndividualRef, SearchRef
from moevolve.search.interface.request import Request, record
from moevolve.search.running.candidates import find_candidate
from moevolve.search.strategies.schedule import make_schedule
from moevolve.store.reader import StoreReader
from moevolve.store.records import Control, IndividualDetail, IndividualRecord, LineageGraph, SearchRecord


@record
class ShowRequest(Request):
    """Show everything that the store has on one individual.

    Raises:
        StoreError: the store or individual doesn't exist.
    """

    route = "/individuals/{individual}"
    individual: IndividualRef

    def answer(self, store: StoreReader) -> IndividualDetail:
        return store.individual(self.individual)


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

    route = "/searches/{search}/overview"
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
class GenomeRequest(Request):
    """Show an individual's genome in columns: what it keeps of each layer, and its settings.

    Raises:
        StoreError: the store or individual doesn't exist.
        UserError: the search was stored without the facts of its model.
    """

    route = "/individuals/{individual}/genome"
    individual: IndividualRef

    def answer(self, store: StoreReader) -> GenomeOutline:
        found = find_candidate(store, self.individual, weights=False).genome
        assert found is not None
        return outline_of(found)


@record
class LineageRequest(Request):
    """Show the ancestors of an individual, back to those without parents.

    Raises:
        StoreError: the store or individual doesn't exist.
    """

    route = "/individuals/{individual}/lineage"
    individual: IndividualRef

    def answer(self, store: StoreReader) -> LineageGraph:
        return store.ancestors(self.individual)
