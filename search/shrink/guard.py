"""What an average score hides: endless repetition, broken JSON and tool calls, a task or a language that is lost.

The winner is checked before its export, on held-out prompts of every task and on a small general set that ships.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import TYPE_CHECKING

from moevolve.evaluators.errors import CandidateError, UserError
from moevolve.evaluators.types import Example, Matching, PreparedSplit
from moevolve.search.loop.final_table import FinalTable
from moevolve.search.operations.evaluate import prepared_split
from moevolve.search.operations.subject import Subject, find_subject
from moevolve.search.requests.shrink import ShrinkRequest
from moevolve.search.shrink.page import TaskCheck
from moevolve.search.shrink.structure import is_loop, structure_of
from moevolve.store.reader import StoreReader
from moevolve.workers.contract.edits import Edit, IdentityEdit
from moevolve.workers.contract.messages import EvaluationRequest

if TYPE_CHECKING:
    from moevolve.workers.worker import EvaluationWorker

_KNOWN = 100.0
"""Largest perplexity of the full model on a general domain that it can be said to know; others aren't judged."""


@dataclass(frozen=True, slots=True)
class _Probe:
    """Rows of one domain.

    Attributes:
        name: Name of the domain.
        split: The rows, with `agreement` as their fitness.
        recovery: Share of the full model's score; None where there is none.
        general: True for the set that ships.
    """

    name: str
    split: PreparedSplit
    recovery: float | None
    general: bool = False


def check_winner(store: StoreReader, table: FinalTable, request: ShrinkRequest) -> tuple[TaskCheck, ...]:
    """Compare the winner with the full model on held-out prompts, which both answer at temperature 0.

    Args:
        store: Store of the finished search.
        table: Its final table, with a winner.
        request: How many prompts and tokens, and the limits.

    Returns:
        A check of every task, then of every domain of the general set.

    Raises:
        UserError: The model can't be loaded, or the winner can't be run.
    """
    from moevolve.workers.checkpoints.loading import placed
    from moevolve.workers.worker import EvaluationWorker

    assert table.winner is not None
    subject = find_subject(store, table.winner)
    worker = EvaluationWorker(placed(subject.config.model), subject.config.engine)
    try:
        return tuple(_check(worker, subject.edit, probe, request) for probe in _probes(subject, table, request))
    except CandidateError as error:
        raise UserError(f"{table.winner} can't be run: {error}") from None


def _probes(subject: Subject, table: FinalTable, request: ShrinkRequest) -> Iterator[_Probe]:
    for section, task in zip(subject.config.tasks, table.tasks, strict=True):
        split = prepared_split(subject, section.name, "test")
        if split.fitness != "agreement":
            split = prepared_split(subject, f"{section.name}@agreement", "test")
        yield _Probe(task, split.head(request.guard_prompts), _recovery(table, task))
    yield from general_set()


def general_set() -> list[_Probe]:
    """The domains of the general set that ships."""
    text = (files("moevolve.configs") / "guard" / "general.jsonl").read_text(encoding="utf-8")
    domains: dict[str, list[Example]] = {}
    for row in map(json.loads, text.splitlines()):
        domains.setdefault(row["domain"], []).append(Example(row["prompt"], (row["answer"],)))

    def split(name: str, rows: list[Example]) -> PreparedSplit:
        matching = Matching()
        return PreparedSplit(f"general {name}", "test", "agreement", "mean", matching, 1, " ", tuple(rows), "answer")

    return [_Probe(name, split(name, rows), None, general=True) for name, rows in domains.items()]


