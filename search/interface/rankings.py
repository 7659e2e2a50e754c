"""The best candidates per task, and Pareto fronts: of score and size, or of all tasks of a search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import cache
from typing import Annotated

from pydantic import Field

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.records import short_repr
from moevolve.evaluators.scales import ScaleName
from moevolve.evaluators.types import Split
from moevolve.search.config.files import parse_stored_config
from moevolve.search.config.run import LONGEST_NAME
from moevolve.search.genomes.contract.phases import START
from moevolve.search.genomes.registry import KINDS
from moevolve.search.interface.parameters import ScoredSplit, SizeUnit
from moevolve.search.interface.request import Flag, Request, about, record
from moevolve.search.interface.tables import Rows
from moevolve.search.loop.final_table import FULL_LABEL
from moevolve.store.pareto import ChartCell, FrontRow, Mark, Size, unbeaten
from moevolve.store.reader import StoreReader
from moevolve.store.records import FULL_MODEL, BestRow, IndividualRecord, SearchRecord
from moevolve.workers.contract.facts import DTYPE_BYTES

PartCount = Annotated[int | None, Field(ge=0, lt=2**31)]
ModelPath = Annotated[
    str | None, about("List only configurations of this model, by its path in `searches`.", max_length=4096)
]


@record
class BestRequest(Request):
    """List the best candidates per task.

    Raises:
        StoreError: there is no such store, task or search.
    """

    route = "/best"
    _: KW_ONLY
    task: Annotated[str | None, about("Task to rank for; default: all.", max_length=200)] = None
    experts: Annotated[PartCount, about("List only candidates with this many experts, or blocks of NanoMoE.")] = None
    active: Annotated[PartCount, about("List only configurations with this many active experts.")] = None
    search: Annotated[str | None, about("List only individuals of this search.", max_length=LONGEST_NAME)] = None
    model: ModelPath = None
    split: Annotated[
        ScoredSplit,
        about("Split whose scores rank. With `dev`, individuals without a score there come last, by that on `search`."),
    ] = "dev"
    limit: Annotated[int, about("List at most this many configurations per task.", ge=1, le=1000)] = 10

    def answer(self, store: StoreReader) -> Rows[BestRow]:
        where = self.task, self.experts, self.active, self.search
        return Rows(store.best(*where, self.limit, self.split, self.model))


@dataclass(frozen=True, slots=True)
class Pareto:
    """Configurations that no other one beats: in score and size on one task, or in the scores on several tasks.

    Attributes:
        tasks: The task, or all tasks of a search, as configured.
        size: What sizes are.
        each: Size of one parameter (with `flops`, of one that a token uses), by which all counts are multiplied.
        front: On one task from the smallest on; on several, the highest score on the first of them first.
        marks: The full model; on one task also random individuals and one-shot methods.
        candidates: All candidates, counted in cells of a chart; sizes in parameters. Empty unless asked for.
        scales: Scale that the scores on each task are shown on.
    """

    __repr__ = short_repr

    tasks: tuple[str, ...]
    split: Split
    size: SizeUnit
    each: float
    front: tuple[FrontRow, ...]
    marks: tuple[Mark, ...]
    candidates: tuple[ChartCell, ...] = field(default=(), repr=False)
    scales: tuple[ScaleName, ...] = ("percent",)

    def size_of(self, model: FrontRow | Mark) -> float | None:
        """Size of a model in units of `size`; None where it isn't known."""
        count = model.active_parameters if self.size == "flops" else model.parameters
        return None if count is None else count * self.each


