"""What a task is once its data is loaded: plain frozen values that cross process borders."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Split = Literal["search", "dev", "test"]
FitnessKind = Literal["generate", "rank", "perplexity", "kl", "agreement", "lm_eval"]
Positions = Literal["text", "answer", "greedy"]
SPLITS: tuple[Split, ...] = ("search", "dev", "test")
FITNESS_KINDS: tuple[FitnessKind, ...] = ("generate", "rank", "perplexity", "kl", "agreement")
"""Kinds a task can be given; `lm_eval` belongs to the tasks of lm-evaluation-harness alone."""
COMPARING_KINDS: frozenset[FitnessKind] = frozenset({"kl", "agreement"})
"""Fitness kinds that compare predictions with the unedited model's, which the engine must remember first."""
TEXT_KINDS: frozenset[FitnessKind] = COMPARING_KINDS | {"perplexity"}
"""Fitness kinds that read a text and compare no answers: they need no references and no choices."""


@dataclass(frozen=True, slots=True)
class Example:
    """One prompt with the answers that count as right.

    Attributes:
        prompt: the text given to the model, without special tokens.
        references: accepted answers; the first is the gold answer whose log-probability is kept. May be empty for the
            fitness kinds that need no answers (`TEXT_KINDS`); where there is one, it ends the text they read.
        choices: the closed set of answers, for `rank` fitness and for option matching; empty for open answers.
    """

    prompt: str
    references: tuple[str, ...]
    choices: tuple[str, ...] = ()


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
        split: `search` (fitness), `dev` (re-ranking) or `test` (reported, never searched on).
        fitness: `generate` (greedy generation and template matching, the EEP paper's protocol), `rank`
            (log-likelihood of the choices), `perplexity` (likelihood of the whole text), `kl` or `agreement`
            (divergence of the predictions on the text from the unedited model's, and their overlap with them).
        metric: name of the metric that turns per-example outcomes into the score.
        matching: how an answer is compared with the references.
        max_new_tokens: greedy decoding stops after this many tokens.
        answer_prefix: text between prompt and answer when an answer is teacher-forced (usually one space).
        examples: the prompts, in their fixed order.
        positions: for `kl` and `agreement`, whose predictions are compared: those of the whole `text`, of the gold
            `answer`, or of the unedited model's own `greedy` answer, which takes the place of the gold one.
        harness: for `lm_eval`, what judges the answers; else None.
    """

    task: str
    split: Split
    fitness: FitnessKind
    metric: str
    matching: Matching
    max_new_tokens: int
    answer_prefix: str
    examples: tuple[Example, ...] = field(repr=False)
    positions: Positions = "text"
    harness: HarnessTask | None = None

    @property
    def ref(self) -> SplitRef:
        """What names it where its prompts aren't needed."""
        return SplitRef(self.task, self.split, self.fingerprint, self.metric)

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
        gold_logprob: mean over examples, in nats, <= 0: the gold answer's log-probability per token; for `perplexity`
            the whole text's; for `kl` the negative divergence; for `agreement` its logarithm.
        outcomes: float32 [examples], each example's contribution in [0, 1].
        seconds: it took on a worker.
        spared: share of the layers' work on prompts, in [0, 1], that earlier candidates' hidden states made needless.
    """

    score: float
    gold_logprob: float
    outcomes: NDArray[np.float32] = field(repr=False)
    seconds: float = 0.0
    spared: float = 0.0

    @property
    def examples_seen(self) -> int:
        return int(self.outcomes.shape[0])
