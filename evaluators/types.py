"""Frozen values that cross process boundaries: loaded tasks, and results on them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Split = Literal["calibration", "search", "dev", "test"]
Positions = Literal["text", "answer", "greedy"]
# Whether prompts become turns of a conversation; see `PreparedSplit.chat`.
Chat = bool | Literal["rendered"]
SPLITS: tuple[Split, ...] = ("calibration", "search", "dev", "test")
# Splits that models are scored on; `calibration` is only for measurements.
SCORED: tuple[Split, ...] = ("search", "dev", "test")


@dataclass(frozen=True, slots=True)
class Example:
    """One prompt with its accepted answers.

    Attributes:
        prompt: Text given to the model, without special tokens.
        references: Accepted answers; the first is the gold answer, whose log-probability is kept. May be empty for a
            fitness that needs no answers. A fitness that reads texts appends the gold answer to the prompt.
        choices: Closed set of answers, for a fitness that reads choices and for option matching; empty for open
            answers.
        shots: Turns before the prompt, each a prompt and its answer: few-shot examples, then those of the row's own
            conversation.
        system: System prompt of the row's own conversation, which takes the place of the split's; may be empty.
    """

    prompt: str
    references: tuple[str, ...]
    choices: tuple[str, ...] = ()
    shots: tuple[tuple[str, str], ...] = ()
    system: str = ""


@dataclass(frozen=True, slots=True)
class Matching:
    """The comparison of generated text with the references; see `moevolve.evaluators.matching`.

    Attributes:
        kind: Name of the matcher (`option`, `exact`, `contains`, `f1` ...).
        stop: Stop strings; an answer ends before the first of them.
        function, source: Name of the function that scores answers, and the Python text that defines it; for the kind
            `function` only.
    """

    kind: str = "exact"
    stop: tuple[str, ...] = ("\n",)
    function: str = ""
    source: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class HarnessTask:
    """A split's task in lm-evaluation-harness (lm-eval), enough to judge answers without its data set.

    Attributes:
        yaml: Path of the task's file: relative to lm-eval's own tasks, or absolute.
        config: Content of the file as JSON; functions are given by name and the hash of their file.
        version: Version of lm-eval.
        metric: Name of the metric whose value is a document's outcome.
        filter: Name of the lm-eval filter that answers go through first.
        documents: Each example's document as JSON.
        contexts: Each example's prompt, or a prompt for each of its choices.
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
    """A prepared split without its prompts: names, fingerprint and metric."""

    task: str
    split: Split
    fingerprint: str
    metric: str


