"""Router rows of kept experts whose neurons come from several experts: which experts each represents, and its routing.

A kept expert takes over the work of a group of experts, so a token should choose and weigh it as it did the group.
Experts that tokens choose together go to different groups, since all neurons of a kept expert share one routing weight.
The kept expert's logit is then fitted to the logarithm of its group's routing mass,
`log sum over e in group of softmax(l)_e`, by ridge regression of the router's rows on its inputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_LEAST_MASS = 1e-6
"""Lower bound on a group's routing mass: how far below it lies isn't worth fitting."""
_RIDGE_LAMBDA = 1e-3
"""Ridge strength as a multiple of the mean square of an input, summed over tokens."""
_ROWS = 1024
"""Rows of a float32 product that are added to a float64 sum at once."""


def group_experts(together: NDArray[np.float64], kept: Sequence[int]) -> NDArray[np.int64]:
    """Group experts so that those of a group are seldom chosen together, by greedy moves of single experts.

    Args:
        together: Products of two experts' routing weights summed over tokens, symmetric [n, n].
        kept: The experts that stay in groups 0 to n' - 1, in this order, [n'].

    Returns:
        Group of every expert, [n]. No move of a single expert lowers the sum of `together` within groups.
    """
    count, fixed = len(together), np.array(kept)
    between = together * (1 - np.eye(count))
    groups = np.full(count, -1, dtype=np.int64)
    groups[fixed] = np.arange(len(fixed))
    # Column g sums `between` over the members of group g.
    common = between[:, fixed]
    for expert in np.argsort(-np.diagonal(together), kind="stable"):
        if groups[expert] < 0:
            groups[expert] = int(common[expert].argmin())
            common[:, groups[expert]] += between[:, expert]
    # Updated sums differ from fresh ones in their last digits: a gain of that size could make moves go round for ever.
    least = 1e-9 * float(between.sum())
    while True:
        gains = common[np.arange(count), groups][:, None] - common
        gains[fixed] = 0
        expert, group = divmod(int(gains.argmax()), len(fixed))
        if gains[expert, group] <= least:
            return groups
        common[:, groups[expert]] -= between[:, expert]
        common[:, group] += between[:, expert]
        groups[expert] = group


def fit_rows(
    hidden: Tensor, logits: Tensor, groups: NDArray[np.int64], weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor | None] | None:
    """Fit router rows whose logits are the logarithms of groups' routing mass, up to a constant per token.

    Args:
        hidden: Inputs of the router, [tokens, hidden].
        logits: Logits of the unedited router, [tokens, n].
        groups: Group of every expert, [n], with no group from 0 to n' - 1 empty.
        weight: Rows that the ridge regression shrinks to, one per group, [n', hidden].
        bias: Biases of these rows, [n'], if the router has biases.

    Returns:
        Weight [n', hidden] and bias [n'], if there is one, in the dtypes of those given. None if inputs are not finite.
    """
    members = torch.nn.functional.one_hot(torch.from_numpy(groups)).to(logits.device, torch.float32)
    start = _centred(weight.float(), 0)
    inputs = hidden.float()
    if bias is not None:
        inputs = torch.cat((inputs, inputs.new_ones(len(inputs), 1)), dim=1)
        start = torch.cat((start, _centred(bias.float(), 0)[:, None]), dim=1)
    width = inputs.shape[1]
    gram = inputs.new_zeros(width, width, dtype=torch.float64)
    right = inputs.new_zeros(width, len(start), dtype=torch.float64)
    for rows, scores in zip(inputs.split(_ROWS), logits.split(_ROWS), strict=True):
        mass = torch.softmax(scores.float(), dim=-1) @ members
        residual = _centred(mass.clamp_min(_LEAST_MASS).log(), 1) - rows @ start.t()
        gram += rows.t() @ rows
        right += rows.t() @ residual
    gram.diagonal().add_(_RIDGE_LAMBDA * float(gram.diagonal().mean()))
    factor, failed = torch.linalg.cholesky_ex(gram)
    if int(failed):
        return None
    fitted = start + torch.cholesky_solve(right, factor).t().float()
    fitted_weight = fitted[:, : weight.shape[1]].to(weight.dtype)
    return fitted_weight, None if bias is None else fitted[:, -1].to(bias.dtype)


def _centred(values: Tensor, dim: int) -> Tensor:
    return values - values.mean(dim=dim, keepdim=True)
