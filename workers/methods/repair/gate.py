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

AGREE: list[float] = []
_SHARE = 8
"""One sequence in this many is the gate's."""
_LAST = 1
"""Number of tokens at the end of each sequence behind which predictions are compared: an answer begins there."""


def split_sequences(sequences: Sequence[Tokens]) -> tuple[list[Tokens], list[Tokens]]:
    """Split sequences into those to fit and those of the gate: every eighth, from the second on."""
    fitted = [each for i, each in enumerate(sequences) if i % _SHARE != 1]
    # A single sequence serves both, and is held out of the fit.
    return fitted, list(sequences[1::_SHARE] or sequences)


class Gate:
    """Measures how far a model's predictions are from the unedited model's.

    Make it while the model is unedited.

    Attributes:
        sequences: Token ids.
        start: Input of the first layer, [tokens, hidden].
    """

    def __init__(self, model: PreTrainedModel, sequences: Sequence[Tokens]) -> None:
        self.sequences = sequences
        self._streams = ResidualStreams(model, sequences)
        self.start = self._streams.embeddings()
        self._expected = self._streams.predictions(0, self.start, _LAST).cpu()

    def advance(self, state: Tensor, first: int, end: int) -> Tensor:
        """Run the layers from `first` to before `end` on a residual stream [tokens, hidden]."""
        for layer in range(first, end):
            state, _ = self._streams.run_layer(layer, state)
        return state

    def divergence(self, layer: int, state: Tensor) -> float:
        """Mean Kullback-Leibler divergence of the model's predictions from the unedited model's, in nats.

        Args:
            layer: Number of layers that were run.
            state: Residual stream behind them, [tokens, hidden].

        Returns:
            The mean over tokens; infinite if a prediction isn't finite.
        """
        found = self._streams.predictions(layer, state, _LAST)
        expected = self._expected.to(found.device)
        divergence = float((expected.exp() * (expected - found)).double().sum(dim=1).mean())
        AGREE.append(round(float((found.argmax(-1) == expected.argmax(-1)).float().mean()), 3))
        return divergence if math.isfinite(divergence) else math.inf
