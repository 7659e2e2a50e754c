"""Error of a MoE layer's output if only some of its experts are kept and then fitted.

For each layer, the kept experts' output projections are fitted by ridge regression to the original output, on a sample
of tokens with the unedited model's inputs (as `moevolve.workers.methods.repair.ridge` does with target `local`). A
subset is judged by its leave-one-out error, which needs no further fit: with `A = (K + s I)^-1` and `alpha = A R`, the
error on a token t left out of the fit is `alpha_t / A_tt` (PRESS, Allen 1974).

The features of expert e are its activations times its routing weight. So the features' inner products between tokens
are `K = sum over e of (w_e w_e^T) * K_e`, where `K_e` are those of the activations on all tokens. They are computed
once, and each subset takes a sum and a factorisation of a [tokens, tokens] matrix.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from moevolve.workers.families.layers import MoELayer
from moevolve.workers.methods.eep.edit import SubsetRecipe
from moevolve.workers.methods.eep.expert_subsets import RoutedTokens, kept_weights
from moevolve.workers.methods.eep.neurons import ExpertNeurons

_RIDGE_LAMBDA = 1e-2
"""Ridge strength as a multiple of the mean square of a feature, summed over tokens."""


def fitted_bytes(tokens: int, experts: int, hidden: int, neurons: int, itemsize: int) -> tuple[int, int]:
    """Device memory of a sample.

    Args:
        tokens: Tokens in the sample.
        experts: Experts per layer.
        hidden: Width of the residual stream.
        neurons: Neurons per expert.
        itemsize: Bytes per value of the model.

    Returns:
        Bytes of one layer's sample while it is loaded, and further bytes needed during loading for the matrices and
        activations of one expert.
    """
    held = 4 * tokens * (experts * (tokens + hidden) + hidden) + itemsize * tokens * hidden
    return held, neurons * (hidden * max(4, 2 * itemsize) + tokens * (4 + 4 * itemsize))


class FittedSample:
    """See `LayerSample`: evenly spaced tokens. Subsets of experts are compared after a fit of their output projections.

    Args:
        layer: The layer.
        originals: Fused tensors of the layer's original experts, by name, on any device.
        recipe: Size of the sample, and the routing of subsets.
        tokens: Number of tokens that will be added in all.
    """

    def __init__(self, layer: MoELayer, originals: Mapping[str, Tensor], recipe: SubsetRecipe, tokens: int) -> None:
        self.count = layer.count
        self._layer, self._originals, self._recipe = layer, originals, recipe
        self._stride = -(-tokens // recipe.sample)
        self._seen = 0
        self._kept: list[tuple[Tensor, Tensor, Tensor]] = []

    def add(self, routed: RoutedTokens) -> None:
        rows = routed.every(self._stride, self._seen)
        self._seen += len(routed.hidden)
        self._kept.append((routed.hidden[rows], routed.dense_weights(rows), routed.logits[rows].float()))

    @contextmanager
    def loaded(self) -> Iterator[FittedSample]:
        hidden, weights, self._logits = (torch.cat(each) for each in zip(*self._kept, strict=True))
        neurons = ExpertNeurons(self._layer.experts, self._originals)
        self._width = neurons.width
        tokens, size = hidden.shape
        self._products = torch.empty((self.count, tokens, tokens), device=hidden.device)
        self._outputs = torch.empty((self.count, tokens, size), device=hidden.device)
        for expert in range(self.count):
            activations = neurons.activations(expert, torch.arange(neurons.width), hidden).float()
            torch.mm(activations, activations.t(), out=self._products[expert])
            # Output biases are left out, because they aren't fitted.
            torch.mm(activations, neurons.down(expert).to(hidden.device).float(), out=self._outputs[expert])
        self._target = self._output(weights)
        self._size = float(self._target.double().square().sum())
        yield self
        del self._products, self._outputs, self._target, self._logits

    def _output(self, weights: Tensor) -> Tensor:
        """Output of the layer with routing weights [tokens, n]: [tokens, hidden]."""
        return torch.einsum("te,eth->th", weights, self._outputs)

    def discrepancy(self, kept: Sequence[int]) -> float:
        weights = kept_weights(self._layer, kept, self._logits, self._recipe)
        residual = (self._target - self._output(weights)).double()
        gram = torch.zeros_like(self._products[0])
        for expert in kept:
            share = weights[:, expert]
            gram.addcmul_(torch.outer(share, share), self._products[expert])
        gram = gram.double()
        scale = float(gram.diagonal().sum()) / (len(kept) * self._width)
        gram.diagonal().add_(_RIDGE_LAMBDA * scale if scale > 0 else 1.0)
        factor, failed = torch.linalg.cholesky_ex(gram)
        if int(failed) or not self._size > 0:
            return float(residual.square().sum()) / self._size if self._size > 0 else 0.0
        inverse = torch.cholesky_inverse(factor)
        left_out = (inverse @ residual) / inverse.diagonal()[:, None]
        return float(left_out.square().sum()) / self._size
