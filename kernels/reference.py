"""Plain torch oracles: the equations as loops, for tests and for reading. Nothing on the hot path calls them.

Source: Efficient Expert Pruning (arXiv 2407.00945), Eq. 5 (router mapping) and Eq. 6 (expert merging).
"""

from __future__ import annotations

import torch
from torch import Tensor

from moevolve.kernels.routing import SUM_EPS


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


def route_token(logits: Tensor, mapping: Tensor, active: int, renormalise: bool, logits_space: bool) -> Tensor:
    """Routing weights of one token over the n' new experts (Eq. 5), zero where an expert was not chosen.

    Args:
        logits: the router's logits over all n experts, [n].
        mapping: `W_RM`, [n', n].
        active: experts per token k.
        renormalise: whether the chosen weights are rescaled to sum 1.
        logits_space: map the logits and take the softmax over n' instead of mapping the softmax over n.

    Returns:
        float64 [n'].
    """
    logits, mapping = logits.double(), mapping.double()
    if logits_space:
        mapped = torch.softmax(torch.stack([(row * logits).sum() for row in mapping]), dim=0)
    else:
        probabilities = torch.softmax(logits, dim=0)
        mapped = torch.stack([(row * probabilities).sum() for row in mapping])
    order = sorted(range(len(mapped)), key=lambda i: -float(mapped[i]))[:active]
    weights = torch.zeros_like(mapped)
    total = sum(float(mapped[i]) for i in order)
    for i in order:
        if not renormalise:
            weights[i] = mapped[i]
        else:
            weights[i] = mapped[i] / total if total > SUM_EPS else 1 / active
    return weights
