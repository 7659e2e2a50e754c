"""A feed-forward network with its neurons divided into experts; each runs only on the tokens that chose it.

Source: FactorLLM (arXiv 2408.11855), Eq. 5 to 7. Neurons are sorted by expert, so that an expert is a slice of the
network's matrices and nothing is copied. Outputs are summed in float32 in order of the experts, and the output bias is
added once. With all experts chosen the result is the dense network's up to the order of the sum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moevolve.kernels.products import elementwise, linear


@dataclass(frozen=True, slots=True, eq=False)
class NetworkWeights:
    """The weights of a feed-forward network, `down(act(gate(x)) * up(x))` or `down(act(up(x)))`.

    Attributes:
        up: Weight [width, hidden].
        gate: Weight [width, hidden]; None for a network without a gate.
        down: Weight [hidden, width].
        up_bias, gate_bias: Biases [width], or None.
        down_bias: Bias [hidden], or None.
        activation: Elementwise function.
    """

    up: Tensor
    gate: Tensor | None
    down: Tensor
    up_bias: Tensor | None
    gate_bias: Tensor | None
    down_bias: Tensor | None
    activation: Callable[[Tensor], Tensor]


def choose_experts(hidden: Tensor, weight: Tensor, bias: Tensor, active: int) -> Tensor:
    """Choose the experts that all routers choose for a token, which are K for one router, else at most K.

    Args:
        hidden: Hidden states [tokens, hidden] of any floating dtype; logits are float32.
        weight, bias: Linear routers, float32 [routers, experts, hidden] and [routers, experts].
        active: Number K of experts with the largest logits that each router chooses.

    Returns:
        A mask, bool [tokens, experts].
    """
    routers, experts, _ = weight.shape
    logits = linear(hidden.float(), weight.flatten(0, 1), bias.flatten()).view(-1, routers, experts)
    picks = logits.topk(active, dim=-1).indices
    chosen = torch.zeros(logits.shape, dtype=torch.bool, device=hidden.device).scatter_(-1, picks, True)
    return chosen.all(dim=1)


def expert_ffn(hidden: Tensor, chosen: Tensor, network: NetworkWeights) -> Tensor:
    """Compute the unweighted sum of the chosen experts' outputs, [tokens, hidden] in the dtype of `hidden`.

    Args:
        hidden: Hidden states [tokens, hidden].
        chosen: Chosen experts, bool [tokens, experts]; expert i is the i-th of equal slices of the neurons.
        network: Weights of the whole network, in the dtype of `hidden`.
    """
    experts = chosen.shape[1]
    width = network.up.shape[0] // experts
    total = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
    # Two waits for a GPU, instead of one more for every expert's rows.
    counts = chosen.sum(dim=0).tolist()
    rows_of = chosen.t().nonzero()[:, 1].split(counts)
    for expert, rows in enumerate(rows_of):
        if not len(rows):
            continue
        neurons = slice(expert * width, (expert + 1) * width)
        if len(rows) == len(hidden):
            total += _slice_output(hidden, network, neurons)
        else:
            # Rows are distinct within an expert, so the order of the sum is fixed on any device.
            total.index_add_(0, rows, _slice_output(hidden.index_select(0, rows), network, neurons).float())
    if network.down_bias is not None:
        total += network.down_bias
    return total.to(hidden.dtype)


def _slice_output(hidden: Tensor, network: NetworkWeights, neurons: slice) -> Tensor:
    """Output of some neurons, [tokens, hidden], without the output bias."""
    return linear(activations(hidden, network, neurons), network.down[:, neurons])


def activations(hidden: Tensor, network: NetworkWeights, neurons: slice | Tensor) -> Tensor:
    """Compute the inputs of the output projection, [tokens, neurons], for a range or for indices of neurons."""
    up_bias, gate_bias = (None if bias is None else bias[neurons] for bias in (network.up_bias, network.gate_bias))
    inner = linear(hidden, network.up[neurons], up_bias)
    if network.gate is None:
        return elementwise(network.activation, inner)
    inner *= elementwise(network.activation, linear(hidden, network.gate[neurons], gate_bias))
    return inner
