"""What was found: searches beside each other, what moved the score in one, and how an individual uses its experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY
from typing import Annotated

from pydantic import Field

from moevolve.evaluators.errors import UserError
from moevolve.search.config.run import LONGEST_NAME
from moevolve.search.interface.parameters import IndividualRef, ModelPath, SearchRef, Task, TaskSplit
from moevolve.search.interface.request import Flag, Request, about, record
from moevolve.search.loop.scores import FULL
from moevolve.search.results.comparison import Comparison, compare_searches
from moevolve.search.results.effects import Effects, effects
from moevolve.search.results.expert_usage import Analysis, analyse
from moevolve.search.running.candidates import find_candidate, prepared_split
from moevolve.store.reader import StoreReader
from moevolve.store.records import CourseAxis


@record
class CompareRequest(Request):
    """Show searches beside each other: their courses, the settings that differ, their winners' scores and paired tests.

    Searches that differ only in the seed are a group, whose mean and range are shown. Nothing is evaluated.

    Raises:
        StoreError: there is no such store or search.
    """

    route = "/compare"
    searches: Annotated[
        Sequence[Annotated[str, Field(max_length=LONGEST_NAME)]],
        about("Names or ids of the searches; tests are against the first.", min_length=1, max_length=64),
        Flag(metavar="SEARCH...", kind=list[str]),
    ]
    _: KW_ONLY
    by: Annotated[
        CourseAxis, about("What courses are shown over: evaluated individuals, or hours in which the search ran.")
    ] = "evaluations"

    def answer(self, store: StoreReader) -> Comparison:
        return compare_searches(store, self.searches, self.by)


@record
class EffectsRequest(Request):
    """Estimate what moved the score in a search: operators, layers, experts and settings, with 95 % intervals.

    Scores are explained by a sum over what genomes choose, fitted by Bayesian linear regression. Nothing is evaluated.

    Raises:
        StoreError: there is no such store or search.
        UserError: the search was stored without the facts of its model.
    """

    route = "/searches/{search}/effects"
    search: SearchRef
    _: KW_ONLY
    limit: Annotated[int, about("List at most this many options, the surest ones first.", ge=1, le=1000)] = 20
    genes: Annotated[
        bool, about("List the varying settings and sizes of each individual, too, for a chart."), Flag("--genes")
    ] = False

    def answer(self, store: StoreReader) -> Effects:
        return effects(store, self.search, self.limit, self.genes)


@record
class AnalyseRequest(Request):
    """Count which experts a task's prompts activate in the full model and an individual, how strongly and together.

    Raises:
        UserError: there is no such task or split, or the individual can't be run.
        StoreError: there is no such store or individual.
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
        found = find_candidate(store, self.individual, model=self.model, task=self.task)
        return analyse(found, prepared_split(found, self.task, self.split), self.tokens)
