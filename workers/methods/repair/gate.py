"""The gate of a repair: compares the predictions of differently repaired models on sequences that nothing is fitted on.

Squared errors of layers can fall while the model gets worse: they count directions that no later layer reads as much as
those that decide an answer, and shrink what is useful but uncertain. So strengths of a fit are compared by the
Kullback-Leibler divergence of the next-token distributions from the unedited model's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from moevolve.workers.contract.edits import Tokens
from moevolve.workers.methods.repair.streams import ResidualStreams

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_SHARE = 8
"""One sequence in this many is the gate's."""


def split_places(count: int) -> tuple[Sequence[int], Sequence[int]]:
    """Split the places of sequences into those to fit and those of the gate: every eighth, from the second on."""
    fitted = [place for place in range(count) if place % _SHARE != 1]
    # A single sequence serves both, and is held out of the fit.
    return fitted, range(1, count, _SHARE) or range(count)


class Gate:
    """Measures how far a model's predictions are from the unedited model's.

    Make it while the model is unedited.

    Attributes:
        sequences: Token ids.
        compared: Mask of the tokens behind which predictions are compared, bool [tokens]: those that predict an
            answer's tokens, or all tokens if there are no answers.
    """

    def __init__(self, model: PreTrainedModel, sequences: Sequence[Tokens], answering: Tensor) -> None:
        self.sequences = sequences
        self.compared = answering if answering.any() else ~answering
        self._streams = ResidualStreams(model, sequences)
        self._expected = self._streams.predictions(self.compared).cpu()

    def divergence(self) -> float:
        """Mean Kullback-Leibler divergence of the model's predictions from the unedited model's, in nats.

        Returns:
            The mean over compared tokens; infinite if a prediction isn't finite.
        """
        found = self._streams.predictions(self.compared)
        expected = self._expected.to(found.device)
        divergence = float((expected.exp() * (expected - found)).double().sum(dim=1).mean())
        return divergence if math.isfinite(divergence) else math.inf
