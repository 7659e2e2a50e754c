"""Plain torch oracles of the kernels: the papers' equations as loops.

Source: Efficient Expert Pruning (arXiv 2407.00945), Eq. 5 (router mapping) and Eq. 6 (expert merging); Not All Experts
are Equal (arXiv 2402.14800), Sec. 3.3 (dynamic skipping); FactorLLM (arXiv 2408.11855), Eq. 7 (chosen experts of a
divided network); ToMoE (arXiv 2501.15316), Eq. 17 (a masked network); NanoMoE, Eq. 1 and 2 (a block-mixed layer).
"""

from __future__ import annotations

import torch
from torch import Tensor

from moevolve.kernels.expert_ffn import NetworkWeights
from moevolve.kernels.routing import SUM_EPS
from moevolve.kernels.routing_rule import RoutingRule


def merge_experts(coefficients: Tensor, experts: Tensor) -> Tensor:
    """Merged experts `theta'_i = sum_j W_EM[i, j] theta_j` (Eq. 6), accumulated in float64.

    Args:
        coefficients: `W_EM`, [n', n].
        experts: parameters of the n experts, [n, ...].

    Returns:
        [n', ...] in the dtype of `experts`.
    """
    merged = torch.zeros((coefficients.shape[0], *experts.shape[1:]), dtype=torch.float64, device=experts.device)
    for new in range(coefficients.shape[0]):
        for old in range(coefficients.shape[1]):
            merged[new] += float(coefficients[new, old]) * experts[old].double()
    return merged.to(experts.dtype)


def route_token(
    logits: Tensor,
    mapping: Tensor,
    active: int,
    rule: RoutingRule,
    logits_space: bool,
    skip_below: float | None = None,
    correction: Tensor | None = None,
) -> Tensor:
    """Routing weights of one token over the n' new experts (Eq. 5), zero where an expert was not chosen or is skipped.

    Args:
        logits: the router's logits over all n experts, [n].
        mapping: `W_RM`, [n', n].
        active: experts per token k.
        rule: how the family chooses and weighs.
        logits_space: map the logits and score n' of them, instead of mapping the scores over n.
        skip_below: drop the second of k = 2 experts if its weight is below this times the first's (NAEE, Sec. 3.3).
        correction: the family's correction bias over n experts, used for choosing only, [n].

    Returns:
        float64 [n'].
    """
    logits, mapping = logits.double(), mapping.double()
    new_logits = torch.stack([(row * logits).sum() for row in mapping])
    if logits_space or rule.scores == "sigmoid_of_chosen":
        mapped = _scores(new_logits, rule)
    else:
        scores = _scores(logits, rule)
        mapped = torch.stack([(row * scores).sum() for row in mapping])
    ranks = new_logits if rule.scores == "sigmoid_of_chosen" else mapped
    if correction is not None:
        ranks = ranks + torch.stack([(row * correction.double()).sum() for row in mapping])
    size = len(mapped) // rule.groups.count
    groups = [list(range(start, start + size)) for start in range(0, len(mapped), size)]
    worth = [sum(sorted((float(ranks[i]) for i in group), reverse=True)[: rule.groups.best]) for group in groups]
    best = sorted(range(len(groups)), key=lambda g: -worth[g])[: rule.groups.chosen]
    allowed = [i for g in best for i in groups[g]]
    order = sorted(allowed, key=lambda i: -float(ranks[i]))[:active]
    if skip_below is not None and float(mapped[order[1]]) < skip_below * float(mapped[order[0]]):
        order = order[:1]
    weights = torch.zeros_like(mapped)
    total = sum(float(mapped[i]) for i in order)
    # Scores of a router are positive, however small; only a mapping of them can make their sum vanish.
    least = 0 if logits_space else SUM_EPS
    for i in order:
        weights[i] = mapped[i]
        if rule.renormalise:
            weights[i] = mapped[i] / total if total > least else 1 / len(order)
    return weights * rule.scale