@dataclass(frozen=True)
class PreparedSplit:
    """One split of one task, rendered: everything that a worker needs to score a candidate on it.

    Attributes:
        split: `calibration` (for measurements; answers may be absent, and no fitness reads it), `search` (fitness),
            `dev` (re-ranking) or `test` (reported, never searched on).
        fitness: Name of the fitness; see `moevolve.evaluators.fitness`.
        metric: Name of the metric that turns per-example outcomes into the score.
        max_new_tokens: Largest number of tokens in an answer.
        answer_prefix: Text between prompt and answer when an answer is teacher-forced (usually one space).
        examples: Prompts in their fixed order.
        positions: Predictions that a fitness compares with the unedited model's: those of the whole `text`, of the gold
            `answer`, or of the unedited model's own `greedy` answer, which replaces the gold one.
        harness: The task in lm-evaluation-harness for a fitness that it judges; else None.
        chat: True if prompts become turns of a conversation when the model has a chat template; `rendered` if they are
            conversations as its template wrote them, with all special tokens.
        thinks: True to let models that can think do so before they answer a turn of a conversation, as servers do.
        window: Tokens per window of `running_text`, for a fitness that reads whole texts; outcomes then belong to
            windows instead of examples. None reads each example by itself.
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
    chat: Chat = True
    thinks: bool = False
    window: int | None = None

    @property
    def running_text(self) -> str:
        """The prompts with their gold answers, if there are any, separated by empty lines."""
        return "\n\n".join(self._texts)

    @property
    def _texts(self) -> list[str]:
        return [
            "".join(meeting(each.prompt, self.answer_prefix, each.references[0])) if each.references else each.prompt
            for each in self.examples
        ]

    def without_window(self, characters: int) -> PreparedSplit:
        """Return a split whose running text is cut into examples of at least so many characters, but for the last one.

        One without a window stays as it is.
        """
        if self.window is None:
            return self
        pieces = [""]
        for text in filter(str.strip, self._texts):
            pieces[-1] = f"{pieces[-1]}\n\n{text}".strip()
            if len(pieces[-1]) >= characters:
                pieces.append("")
        return replace(self, window=None, examples=tuple(Example(piece, ()) for piece in pieces if piece))

    def text(self, example: Example) -> str:
        """Return the input of a model without a chat template: system, shots and prompt, separated by empty lines."""
        shots = ("".join(meeting(prompt, self.answer_prefix, answer)) for prompt, answer in example.shots)
        return "\n\n".join((*filter(None, (example.system or self.system,)), *shots, example.prompt))

    def turns(self, example: Example) -> tuple[tuple[str, str], ...]:
        """Return the input of a model with a chat template: `(role, content)` of every turn, the prompt last."""
        # Leading white space of `answer_prefix` separates words of running text; a turn doesn't need it.
        lead = self.answer_prefix.lstrip()
        system = example.system or self.system
        turns = [("system", system)] if system else []
        for prompt, answer in example.shots:
            turns += [("user", prompt), ("assistant", lead + answer)]
        return (*turns, ("user", example.prompt))

    @property
    def ref(self) -> SplitRef:
        return SplitRef(self.task, self.split, self.fingerprint, self.metric)

    def head(self, rows: int) -> PreparedSplit:
        return self.only(range(min(rows, len(self.examples))))

    def only(self, rows: Iterable[int]) -> PreparedSplit:
        """Return a split of the examples with these numbers, in their order."""
        places, judged = tuple(rows), self.harness
        if judged is not None:
            documents = tuple(judged.documents[row] for row in places)
            judged = replace(judged, documents=documents, contexts=tuple(judged.contexts[row] for row in places))
        return replace(self, examples=tuple(self.examples[row] for row in places), harness=judged)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of everything that can change a score; equal fingerprints mean comparable evaluations."""
        content = asdict(self)
        if self.harness is not None:
            del content["harness"]["yaml"]  # the path can differ between machines
        if not self.matching.function:  # so that fingerprints of other tasks stay what they were
            del content["matching"]["function"], content["matching"]["source"]
        payload = json.dumps(content, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
        return hashlib.sha256(payload.encode()).hexdigest()


def meeting(prompt: str, prefix: str, answer: str) -> tuple[str, str]:
    """Return a text without the blanks at its end, and the answer that continues it, with `prefix` before it.

    The blanks go to the answer, since tokenizers join them with its first word. A blank of the prefix yields to white
    space on either side of it, and those of the text to white space of the answer, so that it stands once.
    """
    bare = prompt.rstrip(" ") if prompt.strip() else prompt
    lead = prompt[len(bare) :] + prefix.lstrip(" ") if prompt[-1:].isspace() else prefix
    return bare, (lead.rstrip(" ") if answer[:1].isspace() else lead) + answer


@dataclass(frozen=True)
class SplitResult:
    """The score of one candidate on one split.

    Attributes:
        score: Metric over all examples, in [0, 1].
        gold_logprob: Mean over examples of the gold answer's log-probability per token, in nats, <= 0, or of the
            fitness's other tie-breaker; see `moevolve.evaluators.fitness.base.Fitness.outcomes`.
        outcomes: Outcomes in [0, 1], float32 [examples] ([windows] for running text).
        seconds: Time on a worker; the first of several splits includes the time for applying the edit.
    """

    score: float
    gold_logprob: float
    outcomes: NDArray[np.float32] = field(repr=False)
    seconds: float = 0.0

    @property
    def examples_seen(self) -> int:
        return int(self.outcomes.shape[0])
