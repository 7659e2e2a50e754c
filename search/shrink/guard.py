"""What an average score hides: endless repetition, broken JSON and tool calls, a task or a language that is lost.

The winner is checked before its export, on held-out prompts of every task and on a small general set that ships.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import TypeAdapter

from moevolve.evaluators.errors import CandidateError, UserError
from moevolve.evaluators.types import Example, Matching, PreparedSplit
from moevolve.search.loop.final_table import FinalTable
from moevolve.search.operations.answers import prepared_split
from moevolve.search.operations.subject import Subject
from moevolve.search.requests.shrink import ShrinkRequest
from moevolve.search.shrink.page import TaskCheck
from moevolve.workers.contract.edits import Edit, IdentityEdit
from moevolve.workers.contract.messages import EvaluationRequest

if TYPE_CHECKING:
    from moevolve.workers.worker import EvaluationWorker

_KNOWN = 100.0
"""Perplexity of the full model above which it doesn't know a general domain, which then isn't judged."""
_FEWEST = 2
"""Fewest loops or broken answers that are a fault. A single one may be chance where prompts are few."""
_GRAM = 4
_FEWEST_TOKENS = 16
"""Fewest tokens of an answer that can be called a loop."""
_LOOP_RATIO = 0.55
"""Share of different 4-grams of tokens below which an answer is a loop; pruned models that repeat themselves have less.
"""


@dataclass(frozen=True, slots=True)
class Probe:
    """Rows of one domain.

    Attributes:
        split: The rows, with `agreement` as their fitness.
        recovery: Share of the full model's score; None where there is none.
        general: True for the set that ships.
        graded: True if answers of this task are right or wrong.
        unscored: See `TaskCheck`.
    """

    name: str
    split: PreparedSplit
    recovery: float | None
    general: bool = False
    graded: bool = False
    unscored: str | None = None


_ADAPTER = TypeAdapter(tuple[tuple[str, str | None, int, int], tuple[TaskCheck, ...]])
"""Kept checks, after what they were made of: search, winner, and numbers of prompts and tokens."""


def check_winner(subject: Subject, table: FinalTable, request: ShrinkRequest, path: Path) -> tuple[TaskCheck, ...]:
    """Compare the winner with the full model on held-out prompts, which both answer at temperature 0.

    The file at `path` keeps the result, so that a request with other limits loads no model again.

    Returns:
        A check of every task, then of every domain of the general set.
    """
    of = subject.search.id, table.winner, request.guard_prompts, request.guard_tokens
    kept_of, checks = _ADAPTER.validate_json(path.read_bytes()) if path.is_file() else (None, ())
    if kept_of != of:
        checks = _answered(subject, table, request)
        path.write_bytes(_ADAPTER.dump_json((of, checks)))
    return tuple(replace(check, faults=faults_of(check, request)) for check in checks)


def _answered(subject: Subject, table: FinalTable, request: ShrinkRequest) -> tuple[TaskCheck, ...]:
    """The checks, made with a worker in this process."""
    from moevolve.workers.checkpoints.loading import placed
    from moevolve.workers.worker import EvaluationWorker

    worker = EvaluationWorker(placed(subject.config.model), subject.config.engine)
    probes = [*_held_out(subject, table, request), *general_set()]
    try:
        return check_edit(worker, subject.edit, probes, request)
    except CandidateError as error:
        raise UserError(f"{table.winner} can't be run: {error}") from None


def check_edit(
    worker: EvaluationWorker, edit: Edit, probes: Sequence[Probe], request: ShrinkRequest
) -> tuple[TaskCheck, ...]:
    """Compare an edited model with the unedited one on each domain."""
    before, after = (_measured(worker, each, probes, request) for each in (IdentityEdit(), edit))
    return tuple(_check(*each, request) for each in zip(probes, before, after, strict=True))


def _held_out(subject: Subject, table: FinalTable, request: ShrinkRequest) -> Iterator[Probe]:
    for section, task in zip(subject.config.tasks, table.tasks, strict=True):
        split = prepared_split(subject, section.name, "test")
        graded = split.metric == "accuracy"
        if split.fitness != "agreement":
            split = prepared_split(subject, f"{section.name}@agreement", "test")
        rows, recovery, unscored = split.head(request.guard_prompts), _recovery(table, task), _unscored(table, task)
        yield Probe(task, rows, recovery, graded=graded, unscored=unscored)


def general_set() -> list[Probe]:
    """The domains of the general set that ships."""
    text = (files("moevolve.configs") / "guard" / "general.jsonl").read_text(encoding="utf-8")
    domains: dict[str, list[Example]] = {}
    for row in map(json.loads, text.splitlines()):
        domains.setdefault(row["domain"], []).append(Example(row["prompt"], (row["answer"],)))

    probes = []
    for name, rows in domains.items():
        title = f"general {name}"
        split = PreparedSplit(title, "test", "agreement", "mean", Matching(), 1, " ", tuple(rows), "answer")
        probes.append(Probe(title, split, None, general=True))
    return probes


@dataclass(frozen=True, slots=True)
class _Measured:
    """One model on the rows of one domain.

    Attributes:
        agreement: Score of the probe's split.
        texts: Reciprocal perplexity of its prompts and answers; 0 if the perplexity isn't finite.
        answers: Free answers to its prompts, each with whether it is a loop.
    """

    agreement: float
    texts: float
    answers: tuple[tuple[str, bool], ...]


def _check(probe: Probe, before: _Measured, after: _Measured, request: ShrinkRequest) -> TaskCheck:
    pairs = list(zip(before.answers, after.answers, strict=True))
    structured = [(structure_of(old), structure_of(new)) for (old, _), (new, _) in pairs]
    found = TaskCheck(
        task=probe.name,
        prompts=len(pairs),
        loops=sum(now and not then for (_, then), (_, now) in pairs),
        structured=sum(old is not None for old, _ in structured),
        broken=sum(old is not None and new != old for old, new in structured),
        agreement=after.agreement,
        perplexity=before.texts / after.texts if before.texts and after.texts else None,
        recovery=probe.recovery,
        known=not probe.general or before.texts * _KNOWN >= 1,
        graded=probe.graded,
        unscored=probe.unscored,
    )
    return replace(found, faults=faults_of(found, request))


def _measured(
    worker: EvaluationWorker, edit: Edit, probes: Sequence[Probe], request: ShrinkRequest
) -> Iterator[_Measured]:
    """Measure a model on all domains. The edit is applied twice, however many there are: it may be a repair."""
    texts = [replace(each.split, fitness="perplexity", metric="geometric_mean", positions="text") for each in probes]
    splits = (*(each.split for each in probes), *texts)
    reply = worker.evaluate(EvaluationRequest(edit, tuple(split.ref for split in splits)), splits)
    if reply.failure is not None:
        raise CandidateError(reply.failure)
    scores = [reply.results[split.fingerprint].score for split in splits]
    answered = worker.answer(edit, *(_asked(each.split, request) for each in probes))
    tokenizer = worker.resident.tokenizer
    for agreement, text, answers in zip(scores[: len(probes)], scores[len(probes) :], answered, strict=True):
        said = [answer.text or "" for answer in answers]
        loops = [is_loop(tokenizer(each, add_special_tokens=False)["input_ids"]) for each in said]
        yield _Measured(agreement, text, tuple(zip(said, loops, strict=True)))


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


def _unscored(table: FinalTable, task: str) -> str | None:
    """Why the winner, or the full model, has no score on `test`; None if both have one or none was asked for."""
    scores = [entry.score(task, "test") for entry in (table.best, table.full) if entry is not None]
    return next((score.failure for score in scores if score is not None and score.failure is not None), None)


def faults_of(check: TaskCheck, request: ShrinkRequest) -> tuple[str, ...]:
    """What exceeds the request's limits, each as the end of a sentence that begins with the candidate."""
    if not check.known:
        return ()
    faults = []
    if _too_many(check.loops, check.prompts, request.most_loops):
        faults.append(f"repeats itself in {check.loops} of {check.prompts} answers, where the full model doesn't")
    if _too_many(check.broken, check.structured, request.most_broken):
        faults.append(f"lost {check.broken} of the full model's {check.structured} answers with JSON or tool calls")
    if check.perplexity is None or (check.perplexity > request.most_perplexity and not check.graded):
        times = "far more than" if check.perplexity is None else f"{check.perplexity:.1f} times"
        faults.append(f"has {times} the full model's perplexity, more than {request.most_perplexity:g} times")
    if check.unscored is not None:
        faults.append(f"can't be compared with the full model on `test`: {check.unscored}")
    if check.recovery is not None and check.recovery < request.least_recovery:
        faults.append(
            f"keeps {100 * check.recovery:.0f} % of the full model's score, less than {request.least_recovery:.0%}"
        )
    return tuple(faults)


