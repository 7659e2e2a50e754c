"""What a task is once its data is loaded: plain frozen values that cross process borders."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Split = Literal["calibration", "search", "dev", "test"]
Positions = Literal["text", "answer", "greedy"]
SPLITS: tuple[Split, ...] = ("calibration", "search", "dev", "test")
SCORED: tuple[Split, ...] = ("search", "dev", "test")
"""Splits that models are scored on; `calibration` is measured on only."""


@dataclass(frozen=True, slots=True)
class Example:
    """One prompt with the answers that count as right.

    Attributes:
        prompt: the text given to the model, without special tokens.
        references: accepted answers; the first is the gold answer whose log-probability is kept. May be empty for a
            fitness that needs no answers; where there is one, it ends the text that such a fitness reads.
        choices: the closed set of answers, for a fitness that reads choices and for option matching; empty for open
            answers.
        shots: solved examples that are shown before the prompt, each a prompt and its answer.
    """

    prompt: str
    references: tuple[str, ...]
    choices: tuple[str, ...] = ()
    shots: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Matching:
    """How generated text is compared with the references; see `moevolve.evaluators.matching`.

    Attributes:
        kind: name of the matcher (`option`, `exact`, `contains`, `f1` ...).
        stop: generation of an answer ends at the first of these strings (they are not part of the answer).
    """

    kind: str = "exact"
    stop: tuple[str, ...] = ("\n",)


@dataclass(frozen=True, slots=True)
class HarnessTask:
    """What lm-evaluation-harness needs to judge the answers of a split; see `moevolve.evaluators.harness.tasks`.

    Attributes:
        yaml: the task's file: relative to lm-eval's own tasks, or absolute.
        config: what stands in it, as JSON, functions by their name and the hash of their file.
        version: of lm-eval.
        metric: whose value is a document's outcome.
        filter: lm-eval's name of the filter that answers go through first.
        documents: JSON of each example's document.
        contexts: per example its prompt, or a prompt for each of its choices.
    """

    yaml: str
    config: str = field(repr=False)
    version: str
    metric: str
    filter: str
    documents: tuple[str, ...] = field(repr=False)
    contexts: tuple[tuple[str, ...], ...] = field(repr=False)


@dataclass(frozen=True, slots=True)
class SplitRef:
    """One prepared split by name, fingerprint and the metric it is scored by."""

    task: str
    split: Split
    fingerprint: str
    metric: str


@dataclass(frozen=True)
class PreparedSplit:
    """One split of one task, rendered: everything a worker needs to score a candidate on it.

    Attributes:
        task: name of the task.
        split: `calibration` (what methods measure on; answers may be absent, and no fitness reads it), `search`
            (fitness), `dev` (re-ranking) or `test` (reported, never searched on).
        fitness: name of what makes a score of the model's answers; see `moevolve.evaluators.fitness`.
        metric: name of the metric that turns per-example outcomes into the score.
        matching: how an answer is compared with the references.
        max_new_tokens: greedy decoding stops after this many tokens.
        answer_prefix: text between prompt and answer when an answer is teacher-forced (usually one space).
        examples: the prompts, in their fixed order.
        positions: for a fitness that compares predictions with the unedited model's, which ones: those of the whole
            `text`, of the gold `answer`, or of the unedited model's own `greedy` answer, which takes the place of the
            gold one.
        harness: for a fitness that lm-evaluation-harness judges, what it needs; else None.
        system: what a model is told before everything else; empty for nothing.
        chat: whether prompts become turns of a conversation where the model has a chat template.
        window: for texts that are read whole: all of them are one running text (`running_text`), which is cut into
            windows of so many tokens; outcomes are the windows', not the examples'. None reads each by itself.
    """

    task: str
    split: Split
    fitness: str
    metric: str
    matching: Matching
    max_new_tokens: int
    answer_prefix: str
    examples: tuple[Example, ...] = field(repr=False)
    positions: Positions = "text"
    harness: HarnessTask | None = None
    system: str = ""
    chat: bool = True
    window: int | None = None

    @property
    def running_text(self) -> str:
        """All examples' texts, an empty line apart: each its prompt, followed by its gold answer if it has one."""
        answers = (self.answer_prefix + each.references[0] if each.references else "" for each in self.examples)
        return "\n\n".join(each.prompt + answer for each, answer in zip(self.examples, answers, strict=True))

    def text(self, example: Example) -> str:
        """What a model without a chat template is given: system prompt, shots and prompt, an empty line apart."""
        shots = (prompt + self.answer_prefix + answer for prompt, answer in example.shots)
        return "\n\n".join((*filter(None, (self.system,)), *shots, example.prompt))

    def turns(self, example: Example) -> tuple[tuple[str, str], ...]:
        """What a model with a chat template is given: `(role, content)` of every turn, the prompt last.

        Roles are `system`, `user` and `assistant`. White space at the beginning of `answer_prefix` parts running text,
        so it's left out here.
        """
        lead = self.answer_prefix.lstrip()
        turns = [("system", self.system)] if self.system else []
        for prompt, answer in example.shots:
            turns += [("user", prompt), ("assistant", lead + answer)]
        return (*turns, ("user", example.prompt))

    @property
    def ref(self) -> SplitRef:
        """What names it where its prompts aren't needed."""
        return SplitRef(self.task, self.split, self.fingerprint, self.metric)

    def head(self, rows: int) -> PreparedSplit:
        """Its first rows, as a split of their own."""
        judged = self.harness
        if judged is not None:
            judged = replace(judged, documents=judged.documents[:rows], contexts=judged.contexts[:rows])
        return replace(self, examples=self.examples[:rows], harness=judged)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of everything that can change a score: equal fingerprints mean comparable evaluations."""
        content = asdict(self)
        if self.harness is not None:
            del content["harness"]["yaml"]  # where the task's file lies
        payload = json.dumps(content, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
        return hashlib.sha256(payload.encode()).hexdigest()


@dataclass(frozen=True)
class SplitResult:
    """The score of one candidate on one split.

    Attributes:
        score: the metric over all examples, in [0, 1].
        gold_logprob: mean over examples, in nats, <= 0: the gold answer's log-probability per token, or what the
            fitness has in its place; see `moevolve.evaluators.fitness.base.Fitness.outcomes`.
        outcomes: float32 [examples], or [windows] of running text: each one's contribution in [0, 1].
        seconds: it took on a worker; of several splits, making the edit counts with the first.
        saved: Share of the layers' work on prompts, in [0, 1], that reusing earlier candidates' hidden states saved.
    """

    score: float
    gold_logprob: float
    outcomes: NDArray[np.float32] = field(repr=False)
    seconds: float = 0.0
    saved: float = 0.0

    @property
    def examples_seen(self) -> int:
        return int(self.outcomes.shape[0])
