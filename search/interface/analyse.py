"""How an individual uses its experts."""

from __future__ import annotations

from dataclasses import KW_ONLY
from typing import Annotated

from moevolve.evaluators.errors import UserError
from moevolve.search.interface.parameters import IndividualRef, ModelPath, Task, TaskSplit
from moevolve.search.interface.request import Request, about, record
from moevolve.search.loop.scores import FULL
from moevolve.search.results.expert_usage import Analysis, analyse
from moevolve.search.running.candidates import find_candidate, prepared_split
from moevolve.store.reader import StoreReader


@record
class AnalyseRequest(Request):
    """Count which experts a task's prompts activate, how strongly, and which together, before and after.

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
