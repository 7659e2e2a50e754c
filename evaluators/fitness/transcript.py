"""What a model answers, whole and for people to read, beside what each answer is worth."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moevolve.evaluators.fitness.engine import Decided, Engine, Generation
from moevolve.evaluators.fitness.registry import FITNESSES
from moevolve.evaluators.matching.base import cut
from moevolve.evaluators.matching.registry import MATCHERS
from moevolve.evaluators.types import PreparedSplit

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Answer:
    """One model's answer to one example.

    Attributes:
        text: what it generated, up to the first stop string, its end token or `max_new_tokens`; for a fitness that
            reads choices the likeliest one; None for one that reads neither.
        logprobs: of every choice, for a fitness that reads choices: mean per token, in nats.
        outcome: what it is worth, in [0, 1].
    """

    text: str | None
    logprobs: tuple[float, ...]
    outcome: float


def transcribe(engine: Engine, split: PreparedSplit) -> tuple[Answer, ...]:
    """Every answer of the engine's model to a split; outcomes are those that scoring it gives.

    Args:
        engine: must have remembered the split where its fitness compares.
        split: prepared.

    Raises:
        CandidateError: the model's numbers are not finite.
    """
    listener = _Listener(engine)
    outcomes, _ = FITNESSES[split.fitness].outcomes(listener, split)
    texts: list[str | None] = [None] * len(split.examples)
    ranked = [tuple(values.tolist()) for values in listener.ranked]
    if listener.texts:
        texts = [_within(text, split)[0] for text in listener.texts]
    elif ranked:
        texts = [each.choices[int(np.argmax(row))] for each, row in zip(split.examples, ranked, strict=True)]
    logprobs = ranked or [()] * len(texts)
    return tuple(Answer(*answer) for answer in zip(texts, logprobs, outcomes.tolist(), strict=True))


def _within(text: str, split: PreparedSplit) -> tuple[str, bool]:
    """The answer within generated text, and whether a stop string ended it; see `cut`."""
    return cut(text, split.matching.stop, MATCHERS[split.matching.kind].trims)


class _Listener:
    """An engine that keeps what it answered, and ends no answer before it is whole."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.texts: tuple[str, ...] = ()
        self.ranked: tuple[Floats, ...] = ()

    def generate(self, split: PreparedSplit, decided: Decided) -> Generation:
        # No continuation changes what a decided answer is worth, so whole answers have the same outcomes.
        found = self._engine.generate(split, lambda _, text: _within(text, split)[1])
        self.texts = found.texts
        return found

    def rank(self, split: PreparedSplit) -> tuple[Floats, ...]:
        self.ranked = self._engine.rank(split)
        return self.ranked

    def text_logprobs(self, split: PreparedSplit) -> Floats:
        return self._engine.text_logprobs(split)

    def remember(self, split: PreparedSplit) -> None:
        self._engine.remember(split)

    def divergences(self, split: PreparedSplit) -> Floats:
        return self._engine.divergences(split)

    def agreements(self, split: PreparedSplit) -> Floats:
        return self._engine.agreements(split)

    def judged(self, split: PreparedSplit) -> tuple[Floats, Floats]:
        return self._engine.judged(split)
