"""On which rows of a split two models are right, from stored evaluations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Annotated, Any, Literal, Self

import numpy as np

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.fitness.scoring import Answer
from moevolve.evaluators.types import Example, Split
from moevolve.search.config.run import LONGEST_NAME
from moevolve.search.interface.parameters import IndividualRef, Task, TaskSplit
from moevolve.search.interface.request import Request, about, record
from moevolve.search.loop.scores import FULL, outcomes_of
from moevolve.search.running.candidates import find_candidate, prepared_split
from moevolve.store.reader import StoreReader
from moevolve.store.records import FULL_MODEL, EvaluationRecord, IndividualDetail

AnswerFilter = Literal["differing", "lost", "gained", "wrong", "both_wrong"]
Only = Annotated[
    AnswerFilter | None,
    about(
        "Only rows where an individual answers otherwise than the model it is compared with "
        "(`differing`), scores below (`lost`) or above it (`gained`), isn't fully right (`wrong`), or neither is "
        "(`both_wrong`). `answers` then runs the whole split, unless rows are named."
    ),
]


SELECTS: Mapping[AnswerFilter, Callable[[Any, Any], Any]] = {
    "differing": lambda full, other: other != full,
    "lost": lambda full, other: other < full,
    "gained": lambda full, other: other > full,
    "wrong": lambda full, other: other < 1,
    "both_wrong": lambda full, other: (full < 1) & (other < 1),
}
"""Which pairs of outcomes a filter selects, given as numbers or as arrays."""


@dataclass(frozen=True, slots=True)
class AnsweredRow:
    """One row of a split, and what models answered.

    Attributes:
        row: Index in the split, from 0.
        prompt: Text of the task, without a chat template.
        references: Accepted answers, the gold one first.
        choices: The closed set of answers; empty where answers are open.
        answers: One for each model, in their order.
    """

    row: int
    prompt: str
    references: tuple[str, ...]
    choices: tuple[str, ...]
    answers: tuple[Answer, ...]

    @classmethod
    def of(cls, row: int, example: Example, answers: tuple[Answer, ...]) -> Self:
        """Make a row of an example and its answers."""
        return cls(row, example.prompt, example.references, example.choices, answers)


@dataclass(frozen=True, slots=True)
class Outcomes:
    """On which rows of a split two models are right.

    Attributes:
        models: The model that the individual is compared with, and the individual.
        examples: Number of rows of the split.
        counts: Number of rows by what `only` may be.
        found: Number of rows that the request selects, of which `rows` are shown.
        rows: Rows with outcomes and without answers' texts.
        note: Why there are no prompts; empty if there are.
    """

    task: str
    split: Split
    models: tuple[str, str]
    examples: int
    counts: dict[str, int]
    found: int
    rows: tuple[AnsweredRow, ...] = field(repr=False)
    note: str = ""


@record
class OutcomesRequest(Request):
    """Show on which rows an individual and another model are right, from stored evaluations. Nothing is run.

    Prompts and right answers are read from the task's data; where those can't be had, only the outcomes are shown.

    Raises:
        UserError: one of the two wasn't scored on the split, or its outcomes weren't kept.
        StoreError: there is no such store or individual.
    """

    route = "/individuals/{individual}/outcomes"
    individual: IndividualRef
    _: KW_ONLY
    task: Task
    split: TaskSplit = "test"
    against: Annotated[
        str,
        about(
            "The model to compare with: `full`, or another individual as SEARCH:INDEX.", max_length=LONGEST_NAME + 20
        ),
    ] = "full"
    only: Only = None
    limit: Annotated[int, about("Show at most this many rows.", ge=1, le=1000)] = 25
    offset: Annotated[int, about("Leave this many of the rows out that would come first.", ge=0)] = 0

    def answer(self, store: StoreReader) -> Outcomes:
        detail = store.individual(self.individual)
        mine, theirs = self._stored_pair(store, detail)
        pair = np.stack([outcomes_of(theirs), outcomes_of(mine)])
        chosen = {name: np.flatnonzero(selects(*pair)) for name, selects in SELECTS.items()}
        places = np.arange(pair.shape[1]) if self.only is None else chosen[self.only]
        shown = places[self.offset : self.offset + self.limit].tolist()
        examples, note = _examples(store, detail.ref, mine)
        answered = [tuple(Answer(None, (), outcome) for outcome in pair[:, row].tolist()) for row in shown]
        asked = [Example("", ()) if examples is None else examples[row] for row in shown]
        return Outcomes(
            task=mine.task,
            split=self.split,
            models=(self.against, detail.ref),
            examples=pair.shape[1],
            counts={name: len(rows) for name, rows in chosen.items()},
            found=len(places),
            rows=tuple(map(AnsweredRow.of, shown, asked, answered)),
            note=note,
        )

    def _stored_pair(self, store: StoreReader, detail: IndividualDetail) -> tuple[EvaluationRecord, EvaluationRecord]:
        """The evaluations of an individual and of the model that it is compared with, on the same rows."""
        wanted = [one for one in detail.evaluations if (one.task, one.split) == (self.task, self.split)]
        mine = self._with_outcomes(wanted, detail.ref)
        if self.against == FULL:
            search, phenotype = detail.search, FULL_MODEL
        else:
            other = store.individual(self.against)
            search, phenotype = other.search, other.individual.phenotype_hash
        prints = search.model_fingerprint, search.engine_fingerprint
        found = store.evaluations(phenotype, *prints, [mine.task_fingerprint])
        return mine, self._with_outcomes(found, self.against)

    def _with_outcomes(self, found: Sequence[EvaluationRecord], name: str) -> EvaluationRecord:
        """The last evaluation that has outcomes."""
        kept = [one for one in found if one.outcomes]
        if not kept:
            command = f"moevolve evaluate {name} --task {self.task} --split {self.split}"
            raise UserError(f"{name} has no stored outcomes on {self.task} ({self.split}): `{command}` stores them")
        return kept[-1]


def _examples(store: StoreReader, ref: str, evaluation: EvaluationRecord) -> tuple[Sequence[Example] | None, str]:
    """The examples that an evaluation was about; or None, and why they can't be had."""
    try:
        prepared = prepared_split(find_candidate(store, ref, weights=False), evaluation.task, evaluation.split)
    except UserError as error:
        return None, f"The prompts can't be read: {error}"
    if prepared.window is not None:
        return None, "Outcomes are of windows of running text, which have no prompts."
    if prepared.fingerprint != evaluation.task_fingerprint:
        return None, "The task's data is another one now than that which was scored."
    return prepared.examples, ""
