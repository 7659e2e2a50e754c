"""The best candidates per task, and Pareto fronts: of score and size, or of all tasks of a search."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Annotated

from pydantic import Field

from moevolve.evaluators.records import short_repr
from moevolve.evaluators.scales import ScaleName
from moevolve.evaluators.types import Split
from moevolve.search.config.run import LONGEST_NAME
from moevolve.search.interface.parameters import ScoredSplit
from moevolve.search.interface.request import Request, about, record
from moevolve.store.pareto import Size
from moevolve.store.reader import StoreReader
from moevolve.store.records import BestRow

PartCount = Annotated[int | None, Field(ge=0, lt=2**31)]
ModelPath = Annotated[
    str | None, about("List only configurations of this model, by its path in `searches`.", max_length=4096)
]


@record
class BestRequest(Request):
    """List the best candidates per task.

    Raises:
        StoreError: the store, task or search doesn't exist.
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

    def answer(self, store: StoreReader) -> list[BestRow]:
        where = self.task, self.experts, self.active, self.search
        return store.best(*where, self.limit, self.split, self.model)


@dataclass(frozen=True, slots=True)
class Pareto:
    """Configurations that no other one beats in score and size on one task.

    Attributes:
        size: What sizes are.
        front: From the smallest on.
        full: Score of the full model; None if it isn't known.
        scale: Scale that the scores are shown on.
    """

    __repr__ = short_repr

    task: str
    split: Split
    size: Size
    front: tuple[BestRow, ...]
    full: float | None
    scale: ScaleName = "percent"


@record
class ParetoRequest(Request):
    """List the configurations that no other one beats in both score and size, and the full model's score.

    Raises:
        StoreError: the store, task or search doesn't exist.
    """

    route = "/pareto"
    task: Annotated[str, about("Task of the scores.", max_length=200)]
    _: KW_ONLY
    split: Annotated[ScoredSplit, about("Split of the scores; all candidates have one on `search`.")] = "test"
    search: Annotated[str | None, about("List only individuals of this search.", max_length=LONGEST_NAME)] = None
    model: ModelPath = None
    size: Annotated[Size, about("What sizes are: all parameters, or those that a token uses.")] = "parameters"

    def answer(self, store: StoreReader) -> Pareto:
        front = store.pareto(self.task, self.split, self.search, self.size, self.model)
        full = store.full_score(self.task, self.split, self.search, self.model)
        scale = front[0].scale if front else "percent"
        return Pareto(self.task, self.split, self.size, tuple(front), full, scale)
