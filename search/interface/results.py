"""What was found: searches beside each other, what moved the score in one, and how an individual uses its experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Annotated

from pydantic import Field

from moevolve.evaluators.errors import CandidateError, UserError
from moevolve.evaluators.records import short_repr
from moevolve.evaluators.types import Split
from moevolve.search.config.run import LONGEST_NAME
from moevolve.search.interface.parameters import IndividualRef, ModelPath, SearchRef, Task, TaskSplit
from moevolve.search.interface.request import Flag, Request, about, record
from moevolve.search.loop.scores import FULL
from moevolve.search.results.comparison import Comparison, compare_searches
from moevolve.search.results.effects import Effects, effects
from moevolve.search.running.candidates import find_candidate, prepared_split
from moevolve.store.reader import StoreReader
from moevolve.workers.contract.edits import IdentityEdit
from moevolve.workers.contract.usage import Usage


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


@dataclass(frozen=True, slots=True)
class Analysis:
    """How a split's prompts and answers use an individual's experts.

    Attributes:
        before: The full model's usage; None where that has no experts to compare with.
    """

    __repr__ = short_repr

    ref: str
    task: str
    split: Split
    before: Usage | None = field(repr=False)
    after: Usage = field(repr=False)


@record
class AnalyseRequest(Request):
    """Count which experts a task's prompts activate in the full model and an individual, how strongly and together.

    Raises:
        UserError: the task or split doesn't exist, or the individual can't be run.
        StoreError: the store or individual doesn't exist.
    """

    individual: IndividualRef
    _: KW_ONLY
    task: Task
    split: TaskSplit = "dev"
    tokens: Annotated[int | None, about("Stop after about this many tokens; default: run all.", ge=1)] = None
    model: ModelPath = None

    def answer(self, store: StoreReader) -> Analysis:
        if self.individual == FULL:
            raise UserError(f"{FULL}: an analysis compares an individual with the full model; name one as SEARCH:INDEX")
        from moevolve.workers.worker import EvaluationWorker

        found = find_candidate(store, self.individual, model=self.model, tasks=[self.task])
        split = prepared_split(found, self.task, self.split)
        worker = EvaluationWorker(found.config.model, found.config.engine)
        try:
            after = worker.analyse(found.edit, split, self.tokens)
        except CandidateError as error:
            raise UserError(f"{self.individual} can't be run: {error}") from None
        if not after.routed:
            raise UserError(f"{self.individual} has no experts to choose among")
        before = worker.analyse(IdentityEdit(), split, self.tokens) if found.facts.moe_layers else None
        return Analysis(self.individual, split.task, split.split, before, after)
