"""Stored individuals: everything about one, its genome in columns, its lineage, and how it uses its experts."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from typing import Annotated

from moevolve.evaluators.errors import CandidateError, UserError
from moevolve.evaluators.records import short_repr
from moevolve.evaluators.types import Split
from moevolve.search.genomes.contract.outline import GenomeOutline
from moevolve.search.genomes.registry import outline_of
from moevolve.search.interface.parameters import IndividualRef, ModelPath, Task, TaskSplit
from moevolve.search.interface.request import Request, about, record
from moevolve.search.running.candidates import find_candidate, find_individual, prepared_split
from moevolve.store.reader import StoreReader
from moevolve.store.records import IndividualDetail, LineageGraph
from moevolve.workers.contract.edits import IdentityEdit
from moevolve.workers.contract.usage import Usage


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
        from moevolve.workers.worker import EvaluationWorker

        found = find_individual(store, self.individual, self.model, [self.task])
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
