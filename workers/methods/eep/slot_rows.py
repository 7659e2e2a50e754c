"""Router rows of slots that are filled with neurons of all experts: which experts a slot stands for, and their routing.

A slot takes over what its group of experts did, so it should be chosen and weighed as they were together. Experts that
tokens choose together are put into different groups, since a slot's neurons have one routing weight between them. A
slot's logit is then fitted to the logarithm of its group's routing mass, `log sum over e in group of softmax(l)_e`, by
ridge regression of the router's rows on its inputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_LEAST_MASS = 1e-6
"""Groups with less of a token's routing are taken to have so much: how little it is should not be fitted."""
_STRENGTH = 1e-3
"""Of the ridge, as a multiple of the mean square of an input summed over tokens."""
_ROWS = 1024
"""Rows of a product that are added to float64 at once."""


def group_experts(together: NDArray[np.float64], kept: Sequence[int]) -> NDArray[np.int64]:
    """Divide experts into groups of such as are seldom chosen together, by moving one after the other while it helps.

    Args:
        together: sum over tokens of the product of two experts' routing weights, symmetric [n, n].
        kept: one expert of every group, which stays in it, [n'].

    Returns:
        Every expert's group, [n]. No single move leaves less of `together` within groups.
    """
    count, fixed = len(together), np.array(kept)
    away = together * (1 - np.eye(count))
    groups = np.full(count, -1, dtype=np.int64)
    groups[fixed] = np.arange(len(fixed))
    # What an expert has in common with the members of each group.
    common = away[:, fixed]
    for expert in np.argsort(-np.diagonal(together), kind="stable"):
        if groups[expert] < 0:
            groups[expert] = int(common[expert].argmin())
            common[:, groups[expert]] += away[:, expert]
    # Sums in another order differ in their last digits, and a gain of that size could come back for ever.
    least = 1e-9 * float(away.sum())
    while True:
        gains = common[np.arange(count), groups][:, None] - common
        gains[fixed] = 0
        expert, group = divmod(int(gains.argmax()), len(fixed))
        if gains[expert, group] <= least:
            return groups
        common[:, groups[expert]] -= away[:, expert]
        common[:, group] += away[:, expert]
        groups[expert] = group


def fit_rows(
    hidden: Tensor, logits: Tensor, groups: NDArray[np.int64], weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor | None] | None:
    """Router rows whose logits are the logarithms of groups' routing mass, up to what is common to all of them.

    Args:
        hidden: the router's inputs, [tokens, hidden].
        logits: of the unedited router, [tokens, n].
        groups: of every expert, [n]; each of 0 to n' - 1 once at least.
        weight: rows to stay near, one per group, [n', hidden].
        bias: of these rows, [n'], or None where the router has none.

    Returns:
        Weight [n', hidden] and bias [n'], if there is one, in the dtypes of those given; None where inputs are not
        finite.
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
        missing = _centred(mass.clamp_min(_LEAST_MASS).log(), 1) - rows @ start.t()
        gram += rows.t() @ rows
        right += rows.t() @ missing
    gram.diagonal().add_(_STRENGTH * float(gram.diagonal().mean()))
    factor, failed = torch.linalg.cholesky_ex(gram)
    if int(failed):
        return None
    fitted = start + torch.cholesky_solve(right, factor).t().float()
    rows_fitted = fitted[:, : weight.shape[1]].to(weight.dtype)
    return rows_fitted, None if bias is None else fitted[:, -1].to(bias.dtype)


def _centred(values: Tensor, dim: int) -> Tensor:
    return values - values.mean(dim=dim, keepdim=True)
