"""Routing over mapped experts: the router mapping `W_RM` of EEP (arXiv 2407.00945, Eq. 5).

Mapped weights `s = softmax(logits) W_RM^T` can be negative or sum to nothing when `W_RM` is continuous. They are not
clamped (the authors' code doesn't either): the top-k is taken on `s` as it is. Where the family rescales the chosen
weights to sum 1, they are divided by their sum if it exceeds `SUM_EPS`; otherwise the k chosen experts get 1/k each, so
the result is finite for any finite mapping. Where the family does not rescale, `s` is used as it is, sign included.

With dynamic skipping (NAEE, arXiv 2402.14800, Sec. 3.3) a token's second expert gets weight 0 where its weight is below
`skip_below` times the first's, before any rescaling. The kernel leaves it in its place: what is computed is the paper's
function, not its saving.
"""

from __future__ import annotations

import torch
from torch import Tensor

SUM_EPS = 1e-6
"""Chosen weights that sum to no more than this are replaced by 1/k each, in families that rescale them."""


def top_k(scores: Tensor, active: int, renormalise: bool, skip_below: float | None = None) -> tuple[Tensor, Tensor]:
    """The k largest routing weights of each token, rescaled to sum 1 if the family does.

    Args:
        scores: routing weights, float32 [tokens, experts]; any sign.
        active: experts per token k, at most the number of experts.
        renormalise: whether the chosen weights are rescaled to sum 1 (see the module on vanishing sums).
        skip_below: threshold of dynamic skipping, for k = 2 only; None skips nothing.

    Returns:
        Weights float32 [tokens, k] and expert indices int64 [tokens, k], in descending order of weight.
    """
    weights, chosen = torch.topk(scores, active, dim=-1)
    used = None
    if skip_below is not None:
        first, second = weights.unbind(dim=-1)
        used = torch.stack([torch.ones_like(first), (second >= skip_below * first).to(first.dtype)], dim=-1)
        weights = weights * used
    if not renormalise:
        return weights, chosen
    total = weights.sum(dim=-1, keepdim=True)
    uniform = torch.full_like(weights, 1.0 / active) if used is None else used / used.sum(dim=-1, keepdim=True)
    return torch.where(total > SUM_EPS, weights / total.clamp_min(SUM_EPS), uniform), chosen


def route_mapped(
    logits: Tensor, mapping: Tensor, active: int, renormalise: bool, skip_below: float | None = None
) -> tuple[Tensor, Tensor]:
    """Routing with a continuous mapping of the softmax over all n experts (Eq. 5).

    Args:
        logits: router logits over all n experts, [tokens, n], any floating dtype.
        mapping: `W_RM`, float32 [n', n], finite.
        active: experts per token k <= n'.
        renormalise: whether the chosen weights are rescaled to sum 1.
        skip_below: see `top_k`.

    Returns:
        Weights float32 [tokens, k] and indices of new experts int64 [tokens, k].
    """
    probabilities = torch.softmax(logits, dim=-1, dtype=torch.float32)
    return top_k(probabilities @ mapping.t(), active, renormalise, skip_below)


def route_selected(
    logits: Tensor,
    selected: Tensor,
    active: int,
    renormalise: bool,
    logits_space: bool,
    skip_below: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Routing with a one-hot mapping, `W_RM[i, selected[i]] = 1`: no matrix product, and exact.

    Rescaling makes the scale of the softmax over all n cancel, so there (and in logits space) the softmax is taken over
    the selected logits alone: the same function, and one that stays exact for tokens whose selected experts hold almost
    none of the full softmax's mass. Without rescaling the selected weights keep the full softmax's scale.

    Args:
        logits: router logits over all n experts, [tokens, n], any floating dtype.
        selected: the original expert each new expert is routed like, int64 [n'].
        active: experts per token k <= n'.
        renormalise: whether the chosen weights are rescaled to sum 1.
        logits_space: whether the mapping acts on the logits.
        skip_below: see `top_k`.

    Returns:
        Weights float32 [tokens, k] and indices of new experts int64 [tokens, k].
    """
    if renormalise or logits_space:
        scores = torch.softmax(logits.index_select(-1, selected), dim=-1, dtype=torch.float32)
    else:
        scores = torch.softmax(logits, dim=-1, dtype=torch.float32).index_select(-1, selected)
    return top_k(scores, active, renormalise, skip_below)


def route_logits(
    logits: Tensor, active: int, renormalise: bool, skip_below: float | None = None
) -> tuple[Tensor, Tensor]:
    """Routing on the logits of the new experts themselves: `W_RM` already folded into the router's weight.

    Args:
        logits: router logits over the n' new experts, [tokens, n'], any floating dtype.
        active: experts per token k <= n'.
        renormalise: whether the chosen weights are rescaled to sum 1.
        skip_below: see `top_k`.

    Returns:
        Weights float32 [tokens, k] and indices of new experts int64 [tokens, k].
    """
    return top_k(torch.softmax(logits, dim=-1, dtype=torch.float32), active, renormalise, skip_below)
