"""The best configurations: per task, of score against size, and of a search over all its tasks."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from functools import cache
from typing import Annotated

from pydantic import Field

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.types import Split
from moevolve.search.config.files import parse_stored_config
from moevolve.search.config.run import LONGEST_NAME
from moevolve.search.genomes.contract.phases import START
from moevolve.search.genomes.registry import KINDS
from moevolve.search.interface.parameters import ScoredSplit, SearchRef, SizeUnit
from moevolve.search.interface.request import Flag, Request, about, record
from moevolve.search.interface.tables import Rows
from moevolve.store.pareto import ChartCell, Mark, Size, unbeaten
from moevolve.store.reader import StoreReader
from moevolve.store.records import FULL_MODEL, BestRow
from moevolve.workers.contract.facts import DTYPE_BYTES

Count = Annotated[int | None, Field(ge=0, lt=2**31)]


@record
class BestRequest(Request):
    """List the best configurations per task.

    Raises:
        StoreError: there is no such store, task or search.
    """

    route = "/best"
    _: KW_ONLY
    task: Annotated[str | None, about("Task to rank for; default: all.", max_length=200)] = None
    experts: Annotated[Count, about("List only configurations with this many experts, or blocks.")] = None
    active: Annotated[Count, about("List only configurations with this many active experts.")] = None
    search: Annotated[str | None, about("List only individuals of this search.", max_length=LONGEST_NAME)] = None
    by: Annotated[
        ScoredSplit,
        about("Split whose scores rank. `dev` falls back to `search` for individuals that were not re-ranked."),
    ] = "dev"
    limit: Annotated[int, about("List at most this many configurations per task.", ge=1, le=1000)] = 10

    def answer(self, store: StoreReader) -> Rows[BestRow]:
        return Rows(store.best(self.task, self.experts, self.active, self.search, self.limit, self.by))


@dataclass(frozen=True, slots=True)
class Pareto:
    """Scores against sizes.

    Attributes:
        size: What sizes are.
        each: Size of one parameter (with `flops`, of one that a token uses), by which all counts are multiplied.
        front: The configurations that no other one beats, from the smallest on.
        marks: The full model, random individuals and one-shot methods.
        candidates: All candidates, counted in cells of a chart; sizes in parameters. Empty unless asked for.
    """

    task: str
    split: Split
    size: SizeUnit
    each: float
    front: tuple[BestRow, ...]
    marks: tuple[Mark, ...]
    candidates: tuple[ChartCell, ...] = field(default=(), repr=False)

    def size_of(self, model: BestRow | Mark) -> float | None:
        """Size of a model on the chart's axis; None where it isn't known."""
        count = model.active_parameters if self.size == "flops" else model.parameters
        return None if count is None else count * self.each


@record
class ParetoRequest(Request):
    """List the configurations that no other one beats in both score and size, with models to compare them with.

    Raises:
        StoreError: there is no such store, task or search.
    """

    route = "/pareto"
    task: Annotated[str, about("Task of the scores.", max_length=200)]
    _: KW_ONLY
    split: Annotated[ScoredSplit, about("Split of the scores.")] = "search"
    search: Annotated[str | None, about("List only individuals of this search.", max_length=LONGEST_NAME)] = None
    size: Annotated[
        SizeUnit,
        about(
            "What sizes are: parameters; bytes of the weights in the dtype of the search (the newest one "
            "with the task, if none is named); or FLOPs per token, two for each parameter that a token uses."
        ),
    ] = "parameters"
    candidates: Annotated[bool, about("Count all candidates by size and score, too."), Flag("--candidates")] = False

    def answer(self, store: StoreReader) -> Pareto:
        size: Size = "active_parameters" if self.size == "flops" else "parameters"
        where = self.task, self.split, self.search
        front = tuple(store.pareto(*where, size))
        return Pareto(
            self.task,
            self.split,
            self.size,
            {"parameters": 1.0, "flops": 2.0}.get(self.size) or self._bytes_each(store),
            front,
            tuple(store.marks(*where, _unsearched())),
            tuple(store.candidate_cells(*where, size)) if self.candidates else (),
        )

    def _bytes_each(self, store: StoreReader) -> float:
        if self.search is None:
            named = [one.search for one in store.searches() if self.task in one.tasks]
        else:
            named = [store.search(self.search)]
        found = DTYPE_BYTES.get(parse_stored_config(named[-1].config).model.parameter_dtype) if named else None
        if found is None:
            raise UserError(f"{self.task}: the dtype of the weights isn't known, so their bytes aren't either")
        return float(found)


@cache
def _unsearched() -> frozenset[str]:
    """Operators of individuals that weren't searched: random ones, starts and one-shot methods."""
    return frozenset({"random", START, *(name for kind in KINDS.values() for name in kind.baselines)})


@dataclass(frozen=True, slots=True)
class TradeOff:
    """An individual that no other one of its search beats on all tasks.

    Attributes:
        ref: The individual as SEARCH:INDEX.
        scores: Scores in [0, 1], in the order of the tasks.
    """

    ref: str
    scores: tuple[float, ...]
    parameters: int | None
    summary: str


@dataclass(frozen=True, slots=True)
class TradeOffs:
    """The Pareto front of a search over its tasks.

    Attributes:
        tasks: Names of the tasks, as configured.
        full: Scores of the full model; None where it isn't evaluated.
        front: The highest score on the first task first.
    """

    split: Split
    tasks: tuple[str, ...]
    full: tuple[float | None, ...]
    front: tuple[TradeOff, ...]


@record
class TradeoffsRequest(Request):
    """List the individuals of a search that no other one beats on all tasks, to choose among them.

    Raises:
        StoreError: there is no such store or search.
    """

    route = "/searches/{search}/tradeoffs"
    search: SearchRef
    _: KW_ONLY
    split: Annotated[ScoredSplit, about("Split of the scores.")] = "search"

    def answer(self, store: StoreReader) -> TradeOffs:
        search = store.search(self.search)
        tasks = [task for task in store.search_tasks(search.id) if task.split == self.split]
        rows = {row.phenotype_hash: row for row in reversed(store.history(search.id)) if row.status == "ok"}
        prints = [task.task_fingerprint for task in tasks]
        found = store.evaluations([FULL_MODEL, *rows], search.model_fingerprint, search.engine_fingerprint, prints)
        by_key = {(one.phenotype_hash, one.task_fingerprint): one.score for one in found}

        def scores(phenotype: str) -> tuple[float | None, ...]:
            return tuple(by_key.get((phenotype, fingerprint)) for fingerprint in prints)

        measured = []
        for row in sorted(rows.values(), key=lambda row: row.index):
            known = tuple(score for score in scores(row.phenotype_hash) if score is not None)
            if tasks and len(known) == len(tasks):
                measured.append(TradeOff(f"{search.name}:{row.index}", known, row.parameters, row.summary))
        front = tuple(measured[place] for place in unbeaten([one.scores for one in measured]))
        return TradeOffs(self.split, tuple(task.task for task in tasks), scores(FULL_MODEL), front)
