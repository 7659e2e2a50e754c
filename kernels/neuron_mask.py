"""A feed-forward network under per-token masks of its neurons: every expert is a mask, and each token has one.

Source: ToMoE (arXiv 2501.15316), Eq. 2 (an expert as a subset of neurons) and Eq. 17 (the masked form). Two forms of
one function: *sliced* groups tokens by expert and runs each group on copies of its expert's neurons only; *masked*
runs all neurons and zeroes those that are not a token's. Copying pays off from some tokens per expert on, so the form
depends on the numbers of tokens. Not so on a CPU, where a token's result must not depend on those beside it: there
the masks alone say which.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moevolve.kernels.expert_ffn import NetworkWeights
from moevolve.kernels.products import elementwise, linear

_COPY_COST = 24
"""Copying one weight takes as long as about this many multiplications with it: on one CPU core, 12 for networks that
fit into its cache, 32 for large ones (`tests/benchmarks/bench_tomoe.py`)."""


@dataclass(frozen=True, slots=True, eq=False)
class ExpertMasks:
    """Which neurons the experts of a network keep, all as many; masks may overlap.

    Attributes:
        neurons: indices of kept neurons, ascending, int64 [experts, kept].
        kept: the same as masks, bool [experts, width].
    """

    neurons: Tensor
    kept: Tensor

    @classmethod
    def of(cls, kept: Tensor) -> ExpertMasks:
        """From masks, bool [experts, width], each with the same number of ones."""
        return cls(kept.nonzero()[:, 1].view(len(kept), -1), kept)


_USUAL_TOKENS = 2048
"""Tokens that the form is chosen for on a CPU."""


def choose_expert(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Top-1 routing without noise: the expert of the largest logit, the first of those that tie.

    Args:
        hidden: [tokens, hidden], any floating dtype; logits are float32.
        weight: linear router, float32 [experts, hidden].

    Returns:
        Logits float32 [tokens, experts] and experts int64 [tokens].
    """
    logits = linear(hidden.float(), weight)
    return logits, logits.argmax(dim=-1)


def masked_network(hidden: Tensor, chosen: Tensor, masks: ExpertMasks, network: NetworkWeights) -> Tensor:
    """Every token through the neurons of its expert; the output bias is kept whole.

    Args:
        hidden: [tokens, hidden].
        chosen: expert of every token, int64 [tokens].
        masks: the experts.
        network: the whole network, in the dtype of `hidden`.

    Returns:
        [tokens, hidden] in the dtype of `hidden`.
    """
    counts = torch.bincount(chosen, minlength=len(masks.kept)).tolist()
    tokens, used = len(hidden), sum(count > 0 for count in counts)
    if hidden.device.type == "cpu":
        tokens, used = _USUAL_TOKENS, len(counts)
    kept, width = masks.neurons.shape[1], masks.kept.shape[1]
    if kept * (tokens + _COPY_COST * used) < width * tokens:
        return _sliced(hidden, chosen, counts, masks, network)
    return _masked(hidden, masks.kept[chosen], network)


def _sliced(hidden: Tensor, chosen: Tensor, counts: list[int], masks: ExpertMasks, network: NetworkWeights) -> Tensor:
    out = torch.empty_like(hidden)
    for expert, count in enumerate(counts):
        neurons = masks.neurons[expert]
        if count == len(hidden):
            return _slice_output(hidden, neurons, network)
        if count:
            rows = (chosen == expert).nonzero().squeeze(1)
            out.index_copy_(0, rows, _slice_output(hidden.index_select(0, rows), neurons, network))
    return out


def _slice_output(hidden: Tensor, neurons: Tensor, network: NetworkWeights) -> Tensor:
    """The network made of some neurons, on tokens [tokens, hidden]."""
    inner = linear(hidden, network.up.index_select(0, neurons), _select(network.up_bias, neurons))
    if network.gate is None:
        inner = elementwise(network.activation, inner)
    else:
        gate = linear(hidden, network.gate.index_select(0, neurons), _select(network.gate_bias, neurons))
        inner *= elementwise(network.activation, gate)
    return linear(inner, network.down.index_select(1, neurons), network.down_bias)


def _masked(hidden: Tensor, kept: Tensor, network: NetworkWeights) -> Tensor:
    """The whole network with the other neurons' activations zeroed; `kept` is bool [tokens, width]."""
    inner = linear(hidden, network.up, network.up_bias)
    if network.gate is None:
        inner = elementwise(network.activation, inner)
    else:
        inner *= elementwise(network.activation, linear(hidden, network.gate, network.gate_bias))
    return linear(inner * kept, network.down, network.down_bias)


def _select(bias: Tensor | None, neurons: Tensor) -> Tensor | None:
    return None if bias is None else bias.index_select(0, neurons)


def top_dimensions(scores: Tensor, active: int) -> Tensor:
    """Which dimensions have a token's largest scores, the first of those that tie: bool, like `scores`.

    Args:
        scores: [..., dimensions].
        active: how many per token.
    """
    order = scores.argsort(dim=-1, descending=True, stable=True)
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order[..., :active], True)