@record
class ParetoRequest(Request):
    """List the configurations that no other one beats in both score and size, or on all tasks of a search.

    With a task, its scores are set against sizes. Without one, a search's scores on its tasks are set against each
    other. The full model is listed too, and on one task what random individuals and one-shot methods reach.

    Raises:
        StoreError: there is no such store, task or search.
        UserError: neither a task nor a search is named, or sizes in bytes aren't known.
    """

    route = "/pareto"
    needs_one = ("task", "search")
    task: Annotated[str | None, about("Task of the scores; default: all tasks of the search.", max_length=200)] = None
    _: KW_ONLY
    split: Annotated[ScoredSplit, about("Split of the scores; all candidates have one on `search`.")] = "test"
    search: Annotated[str | None, about("List only individuals of this search.", max_length=LONGEST_NAME)] = None
    model: ModelPath = None
    size: Annotated[
        SizeUnit,
        about(
            "What sizes are: parameters; bytes of the weights in the dtype of the search (the newest one "
            "with the task, if none is named); or FLOPs per token, two for each parameter that a token uses."
        ),
    ] = "parameters"
    candidates: Annotated[
        bool, about("With one task, count all candidates by size and score, too."), Flag("--candidates")
    ] = False

    def answer(self, store: StoreReader) -> Pareto:
        tasks = self._tasks(store)
        each = {"parameters": 1.0, "flops": 2.0}.get(self.size) or self._bytes_each(store, tasks)
        if len(tasks) == 1:
            size: Size = "active_parameters" if self.size == "flops" else "parameters"
            where = tasks[0], self.split, self.search
            rows = store.pareto(*where, size, self.model)
            scales = tuple(row.scale for row in rows[:1]) or ("percent",)
            front = [_front_row(row, row.search_id, row.search_name, (row.score,)) for row in rows]
            marks = store.marks(*where, _unsearched(), self.model)
            cells = store.candidate_cells(*where, size, self.model) if self.candidates else []
        else:
            assert self.search is not None
            front, full, scales = _over_tasks(store, store.search(self.search), self.split)
            marks, cells = [full], []
        return Pareto(tasks, self.split, self.size, each, tuple(front), tuple(marks), tuple(cells), scales)

    def _tasks(self, store: StoreReader) -> tuple[str, ...]:
        if self.task is not None:
            return (self.task,)
        if self.search is None:
            raise UserError("name a task (scores against sizes) or a search (scores on its tasks against each other)")
        tasks = store.search_tasks(store.search(self.search).id)
        return tuple(task.task for task in tasks if task.split == self.split)

    def _bytes_each(self, store: StoreReader, tasks: Sequence[str]) -> float:
        if self.search is None:
            every = store.searches()
            models = {one.search.model_fingerprint for one in every if self.model in (None, one.search.model_path)}
            named = [one.search for one in every if tasks[0] in one.tasks and one.search.model_fingerprint in models]
        else:
            named = [store.search(self.search)]
        found = DTYPE_BYTES.get(parse_stored_config(named[-1].config).model.parameter_dtype) if named else None
        if found is None:
            where = self.task or self.search
            raise UserError(f"{where}: the dtype of the weights isn't known, so their bytes aren't either")
        return float(found)


def _over_tasks(
    store: StoreReader, search: SearchRecord, split: Split
) -> tuple[list[FrontRow], Mark, tuple[ScaleName, ...]]:
    """The individuals of a search that no other one beats on all tasks, the full model, and the scale of each task."""
    rows = {row.phenotype_hash: row for row in reversed(store.history(search.id)) if row.status == "ok"}
    prints = [task.task_fingerprint for task in store.search_tasks(search.id) if task.split == split]
    found = store.evaluations([FULL_MODEL, *rows], search.model_fingerprint, search.engine_fingerprint, prints)
    by_key = {(one.phenotype_hash, one.task_fingerprint): one.score for one in found}
    scales = {one.task_fingerprint: one.scale for one in found}

    def scores(phenotype: str) -> tuple[float | None, ...]:
        return tuple(by_key.get((phenotype, fingerprint)) for fingerprint in prints)

    measured = []
    for row in sorted(rows.values(), key=lambda row: row.index):
        known = tuple(score for score in scores(row.phenotype_hash) if score is not None)
        if prints and len(known) == len(prints):
            measured.append(_front_row(row, search.id, search.name, known))
    sizes = next(((row.parameters_full, row.active_parameters_full) for row in rows.values()), (None, None))
    front = [measured[place] for place in unbeaten([one.scores for one in measured])]
    full = Mark(FULL_LABEL, None, scores(FULL_MODEL), *sizes)
    return front, full, tuple(scales.get(fingerprint, "percent") for fingerprint in prints)


def _front_row(row: BestRow | IndividualRecord, search_id: str, name: str, scores: tuple[float, ...]) -> FrontRow:
    return FrontRow(
        search_id=search_id,
        search_name=name,
        index=row.index,
        scores=scores,
        experts=row.experts,
        active=row.active,
        parameters=row.parameters,
        active_parameters=row.active_parameters,
        parameters_full=row.parameters_full,
        active_parameters_full=row.active_parameters_full,
        summary=row.summary,
    )


@cache
def _unsearched() -> frozenset[str]:
    """Operators of individuals that weren't searched: random ones, starts and one-shot methods."""
    return frozenset({"random", START, *(name for kind in KINDS.values() for name in kind.baselines)})