def _too_many(count: int, among: int, share: float) -> bool:
    return count >= _FEWEST and count > share * among


def checks_table(checks: Sequence[TaskCheck]) -> str:
    """The checks as a table of a model card."""
    lines = ["Checks before the export, on held-out prompts answered at temperature 0:", ""]
    lines += ["| prompts | number | loops | JSON or tool calls lost | agreement | perplexity | of the full score |"]
    lines += ["|---|---:|---:|---:|---:|---:|---:|"]
    for check in checks:
        name = check.task if check.known else f"{check.task} (unknown to the full model)"
        lines.append(f"| {' | '.join((name, *check.cells))} |")
    return "\n".join(lines)


def is_loop(tokens: Sequence[int]) -> bool:
    """Tell whether an answer repeats itself: too few of its 4-grams of tokens differ."""
    grams = [tuple(tokens[start : start + _GRAM]) for start in range(len(tokens) - _GRAM + 1)]
    return len(tokens) >= _FEWEST_TOKENS and len(set(grams)) < _LOOP_RATIO * len(grams)


def structure_of(answer: str) -> Literal["call", "json"] | None:
    """Tell whether an answer contains a call of a tool, or another JSON object or array; None if it has neither.

    A call is an object with `name`, and `arguments` or `parameters` that are an object. What stands around it, such as
    the marks of a chat template or of a code block, doesn't matter.
    """
    found: Any = None
    for match in re.finditer(r"[{\[]", answer):
        try:
            found, _ = json.JSONDecoder().raw_decode(answer, match.start())
        except ValueError:
            continue
        break
    if not found or not isinstance(found, dict | list):
        return None
    first = found[0] if isinstance(found, list) else found
    called = isinstance(first, dict) and isinstance(first.get("name"), str)
    return "call" if called and any(isinstance(first.get(key), dict) for key in ("arguments", "parameters")) else "json"