def _check(worker: EvaluationWorker, edit: Edit, probe: _Probe, request: ShrinkRequest) -> TaskCheck:
    """Check one domain."""
    texts = replace(probe.split, fitness="perplexity", metric="geometric_mean", positions="text")
    full = _scores(worker, IdentityEdit(), texts)[0]
    agreement, kept = _scores(worker, edit, probe.split, texts)
    asked = _asked(probe.split, request)
    before, after = (_answers(worker, each, asked) for each in (IdentityEdit(), edit))
    known = not probe.general or full * _KNOWN >= 1
    structured = [(structure_of(old.text), structure_of(new.text)) for old, new in zip(before, after, strict=True)]
    found = TaskCheck(
        task=probe.split.task if probe.general else probe.name,
        prompts=len(asked.examples),
        loops=sum(new.loops and not old.loops for old, new in zip(before, after, strict=True)),
        structured=sum(old is not None for old, _ in structured),
        broken=sum(old is not None and new != old for old, new in structured),
        agreement=agreement,
        perplexity=full / kept if full and kept else None,
        recovery=probe.recovery,
        known=known,
    )
    return replace(found, faults=faults_of(found, request))


@dataclass(frozen=True, slots=True)
class _Answered:
    text: str
    loops: bool


def _answers(worker: EvaluationWorker, edit: Edit, asked: PreparedSplit) -> list[_Answered]:
    tokenizer = worker.resident.tokenizer
    texts = [answer.text or "" for answer in worker.answer(edit, asked)]
    return [_Answered(text, is_loop(tokenizer(text, add_special_tokens=False)["input_ids"])) for text in texts]


def _scores(worker: EvaluationWorker, edit: Edit, *splits: PreparedSplit) -> list[float]:
    reply = worker.evaluate(EvaluationRequest(edit, tuple(split.ref for split in splits)), splits)
    if reply.failure is not None:
        raise CandidateError(reply.failure)
    return [reply.results[split.fingerprint].score for split in splits]


def _asked(split: PreparedSplit, request: ShrinkRequest) -> PreparedSplit:
    """The prompts of a split, to be answered freely: nothing but the end token or the limit ends an answer."""
    # Generating takes a gold answer along, whatever it is; nothing here reads its score.
    examples = tuple(replace(example, references=example.references or ("-",)) for example in split.examples)
    return replace(
        split,
        fitness="generate",
        metric="accuracy",
        matching=Matching("contains", ()),
        max_new_tokens=request.guard_tokens,
        positions="text",
        examples=examples,
        harness=None,
        window=None,
    )


def _recovery(table: FinalTable, task: str) -> float | None:
    """The winner's score on `test` as a share of the full model's; None if there is no such share."""
    best = None if table.best is None else table.best.score(task, "test")
    full = table.full.score(task, "test")
    if best is None or full is None or best.score is None or not full.score:
        return None
    return best.score / full.score


def faults_of(check: TaskCheck, request: ShrinkRequest) -> tuple[str, ...]:
    """What is beyond the request's limits, each as the end of a sentence about the candidate."""
    if not check.known:
        return ()
    faults = []
    if check.loops > request.most_loops * check.prompts:
        faults.append(f"repeats itself in {check.loops} of {check.prompts} answers, where the full model doesn't")
    if check.broken > request.most_broken * check.structured:
        faults.append(f"lost {check.broken} of the full model's {check.structured} answers with JSON or tool calls")
    if check.perplexity is None or check.perplexity > request.most_perplexity:
        times = "far more than" if check.perplexity is None else f"{check.perplexity:.1f} times"
        faults.append(f"has {times} the full model's perplexity, more than {request.most_perplexity:g} times")
    if check.recovery is not None and check.recovery < request.least_recovery:
        faults.append(
            f"keeps {100 * check.recovery:.0f} % of the full model's score, less than {request.least_recovery:.0%}"
        )
    return tuple(faults)


def checks_table(checks: Sequence[TaskCheck]) -> str:
    """The checks as a table of a model card."""
    lines = ["Checks before the export, on held-out prompts answered at temperature 0:", ""]
    lines += ["| prompts | number | loops | JSON or tool calls lost | agreement | perplexity | of the full score |"]
    lines += ["|---|---:|---:|---:|---:|---:|---:|"]
    for check in checks:
        name = check.task if check.known else f"{check.task} (unknown to the full model)"
        lines.append(f"| {' | '.join((name, *check.cells))} |")
    return "\n".join(lines)
