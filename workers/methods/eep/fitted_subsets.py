"""How far a MoE layer's output stays off if only some of its experts are kept, and these are then fitted.

Per layer, the kept experts' output projections are fitted by ridge regression to the whole layer's output, on a sample
of tokens with the unedited model's inputs (`moevolve.workers.methods.repair.ridge`, target `local`); a subset is worth
what is left of the error on each token when it is left out of the fit. Leaving one out needs no other fit: with
`A = (K + s I)^-1` and `alpha = A R`, the error on token t is `alpha_t / A_tt` (Allen 1974, PRESS).

The features of expert e are its activations times its routing weight, so their inner products between tokens are
`K = sum over e of (w_e w_e^T) * K_e`, where `K_e` are those of the activations, on all tokens: these are made once, and
every subset takes a sum and a factorisation in the number of tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from moevolve.workers.families.layers import MoELayer
from moevolve.workers.methods.eep.edit import SubsetRecipe
from moevolve.workers.methods.eep.expert_subsets import Routed, kept_weights
from moevolve.workers.methods.eep.neurons import ExpertNeurons

_STRENGTH = 1e-2
"""Of the ridge, as a multiple of the mean square of a feature summed over tokens."""


def fitted_bytes(tokens: int, experts: int, hidden: int, neurons: int, itemsize: int) -> tuple[int, int]:
    """Device memory of a sample.

    Args:
        tokens: that are kept.
        experts: of the layer.
        hidden: width of the residual stream.
        neurons: of an expert.
        itemsize: bytes of a value of the model.

    Returns:
        Bytes of one layer's sample while it is loaded, and what loading it takes beside them: the matrices and
        activations of one expert.
    """
    held = 4 * tokens * (experts * (tokens + hidden) + hidden) + itemsize * tokens * hidden
    return held, neurons * (hidden * max(4, 2 * itemsize) + tokens * (4 + 4 * itemsize))


class FittedSample:
    """Evenly spaced tokens of one layer; see `moevolve.workers.methods.eep.expert_subsets.SubsetSample`.

    Args:
        layer: the layer.
        originals: its experts' fused tensors by name, wherever they are kept.
        recipe: how many tokens at most, and how subsets route.
        tokens: how many tokens will be seen.
    """

    def __init__(self, layer: MoELayer, originals: Mapping[str, Tensor], recipe: SubsetRecipe, tokens: int) -> None:
        self.count = layer.count
        self._layer, self._originals, self._recipe = layer, originals, recipe
        self._stride = -(-tokens // recipe.sample)
        self._seen = 0
        self._kept: list[tuple[Tensor, Tensor, Tensor]] = []

    def add(self, routed: Routed) -> None:
        """Take in a row's tokens."""
        rows = routed.spaced(self._seen, self._stride)
        self._seen += len(routed.hidden)
        self._kept.append((routed.hidden[rows], routed.over_all(rows), routed.logits[rows].float()))

    @contextmanager
    def loaded(self) -> Iterator[FittedSample]:
        """Inner products and outputs of all experts on all tokens, for the length of a `with` block."""
        hidden, weights, self._logits = (torch.cat(each) for each in zip(*self._kept, strict=True))
        neurons = ExpertNeurons(self._layer.experts, self._originals)
        self._width = neurons.width
        tokens, size = hidden.shape
        self._products = torch.empty((self.count, tokens, tokens), device=hidden.device)
        self._outputs = torch.empty((self.count, tokens, size), device=hidden.device)
        for expert in range(self.count):
            activations = neurons.activations(expert, torch.arange(neurons.width), hidden).float()
            torch.mm(activations, activations.t(), out=self._products[expert])
            # Biases of the outputs are left out: they aren't fitted.
            torch.mm(activations, neurons.down(expert).to(hidden.device).float(), out=self._outputs[expert])
        self._target = self._mixed(weights)
        self._size = float(self._target.double().square().sum())
        yield self
        del self._products, self._outputs, self._target, self._logits

    def _mixed(self, weights: Tensor) -> Tensor:
        """The layer's output with routing weights [tokens, n]: [tokens, hidden]."""
        return torch.einsum("te,eth->th", weights, self._outputs)

    def discrepancy(self, kept: Sequence[int]) -> float:
        """Squared error that is left, relative to the outputs' squared length; only while it is loaded."""
        weights = kept_weights(self._layer, kept, self._logits, self._recipe)
        residual = (self._target - self._mixed(weights)).double()
        gram = torch.zeros_like(self._products[0])
        for expert in kept:
            share = weights[:, expert]
            gram.addcmul_(torch.outer(share, share), self._products[expert])
        gram = gram.double()
        scale = float(gram.diagonal().sum()) / (len(kept) * self._width)
        gram.diagonal().add_(_STRENGTH * scale if scale > 0 else 1.0)
        factor, failed = torch.linalg.cholesky_ex(gram)
        if int(failed) or not self._size > 0:
            return float(residual.square().sum()) / self._size if self._size > 0 else 0.0
        inverse = torch.cholesky_inverse(factor)
        left_out = (inverse @ residual) / inverse.diagonal()[:, None]
        return float(left_out.square().sum()) / self._size