def _scores(logits: Tensor, rule: RoutingRule) -> Tensor:
    """The softmax, of which the chosen part is rescaled where only the chosen logits have one, or another function."""
    if rule.scores == "sqrt_softplus_of_chosen":
        return torch.log(1 + torch.exp(logits)).sqrt()
    return 1 / (1 + torch.exp(-logits)) if rule.scores.startswith("sigmoid") else torch.softmax(logits, dim=0)


def block_mix_weight(u: Tensor, v: Tensor, mixing: Tensor | None) -> Tensor:
    """The dense weight `blockdiag(U) M blockdiag(V)` of a block-mixed linear layer (NanoMoE, Eq. 1 and 2).

    Args:
        u: the blocks U_i, [K, d2 / K, r].
        v: the blocks V_j, [K, r, d1 / K].
        mixing: M's parameters as `moevolve.kernels.block_mix.block_mix` takes them; None for low rank (K = 1).

    Returns:
        float64 [d2, d1].
    """
    blocks, _, rank = u.shape
    identity = torch.eye(rank, dtype=torch.float64, device=u.device)
    rows = []
    for i in range(blocks):
        row = []
        for j in range(blocks):
            if mixing is None:
                block = identity
            elif mixing.dim() == 2:
                block = mixing[i, j].double() * identity
            elif mixing.dim() == 3:
                block = torch.diag(mixing[i, j].double())
            else:
                diagonal, alpha, beta = mixing[:, i, j].double()
                block = torch.diag(diagonal) + torch.outer(alpha, beta)
            row.append(block)
        rows.append(torch.cat(row, dim=1))
    return torch.block_diag(*u.double()) @ torch.cat(rows) @ torch.block_diag(*v.double())


def factorized_ffn_token(
    hidden: Tensor, network: NetworkWeights, experts: int, weight: Tensor, bias: Tensor, active: int
) -> Tensor:
    """One token through a network divided into experts (FactorLLM, Eq. 7), neuron by neuron.

    Args:
        hidden: [hidden].
        network: neurons in order of experts.
        experts: N.
        weight, bias: routers [routers, N, hidden] and [routers, N].
        active: experts K per router.

    Returns:
        float64 [hidden].
    """
    hidden = hidden.double()
    logits = [
        [float(row.double() @ hidden + b) for row, b in zip(w, bs, strict=True)]
        for w, bs in zip(weight, bias, strict=True)
    ]
    picks = [set(sorted(range(experts), key=lambda i: (-each[i], i))[:active]) for each in logits]
    chosen = set.intersection(*picks)
    width = len(network.up) // experts
    total = torch.zeros_like(hidden)
    for neuron in range(len(network.up)):
        if neuron // width not in chosen:
            continue
        value = network.up[neuron].double() @ hidden
        value = value if network.up_bias is None else value + network.up_bias[neuron]
        if network.gate is None:
            value = network.activation(value)
        else:
            gate = network.gate[neuron].double() @ hidden
            gate = gate if network.gate_bias is None else gate + network.gate_bias[neuron]
            value = value * network.activation(gate)
        total += value * network.down[:, neuron].double()
    return total if network.down_bias is None else total + network.down_bias.double()


def masked_ffn_token(hidden: Tensor, network: NetworkWeights, kept: Tensor) -> Tensor:
    """One token through a masked network, `(act(x W_G) S * x W_U S) S W_D` (ToMoE, Eq. 17), S the diagonal matrix.

    Args:
        hidden: [hidden].
        network: the whole network.
        kept: the token's mask, bool [width].

    Returns:
        float64 [hidden].
    """
    diagonal = torch.diag(kept.double())

    def into(weight: Tensor, bias: Tensor | None) -> Tensor:
        value = hidden.double() @ weight.double().t()
        return value if bias is None else value + bias.double()

    inner = into(network.up, network.up_bias)
    if network.gate is None:
        inner = network.activation(inner) @ diagonal
    else:
        inner = (network.activation(into(network.gate, network.gate_bias)) @ diagonal) * (inner @ diagonal)
    out = inner @ diagonal @ network.down.double().t()
    return out if network.down_bias is None else out + network.down_bias.double()
