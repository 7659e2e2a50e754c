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
