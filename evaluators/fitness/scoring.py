"""Scoring the engine's model on one prepared split, with or without a transcript of its answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np

from moevolve.evaluators.errors import CandidateError
from moevolve.evaluators.fitness.engine import Decided, Engine, Generation, never
from moevolve.evaluators.fitness.kinds import FITNESSES
from moevolve.evaluators.matching.base import cut
from moevolve.evaluators.matching.registry import MATCHERS
from moevolve.evaluators.metrics import score
from moevolve.evaluators.types import Floats, PreparedSplit, SplitResult


def run_split(engine: Engine, split: PreparedSplit) -> SplitResult:
    """Score the engine's model on a split by the split's fitness.

    For a fitness that compares with the unedited model, the engine must have remembered the split.

    Raises:
        CandidateError: A log-probability is not finite, which is the candidate's fault.
        ValueError: The engine did not answer every example, which is a defect.
    """
    fitness = FITNESSES[split.fitness]
    outcomes, gold = fitness.outcomes(engine, split)
    if split.window is None and not len(outcomes) == len(gold) == len(split.examples):
        raise ValueError(
            f"{split.task}/{split.split}: the engine scored {len(outcomes)} of {len(split.examples)} examples"
        )
    wrong = np.flatnonzero(~np.isfinite(gold))
    if wrong.size:
        raise CandidateError(
            f"{split.task}/{split.split}: {fitness.tie_break} of example {int(wrong[0])} is {gold[wrong[0]]} "
            f"({wrong.size} of {gold.size} not finite)"
        )
    return SplitResult(
        score=score(split.metric, outcomes),
        gold_logprob=score("mean", gold),
        outcomes=outcomes.astype(np.float32),
    )


@dataclass(frozen=True, slots=True)
class Answer:
    """One model's answer to one example.

    Attributes:
        text: Generated text up to the first stop string, the end token or `max_new_tokens`; the likeliest choice for a
            fitness that reads choices; None for a fitness that reads neither.
        logprobs: Mean log-probability per token of every choice, in nats; empty unless the fitness reads choices.
        outcome: Score of the answer, in [0, 1].
    """

    text: str | None
    logprobs: tuple[float, ...]
    outcome: float


def transcribe(engine: Engine, split: PreparedSplit) -> tuple[Answer, ...]:
    """Return the model's answer to every example of a split, with the outcomes that `run_split` would score.

    For a fitness that compares with the unedited model, the engine must have remembered the split.

    Raises:
        CandidateError: The model's numbers are not finite.
    """
    recorder = _RecordingEngine(engine)
    outcomes, _ = FITNESSES[split.fitness].outcomes(cast(Engine, recorder), split)
    texts: list[str | None] = [None] * len(split.examples)
    ranked = [tuple(values.tolist()) for values in recorder.ranked]
    if recorder.texts:
        texts = [_cut_at_stop(text, split)[0] for text in recorder.texts]
    elif ranked:
        texts = [each.choices[int(np.argmax(row))] for each, row in zip(split.examples, ranked, strict=True)]
    logprobs = ranked or [()] * len(texts)
    return tuple(Answer(*answer) for answer in zip(texts, logprobs, outcomes.tolist(), strict=True))


def _cut_at_stop(text: str, split: PreparedSplit) -> tuple[str, bool]:
    """Return the answer within generated text, and whether a stop string ended it; see `cut`."""
    return cut(text, split.matching.stop, MATCHERS[split.matching.kind].trims)


class _RecordingEngine:
    """An engine that keeps its answers, and generates each of them to its end."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.texts: tuple[str, ...] = ()
        self.ranked: tuple[Floats, ...] = ()

    def generate(self, split: PreparedSplit, decided: Decided) -> Generation:
        # `decided` is ignored: no continuation changes the outcome of a decided answer, so outcomes stay the same.
        stopped = (lambda _, text: _cut_at_stop(text, split)[1]) if split.matching.stop else never
        found = self._engine.generate(split, stopped)
        self.texts = found.texts
        return found

    def rank(self, split: PreparedSplit) -> tuple[Floats, ...]:
        self.ranked = self._engine.rank(split)
        return self.ranked

    def __getattr__(self, name: str) -> object:
        return getattr(self._engine, name)
