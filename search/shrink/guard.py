"""What an average score hides: endless repetition, and a task that is lost. The winner is checked before its export."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from moevolve.evaluators.errors import CandidateError, UserError
from moevolve.evaluators.types import Matching, PreparedSplit
from moevolve.search.loop.final_table import FinalTable
from moevolve.search.operations.evaluate import prepared_split
from moevolve.search.operations.subject import Subject, find_subject
from moevolve.search.requests.shrink import ShrinkRequest
from moevolve.search.shrink.page import TaskCheck
from moevolve.store.reader import StoreReader
from moevolve.workers.contract.edits import Edit, IdentityEdit
from moevolve.workers.contract.messages import EvaluationRequest

_GRAM = 4
_FEWEST_TOKENS = 16
"""Fewest tokens of an answer that can be called a loop."""
_LOOP_RATIO = 0.55
"""Share of different 4-grams of tokens below which an answer is a loop; pruned models that repeat themselves have less.
"""


def check_winner(store: StoreReader, table: FinalTable, request: ShrinkRequest) -> tuple[TaskCheck, ...]:
    """Let the winner and the full model answer held-out prompts of every task at temperature 0, and compare them.

    Args:
        store: Store of the finished search.
        table: Its final table, with a winner.
        request: How many prompts and tokens, and the limits.

    Raises:
        UserError: The model can't be loaded, or the winner can't be run.
    """
    from moevolve.workers.checkpoints.loading import placed
    from moevolve.workers.worker import EvaluationWorker

    assert table.winner is not None
    subject = find_subject(store, table.winner)
    worker = EvaluationWorker(placed(subject.config.model), subject.config.engine)
    tokenizer = worker.resident.tokenizer

    def loops(edit: Edit, split: PreparedSplit) -> list[bool]:
        answers = worker.answer(edit, split)
        return [is_loop(tokenizer(answer.text or "", add_special_tokens=False)["input_ids"]) for answer in answers]

    checks = []
    try:
        for section, task in zip(subject.config.tasks, table.tasks, strict=True):
            asked = _asked(prepared_split(subject, section.name, "test"), request)
            pairs = zip(loops(IdentityEdit(), asked), loops(subject.edit, asked), strict=True)
            begun = sum(now and not before for before, now in pairs)
            compared = _compared(subject, section.name, len(asked.examples))
            reply = worker.evaluate(EvaluationRequest(subject.edit, (compared.ref,)), (compared,))
            if reply.failure is not None:
                raise CandidateError(reply.failure)
            agreement = reply.results[compared.fingerprint].score
            checks.append(_verdict(task, len(asked.examples), begun, agreement, _recovery(table, task), request))
    except CandidateError as error:
        raise UserError(f"{table.winner} can't be run: {error}") from None
    return tuple(checks)


def is_loop(tokens: Sequence[int]) -> bool:
    """Tell whether an answer repeats itself: too few of its 4-grams of tokens differ."""
    grams = [tuple(tokens[start : start + _GRAM]) for start in range(len(tokens) - _GRAM + 1)]
    return len(tokens) >= _FEWEST_TOKENS and len(set(grams)) < _LOOP_RATIO * len(grams)


def _asked(split: PreparedSplit, request: ShrinkRequest) -> PreparedSplit:
    """The first prompts of a split, to be answered freely: nothing but the end token or the limit ends an answer."""
    head = split.head(request.guard_prompts)
    # Generating takes a gold answer along, whatever it is; nothing here reads its score.
    examples = tuple(replace(example, references=example.references or ("-",)) for example in head.examples)
    return replace(
        head,
        fitness="generate",
        metric="accuracy",
        matching=Matching("contains", ()),
        max_new_tokens=request.guard_tokens,
        positions="text",
        examples=examples,
        harness=None,
        window=None,
    )


def _compared(subject: Subject, name: str, rows: int) -> PreparedSplit:
    """The first rows of a task, to be scored by their agreement with the full model."""
    split = prepared_split(subject, name, "test")
    if split.fitness != "agreement":
        split = prepared_split(subject, f"{name}@agreement", "test")
    return split.head(rows)


def _recovery(table: FinalTable, task: str) -> float | None:
    """The winner's score on `test` as a share of the full model's; None if there is no such share."""
    best = None if table.best is None else table.best.score(task, "test")
    full = table.full.score(task, "test")
    if best is None or full is None or best.score is None or not full.score:
        return None
    return best.score / full.score


def _verdict(
    task: str, prompts: int, loops: int, agreement: float, recovery: float | None, request: ShrinkRequest
) -> TaskCheck:
    faults = []
    if loops > request.most_loops * prompts:
        faults.append(f"repeats itself in {loops} of {prompts} answers, where the full model doesn't")
    if recovery is not None and recovery < request.least_recovery:
        faults.append(f"keeps {100 * recovery:.0f} % of the full model's score, less than {request.least_recovery:.0%}")
    return TaskCheck(task, prompts, loops, agreement, recovery, tuple(faults))
