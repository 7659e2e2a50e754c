"""The protocol of the model that a fitness scores; the workers' engine implements it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from moevolve.evaluators.types import PreparedSplit

# `decided(i, text)`: True if no continuation of `text` can change example i's outcome, so that decoding may stop.
Decided = Callable[[int, str], bool]


def never(_row: int, _text: str) -> bool:
    """Decide no answer: only an end token or the limit ends it, so that its text isn't needed at every token."""
    return False


@dataclass(frozen=True, slots=True)
class Generation:
    """Greedy answers to every prompt of a split.

    Attributes:
        texts: Decoded answers without special tokens, up to where decoding stopped.
        gold_logprobs: Mean log-probability per token of the gold answer given the prompt, in nats, float64 [examples].
    """

    texts: tuple[str, ...]
    gold_logprobs: NDArray[np.float64] = field(repr=False)


class Engine(Protocol):
    """Runs the resident model with its current edit over the prompts of a split.

    The text of an example is its prompt, followed by `answer_prefix` and the first reference if there is one. In a
    split with a `window`, the texts are the windows of its running text. All tokens of a text but the first are
    predicted.

    All methods but `remember` raise `CandidateError` if the model's logits are not finite.
    """

    def generate(self, split: PreparedSplit, decided: Decided) -> Generation:
        """Generate a greedy answer to every prompt."""
        ...

    def rank(self, split: PreparedSplit) -> tuple[NDArray[np.float64], ...]:
        """Return each choice's mean log-probability per token, in nats: per example float64 [choices]."""
        ...

    def text_logprobs(self, split: PreparedSplit) -> NDArray[np.float64]:
        """Return the mean log-probability per token of whole texts, in nats: float64 [texts].

        Raises:
            UserError: A text has fewer than two tokens.
        """
        ...

    def remember(self, split: PreparedSplit) -> None:
        """Keep the unedited model's predictions on a split's texts, for `divergences` and `agreements`.

        A second call does nothing. The model must have no edit. With `positions: greedy`, the model's own answers are
        generated first and become part of the texts.

        Raises:
            UserError: The unedited model's predictions are not finite, or a text has fewer than two tokens.
        """
        ...

    def divergences(self, split: PreparedSplit) -> NDArray[np.float64]:
        """Return the divergence from the remembered predictions: float64 [texts], nats, >= 0.

        It is the mean of KL(remembered || current) over the positions that predict a token of the text, or only of the
        answer if the split's `positions` say so; over the whole vocabulary.

        Raises:
            ValueError: The split was not remembered.
        """
        ...

    def agreements(self, split: PreparedSplit) -> NDArray[np.float64]:
        """Return the overlap with the remembered predictions: float64 [texts], in [0, 1].

        It is the mean over the positions of `divergences` of sum_v min(remembered(v), current(v)) over the vocabulary.

        Raises:
            ValueError: The split was not remembered.
        """
        ...

    def judged(self, split: PreparedSplit) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Let lm-evaluation-harness judge the answers to one of its tasks.

        Returns:
            Outcomes in [0, 1], and the gold answers' mean log-probability per token in nats, or 0 for examples without
            a gold answer; each float64 [examples].

        Raises:
            UserError: lm-evaluation-harness isn't installed, or can't judge the answers.
        """
        ...
