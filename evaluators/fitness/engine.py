"""What scoring a split asks of a model: the protocol the workers' engine implements."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from moevolve.evaluators.types import PreparedSplit

Decided = Callable[[int, str], bool]
"""`decided(i, text)`: whether no continuation of `text` can change example i's outcome, so decoding it may stop."""


@dataclass(frozen=True, slots=True)
class Generation:
    """Greedy answers to every prompt of a split.

    Attributes:
        texts: decoded answers without special tokens, cut where decoding stopped.
        gold_logprobs: float64 [examples], mean log-probability per token (nats) of the gold answer given the prompt.
    """

    texts: tuple[str, ...]
    gold_logprobs: NDArray[np.float64] = field(repr=False)


class Engine(Protocol):
    """Runs the resident model, with whatever edit is applied to it, over the prompts of a split."""

    def generate(self, split: PreparedSplit, decided: Decided) -> Generation:
        """Greedy generation.

        Raises:
            CandidateError: the model's logits are not finite.
        """
        ...

    def rank(self, split: PreparedSplit) -> tuple[NDArray[np.float64], ...]:
        """Log-likelihoods of the choices: per example, float64 [choices], mean log-probability per token (nats).

        Raises:
            CandidateError: the model's logits are not finite.
        """
        ...

    def text_logprobs(self, split: PreparedSplit) -> NDArray[np.float64]:
        """Log-likelihoods of whole texts: float64 [texts], mean log-probability per token (nats).

        An example's text is its prompt, followed by `answer_prefix` and the first reference if it has one; where the
        split has a `window`, the texts are the windows of its running text. All of a text's tokens but the first are
        predicted.

        Raises:
            CandidateError: the model's logits are not finite.
            UserError: a text has fewer than two tokens.
        """
        ...

    def remember(self, split: PreparedSplit) -> None:
        """Keep what the model predicts on a split's texts, for `divergences` and `agreements`.

        Nothing happens if it is kept already. The caller sees to it that the model has no edit. With `positions:
        greedy` the model's own answers are made first, and are part of the texts from then on.

        Raises:
            UserError: the unedited model's predictions are not finite, or a text has fewer than two tokens.
        """
        ...

    def divergences(self, split: PreparedSplit) -> NDArray[np.float64]:
        """Divergences from what was remembered: float64 [texts] (see `text_logprobs`), nats, >= 0.

        Mean over the positions that predict a token of the text (see `text_logprobs`), or of the answer alone where
        the split's `positions` say so, of KL(remembered || now), over the whole vocabulary.

        Raises:
            CandidateError: the model's logits are not finite.
            ValueError: the split was not remembered.
        """
        ...

    def agreements(self, split: PreparedSplit) -> NDArray[np.float64]:
        """Overlaps with what was remembered: float64 [texts] (see `text_logprobs`), in [0, 1].

        Mean over the same positions as in `divergences` of sum_v min(remembered(v), now(v)), over the vocabulary.

        Raises:
            CandidateError: the model's logits are not finite.
            ValueError: the split was not remembered.
        """
        ...

    def judged(self, split: PreparedSplit) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Answers to a task of lm-evaluation-harness, as it judges them.

        Returns:
            Outcomes in [0, 1], float64 [examples], and the gold answers' mean log-probability per token (nats),
            float64 [examples]; 0 for an example without a gold answer.

        Raises:
            CandidateError: the model's logits are not finite.
            UserError: lm-evaluation-harness isn't installed, or can't judge the answers.
        """
        ...
