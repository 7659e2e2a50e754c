"""What an average score hides: endless repetition, broken JSON and tool calls, a task or a language that is lost.

The winner is checked before its export, on held-out prompts of every task and on a small general set that ships.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from itertools import islice
from typing import TYPE_CHECKING, Literal, NamedTuple

from moevolve.evaluators.errors import CandidateError, UserError
from moevolve.evaluators.fitness.base import SHORT_ANSWER
from moevolve.evaluators.fitness.kinds import FITNESSES
from moevolve.evaluators.metrics import scale_of
from moevolve.evaluators.preparation.registry import split_fitness
from moevolve.evaluators.scales import SCALES
from moevolve.evaluators.types import Example, Matching, PreparedSplit
from moevolve.search.loop.final_table import FinalTable
from moevolve.search.running.candidates import Candidate, prepared_split
from moevolve.search.shrink.findings import TaskCheck
from moevolve.search.shrink.loops import END_TOKENS, Loops, compared, counted, is_loop
from moevolve.search.shrink.record import Checks
from moevolve.workers.contract.capacity import experts_room
from moevolve.workers.contract.edits import Edit, IdentityEdit
from moevolve.workers.contract.messages import EvaluationRequest

if TYPE_CHECKING:
    from moevolve.evaluators.fitness.scoring import Answer
    from moevolve.workers.worker import EvaluationWorker

# Perplexity of the full model above which it doesn't know a general domain, which then isn't judged.
_KNOWN = 100.0
# Pruning GLM-5.2 from 256 to 168 experts doubled its loops, from 3.6 to 7.2 % of answers. If two models with these
# shares loop independently, which is the hardest case, the candidate alone loops on 6.9 % of prompts and the full model
# alone on 3.3 %. McNemar's exact test of these two numbers, one-sided at 0.05, then has a power of 0.80 with 530
# prompts, summed over their distribution. With 3.6 % for both, it finds more by chance with a probability of 0.04.
_PROMPTS = 530
# A tenth of the full model's answers with JSON or calls without them breaks what reads them, and a single one may be
# chance where answers are few.
_MOST_BROKEN, _FEWEST_BROKEN = 0.1, 2
# Where the full model doesn't answer, of expected answers: it might itself ask back, or answer some of these prompts in
# words. But a form that is lost is lost nearly everywhere.
_MOST_UNLIKE = 0.5
# A quarter of the experts, unrepaired, has 2.4 times the full model's perplexity on text that it was chosen for (the
# README at the top): with more a domain is lost.
_MOST_PERPLEXITY = 3.0
# A task of whose score less than half is left is lost, and not only harder.
_LEAST_RECOVERY = 0.5
# Prompts of every domain that are compared by perplexity and agreement, and the fewest that are answered however long
# that takes, if there are so many.
_ROWS = 16
# Fewest characters of a row that is made of running text, where a task reads windows: a hundred tokens or more.
PIECE = 500
# Tokens of the longest answers, if the data has no longer ones and there is time, and the fewest if there isn't.
_LONG, _SHORT = 512, 48
_END_OF_THOUGHTS = "</think>"
# Calls of tools as templates write them that don't put an object with the name of the tool into JSON.
_CALLS = re.compile(
    r"<function=[^>]+>.*?</function>"  # Qwen3-Coder
    r"|<tool_call>\s*[\w.-]+\s*(<arg_key>.*?</arg_value>\s*)*</tool_call>"  # GLM
    r"|<\S*invoke name=.*?invoke>"  # MiniMax, DeepSeek V3.2
    r"|<｜tool▁call▁begin｜>.*?<｜tool▁call▁end｜>"  # DeepSeek
    r"|<\|tool_call_begin\|>.*?<\|tool_call_end\|>",  # Kimi
    re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Probe:
    """Rows of one domain, with `agreement` as their fitness, and what is known of the winner before it answers them."""

    split: PreparedSplit
    check: TaskCheck


OnStage = Callable[[str], None]
Structure = Literal["call", "json"]


def check_winner(
    subject: Candidate,
    table: FinalTable,
    seconds: float,
    load: Callable[[], EvaluationWorker],
    on_stage: OnStage = lambda _: None,
) -> Checks:
    """Compare the winner with the full model on held-out prompts, which they answer at temperature 0.

    Args:
        subject: The winner.
        table: Final table of its search.
        seconds: Longest time for the answers.
        load: Makes the worker that answers.
        on_stage: Called with a line about each step.
    """
    assert table.winner is not None and table.best is not None and table.best.parameters is not None
    size = table.best.parameters * subject.facts.dtype_bytes
    probes = [*_held_out(subject, table), *general_set()]
    try:
        checks, loops = check_edit(load(), subject.edit, probes, seconds, size, on_stage)
    except CandidateError as error:
        raise UserError(f"{table.winner} can't be run: {error}") from None
    return Checks(table.winner, seconds, checks, loops)


def check_edit(
    worker: EvaluationWorker,
    edit: Edit,
    probes: Sequence[Probe],
    seconds: float,
    size: int,
    on_stage: OnStage = lambda _: None,
) -> tuple[tuple[TaskCheck, ...], Loops | None]:
    """Compare an edited model, whose weights take `size` bytes, with the unedited one on each domain.

    Where the unedited model's experts aren't on the device, the edited one answers alone, or neither if it doesn't fit.
    """
    # What is compared with the unedited model's predictions needs these first.
    before, after = (_scores(worker, each, probes) for each in (IdentityEdit(), edit))
    known = [not probe.check.general or texts * _KNOWN >= 1 for probe, (_, texts) in zip(probes, before, strict=True)]
    asked = [probe.split if each else probe.split.head(0) for probe, each in zip(probes, known, strict=True)]
    answered: list[list[tuple[_Answer, ...]]] = [[] for _ in asked]
    loops: Loops | None = None
    edits: tuple[Edit, ...] = (IdentityEdit(), edit)
    if worker.resident.one_layer_at_a_time:
        # Every token of the unedited model's answers would take all experts from where they are.
        edits = (edit,) if size <= experts_room(worker.resident.device) else ()
    if edits:
        answered, loops = _answers(worker, edits, asked, seconds, on_stage)
    checks = []
    for probe, each, (_, old), (agreement, new), answers in zip(probes, known, before, after, answered, strict=True):
        structured = _structures(probe.split, answers, 0 if loops is None else loops.tokens)
        check = replace(
            probe.check,
            prompts=len(answers),
            loops_full=sum(full.loop for full, _ in answers) if len(edits) == 2 else None,
            loops=sum(given[-1].loop for given in answers),
            structured=sum(one is not None for one, _ in structured),
            broken=sum(one is not None and other != one for one, other in structured),
            agreement=agreement,
            perplexity=old / new if old and new else None,
            known=each,
        )
        checks.append(replace(check, faults=faults_of(check)))
    return tuple(checks), loops


def _held_out(subject: Candidate, table: FinalTable) -> Iterator[Probe]:
    """Return the `test` split of every task, with what the final table has on it."""
    for section, task in zip(subject.config.tasks, table.tasks, strict=True):
        split = prepared_split(subject, section.name, "test")
        graded, scale = FITNESSES[split.fitness].reads != "texts", scale_of(split.metric)
        if split.fitness != "agreement":
            split = prepared_split(subject, f"{split_fitness(section.name)[0]}@agreement", "test")
        split = split.without_window(PIECE)
        recovery, unscored = recovery_of(table, task)
        yield Probe(split, TaskCheck(task, recovery=recovery, graded=graded, unscored=unscored, scale=scale))


def recovery_of(table: FinalTable, task: str) -> tuple[float | None, str | None]:
    """Return the winner's score on `test` as a share of the full model's, and why it is missing; None if unknown."""
    best, full = (None if entry is None else entry.score(task, "test") for entry in (table.best, table.full))
    failure = next((each.failure for each in (best, full) if each is not None and each.failure is not None), None)
    if failure is None and full is not None and full.score == 0:
        return None, "the full model's own score is 0"
    if best is None or full is None or best.score is None or full.score is None:
        return None, failure
    return best.score / full.score, failure


def general_set() -> list[Probe]:
    """Return the domains of the general set that ships."""
    text = (files("moevolve.configs") / "guard" / "general.jsonl").read_text(encoding="utf-8")
    domains: dict[str, list[Example]] = {}
    for row in map(json.loads, text.splitlines()):
        domains.setdefault(row["domain"], []).append(Example(row["prompt"], (row["answer"],)))

    probes = []
    for name, rows in domains.items():
        title = f"general {name}"
        split = PreparedSplit(title, "test", "agreement", "mean", Matching(), 1, " ", tuple(rows), "answer")
        probes.append(Probe(split, TaskCheck(title, general=True)))
    return probes


def _scores(worker: EvaluationWorker, edit: Edit, probes: Sequence[Probe]) -> list[tuple[float, float]]:
    """Return every domain's score on its first rows, and the reciprocal perplexity of their prompts and answers.

    The latter is 0 if the perplexity isn't finite.
    """
    judged = [each.split.head(_ROWS) for each in probes]
    texts = [
        replace(each, fitness="perplexity", metric=FITNESSES["perplexity"].metric, positions="text") for each in judged
    ]
    splits = (*judged, *texts)
    reply = worker.evaluate(EvaluationRequest(edit, tuple(split.ref for split in splits)), splits)
    if reply.failure is not None:
        raise CandidateError(reply.failure)
    scores = [reply.results[split.fingerprint].score for split in splits]
    return list(zip(scores[: len(judged)], scores[len(judged) :], strict=True))


class _Answer(NamedTuple):
    """A free answer, its number of tokens, and whether it is a loop."""

    text: str
    tokens: int
    loop: bool


def _answers(
    worker: EvaluationWorker,
    edits: Sequence[Edit],
    splits: Sequence[PreparedSplit],
    seconds: float,
    on_stage: OnStage,
) -> tuple[list[list[tuple[_Answer, ...]]], Loops]:
    """Answers of both models, or of the edited one alone, to the same prompts by domain, and the loops among them."""
    tokens, count = _affordable(worker, edits, splits, seconds)
    on_stage(f"checking the winner's answers: {count} prompts")
    # By turns of all domains, so that each has its share of the prompts.
    turns = sorted((row, place) for place, each in enumerate(splits) for row in range(len(each.examples)))
    taken = Counter(place for _, place in turns[:count])
    asked = {place: free(splits[place].head(rows), tokens) for place, rows in sorted(taken.items())}
    # Rows of all domains that are asked in the same way are answered together, which is faster.
    groups: dict[PreparedSplit, list[int]] = {}
    for place, split in asked.items():
        groups.setdefault(replace(split, task="guard", examples=()), []).append(place)
    together = [
        replace(how, examples=tuple(example for place in places for example in asked[place].examples))
        for how, places in groups.items()
    ]
    found, _ = _asked(worker, edits, together)
    tokenizer = worker.resident.tokenizer

    def judged(answer: Answer) -> _Answer:
        text = answer.text or ""
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        return _Answer(text, len(ids), is_loop(ids))

    answered: list[list[tuple[_Answer, ...]]] = [[] for _ in splits]
    for places, *given in zip(groups.values(), *found, strict=True):
        rows = iter([tuple(map(judged, row)) for row in zip(*given, strict=True)])
        for place in places:
            answered[place] = list(islice(rows, taken[place]))
    loops = [tuple(each.loop for each in row) for domain in answered for row in domain]
    if len(edits) == 1:
        return answered, counted([loop for (loop,) in loops], tokens)
    return answered, compared([(old, new) for old, new in loops], tokens)


def _structures(
    split: PreparedSplit, answers: Sequence[tuple[_Answer, ...]], tokens: int
) -> list[tuple[Structure | None, Structure | None]]:
    """What the edited model's answers should have, and what they have (`structure_of`), where that can be told.

    `tokens` is the length at which answers were cut off.
    """
    if split.positions == "text":  # what is continued is no answer: a list in code would pass for JSON
        return []
    found = []
    for example, (*full, own) in zip(split.examples, answers, strict=False):
        # What is behind thoughts can be compared if both answers have come to the end of theirs, or neither has. An
        # answer that was cut off may still have been in its thoughts.
        if not full and own.tokens < tokens:
            found.append((expected_of(example), structure_of(own.text)))
        elif full and (_END_OF_THOUGHTS in full[0].text) == (_END_OF_THOUGHTS in own.text):
            found.append((structure_of(full[0].text), structure_of(own.text)))
    return found


_Answers = tuple[tuple["Answer", ...], ...]


def _asked(
    worker: EvaluationWorker, edits: Sequence[Edit], splits: Sequence[PreparedSplit]
) -> tuple[list[_Answers], float]:
    """Return every edited model's answers, and the seconds that they took without loading and repairing.

    The model that the worker has is asked first, and all prompts before the other: an edit may be a repair.
    """
    found, seconds = dict[int, _Answers](), 0.0
    for place in sorted(range(len(edits)), key=lambda place: not worker.has(edits[place])):
        one = edits[place]
        if not worker.has(one):
            # A shorter answer would be given layer by layer, without all of the candidate.
            worker.answer(one, replace(splits[0].head(1), max_new_tokens=SHORT_ANSWER + 1))
        begun = time.monotonic()
        found[place] = worker.answer(one, *splits)
        seconds += time.monotonic() - begun
    return [found[place] for place in range(len(edits))], seconds


def _affordable(
    worker: EvaluationWorker, edits: Sequence[Edit], splits: Sequence[PreparedSplit], seconds: float
) -> tuple[int, int]:
    """Tokens of the longest answers, within the model's positions, and the number of prompts, for so many seconds.

    What a token takes is measured on a few short answers of each model: a candidate may be far slower, where no kernel
    is made for its form.
    """
    from moevolve.workers.engine.tokenizing import context_of

    golds = [example.references[0] for each in splits for example in each.examples if example.references]
    positions = context_of(worker.resident.model.config) or sys.maxsize
    prompts = [each.text(example) for each in splits for example in each.examples]
    asked, answered = (
        max([0, *map(len, worker.resident.tokenizer(each)["input_ids"])]) for each in (prompts, golds or [""])
    )
    wanted = max(_SHORT, min(max(_LONG, answered), positions - asked))
    pilot = free(next(each for each in splits if each.examples).head(_ROWS), _SHORT)
    _, taken = _asked(worker, edits, [pilot])
    total = seconds / max(taken, 1e-9) * len(pilot.examples) * _SHORT
    most = min(len(prompts), _PROMPTS)
    least = min(most, sum(min(_ROWS, len(each.examples)) for each in splits))
    # All prompts come before longer answers, but these before all prompts where a loop wouldn't show in them.
    tokens = int(min(wanted, max(total / most, min(END_TOKENS, total / least), _SHORT)))
    return tokens, int(min(most, max(least, total / tokens)))


def free(split: PreparedSplit, tokens: int) -> PreparedSplit:
    """Return the prompts of a split, to be answered as servers do.

    A model that can think does, and nothing but the end token or the number of tokens ends an answer.
    """
    # Generating takes a gold answer along, whatever it is; nothing here reads its score.
    examples = tuple(replace(example, references=example.references or ("-",)) for example in split.examples)
    return replace(
        split,
        fitness="generate",
        metric="accuracy",
        matching=Matching("contains", ()),
        max_new_tokens=tokens,
        positions="text",
        examples=examples,
        harness=None,
        thinks=True,
    )


def faults_of(check: TaskCheck) -> tuple[str, ...]:
    """Return what exceeds the limits, each as the end of a sentence that begins with the candidate."""
    if not check.known:
        return ()
    faults = []
    alone = check.loops_full is None
    if check.broken >= _FEWEST_BROKEN and check.broken > (_MOST_UNLIKE if alone else _MOST_BROKEN) * check.structured:
        answers = f"{check.structured} expected answers" if alone else f"the full model's {check.structured} answers"
        faults.append(f"lost {check.broken} of {answers} with JSON or tool calls")
    if check.perplexity is None or (check.perplexity > _MOST_PERPLEXITY and not check.graded):
        times = "far more than" if check.perplexity is None else f"{check.perplexity:.1f} times"
        faults.append(f"has {times} the full model's perplexity, more than {_MOST_PERPLEXITY:g} times")
    if check.unscored is not None:
        faults.append(f"can't be compared with the full model on `test`: {check.unscored}")
    if check.recovery is not None and check.recovery < _LEAST_RECOVERY:
        if SCALES[check.scale].is_reciprocal:
            most = f"{1 / _LEAST_RECOVERY:.3g} times"
            faults.append(f"has {check.recovered} the full model's perplexity on `test`, more than {most}")
        else:
            kept = f"{100 * check.recovery:.0f} % of the full model's score"
            faults.append(f"keeps {kept}, less than {_LEAST_RECOVERY:.0%}")
    return tuple(faults)


def checks_table(checks: Checks) -> str:
    """Return the checks as a table of a model card."""
    lines = ["Checks before the export against the full model, with answers at temperature 0:", ""]
    lines += ["| held-out prompts | prompts | loops | JSON or tool calls lost | agreement | perplexity | score kept |"]
    lines += ["|---|---:|---:|---:|---:|---:|---:|"]
    for check in checks.tasks:
        name = check.task if check.known else f"{check.task} (unknown to the full model)"
        lines.append(f"| {' | '.join((name, *check.cells))} |")
    return "\n".join([*lines, "", f"{checks.about_loops}."])


def expected_of(example: Example) -> Structure | None:
    """Tell what a prompt's expected answer is; None for one in words or code, whatever brackets are in it."""
    answer = example.references[0].rpartition(_END_OF_THOUGHTS)[2].strip() if example.references else ""
    found = structure_of(answer)
    return found if found == "call" or answer.startswith(("{", "[", "```json")) else None


def structure_of(answer: str) -> Structure | None:
    """Tell whether an answer contains a call of a tool, or another JSON object or array; None if it has neither.

    A call is what `_CALLS` describes, or an object with `name`, and `arguments` or `parameters` that are an object.
    What stands around it, such as a code block or the marks of a chat template, doesn't matter, nor do thoughts before
    it.
    """
    answer = answer.rpartition(_END_OF_THOUGHTS)[2]
    if _CALLS.search(answer):
        return "call"
    found: object = None
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
