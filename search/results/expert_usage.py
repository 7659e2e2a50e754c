"""How an individual routes tokens to its experts, beside the full model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from moevolve.evaluators.errors import CandidateError, UserError
from moevolve.workers.contract.edits import Edit, IdentityEdit
from moevolve.workers.contract.usage import Usage

if TYPE_CHECKING:
    from moevolve.evaluators.types import PreparedSplit
    from moevolve.search.config.run import RunConfig
    from moevolve.store.records import IndividualDetail


@dataclass(frozen=True, slots=True)
class Analysis:
    """How an individual uses its experts.

    Attributes:
        kind: Genome kind of the individual's search.
        task_fingerprint: Fingerprint of the split whose prompts and answers were run.
        before: The full model's usage; None where that has no experts to compare with.
        after: The individual's usage.
    """

    ref: str
    search_id: str
    kind: str
    task: str
    split: str
    task_fingerprint: str
    before: Usage | None = field(repr=False)
    after: Usage = field(repr=False)
    format: Literal["moevolve-analysis/3"] = "moevolve-analysis/3"


def analyse(
    detail: IndividualDetail, edit: Edit, config: RunConfig, prepared: PreparedSplit, tokens: int | None, full: bool
) -> Analysis:
    """Run an individual and, if `full`, the full model on a split's prompts and answers, in this process.

    Args:
        detail: The individual.
        edit: Its edit.
        config: Configuration of its search, with the model's place.
        prepared: The split.
        tokens: Most tokens of the split that are run; None runs all.
        full: Whether the full model has experts to compare with.

    Raises:
        UserError: the individual can't be run.
    """
    from moevolve.workers.worker import EvaluationWorker

    worker = EvaluationWorker(config.model, config.engine)
    try:
        after = worker.analyse(edit, prepared, tokens)
    except CandidateError as error:
        raise UserError(f"{detail.ref} can't be run: {error}") from None
    return Analysis(
        ref=detail.ref,
        search_id=detail.search.id,
        kind=detail.search.genome_kind,
        task=prepared.task,
        split=prepared.split,
        task_fingerprint=prepared.fingerprint,
        before=worker.analyse(IdentityEdit(), prepared, tokens) if full else None,
        after=after,
    )
