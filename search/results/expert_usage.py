"""How an individual routes tokens to its experts, beside the full model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from moevolve.evaluators.errors import CandidateError, UserError
from moevolve.evaluators.records import short_repr
from moevolve.workers.contract.edits import IdentityEdit
from moevolve.workers.contract.usage import Usage

if TYPE_CHECKING:
    from moevolve.evaluators.types import PreparedSplit
    from moevolve.search.running.candidates import Candidate


@dataclass(frozen=True, slots=True)
class Analysis:
    """How an individual uses its experts.

    Attributes:
        kind: Genome kind of the individual's search.
        task_fingerprint: Fingerprint of the split whose prompts and answers were run.
        before: The full model's usage; None where that has no experts to compare with.
        after: The individual's usage.
    """

    __repr__ = short_repr

    ref: str
    search_id: str
    kind: str
    task: str
    split: str
    task_fingerprint: str
    before: Usage | None = field(repr=False)
    after: Usage = field(repr=False)
    format: Literal["moevolve-analysis/3"] = "moevolve-analysis/3"


def analyse(candidate: Candidate, prepared: PreparedSplit, tokens: int | None) -> Analysis:
    """Run an individual and, if that has experts, the full model on a split's prompts and answers, in this process.

    Args:
        candidate: The individual.
        prepared: The split.
        tokens: Most tokens of the split that are run; None runs all.

    Raises:
        UserError: the individual can't be run.
    """
    from moevolve.workers.worker import EvaluationWorker

    detail = candidate.detail
    assert detail is not None
    worker = EvaluationWorker(candidate.config.model, candidate.config.engine)
    try:
        after = worker.analyse(candidate.edit, prepared, tokens)
    except CandidateError as error:
        raise UserError(f"{detail.ref} can't be run: {error}") from None
    return Analysis(
        ref=detail.ref,
        search_id=detail.search.id,
        kind=detail.search.genome_kind,
        task=prepared.task,
        split=prepared.split,
        task_fingerprint=prepared.fingerprint,
        before=worker.analyse(IdentityEdit(), prepared, tokens) if candidate.facts.moe_layers else None,
        after=after,
    )
