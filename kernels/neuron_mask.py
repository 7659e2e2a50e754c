"""A feed-forward network with per-token masks of its neurons: an expert is a mask, and each token has one expert.

Source: ToMoE (arXiv 2501.15316), Eq. 2 (an expert as a subset of neurons) and Eq. 17 (the masked form). The function
has two forms. *Sliced* groups tokens by expert and runs each group on copies of its expert's neurons; *masked* runs all
neurons and sets those outside a token's expert to zero. Copying pays off if there are enough tokens per expert, so the
form depends on the number of tokens. On a CPU, where a token's result must not depend on other tokens, it depends on
the masks alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moevolve.kernels.expert_ffn import NetworkWeights, activations
from moevolve.kernels.products import linear

# Cost of copying a weight, in multiplications with it. Measured on one CPU core: 12 for networks that fit into the
# cache, 32 for large ones.
_COPY_COST = 24
# Number of tokens that is assumed when the form is chosen on a CPU.
_ASSUMED_TOKENS = 2048


@dataclass(frozen=True, slots=True, eq=False)
class ExpertMasks:
    """The neurons of every expert. All experts have equally many, and masks may overlap.

    Attributes:
        neurons: Indices of each expert's neurons, ascending, int64 [experts, kept].
        kept: The same as masks, bool [experts, width].
    """

    neurons: Tensor
    kept: Tensor

    @classmethod
    def of(cls, kept: Tensor) -> ExpertMasks:
        """Build from masks, bool [experts, width], with equally many ones each."""
        return cls(kept.nonzero()[:, 1].view(len(kept), -1), kept)


def choose_expert(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Top-1 routing without noise: choose the expert with the largest logit, the first of those that tie.

    Hidden states are [tokens, hidden] of any floating dtype, and the router's weight is float32 [experts, hidden].
    Returns logits float32 [tokens, experts] and experts int64 [tokens].
    """
    logits = linear(hidden.float(), weight)
    return logits, logits.argmax(dim=-1)


def masked_network(hidden: Tensor, chosen: Tensor, masks: ExpertMasks, network: NetworkWeights) -> Tensor:
    """Run every token, [tokens, hidden], through the neurons of its expert, int64 [tokens].

    The output bias is added in full. Outputs, weights and hidden states have the same dtype.
    """
    counts = torch.bincount(chosen, minlength=len(masks.kept)).tolist()
    tokens, used = len(hidden), sum(count > 0 for count in counts)
    if hidden.device.type == "cpu":
        tokens, used = _ASSUMED_TOKENS, len(counts)
    kept, width = masks.neurons.shape[1], masks.kept.shape[1]
    if kept * (tokens + _COPY_COST * used) < width * tokens:
        return _sliced(hidden, chosen, counts, masks, network)
    inner = activations(hidden, network, slice(None))
    return linear(inner * masks.kept[chosen], network.down, network.down_bias)


def _sliced(hidden: Tensor, chosen: Tensor, counts: list[int], masks: ExpertMasks, network: NetworkWeights) -> Tensor:
    out = torch.empty_like(hidden)
    # Their numbers are known, so that a GPU isn't waited for.
    rows_of = chosen.argsort(stable=True).split(counts)
    for neurons, rows in zip(masks.neurons, rows_of, strict=True):
        if len(rows) == len(hidden):
            return _slice_output(hidden, neurons, network)
        if len(rows):
            out.index_copy_(0, rows, _slice_output(hidden.index_select(0, rows), neurons, network))
    return out


def _slice_output(hidden: Tensor, neurons: Tensor, network: NetworkWeights) -> Tensor:
    """Output of the network that consists of some neurons, [tokens, hidden]."""
    down = network.down.index_select(1, neurons)
    return linear(activations(hidden, network, neurons), down, network.down_bias)


def top_dimensions(scores: Tensor, active: int) -> Tensor:
    """Mask of the `active` dimensions with the largest scores [..., dimensions], the first of those that tie."""
    order = scores.argsort(dim=-1, descending=True, stable=True)
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order[..., :active], True)
