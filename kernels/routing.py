"""Routing over mapped experts: the router mapping `W_RM` of EEP (arXiv 2407.00945, Eq. 5), for every family's rule.

The mapping acts on scores over all n experts, `s' = W_RM s` with s the softmax or the sigmoid of the logits, or on the
logits themselves, `l' = W_RM l`, whose scores then follow. Where a family chooses by s + b, the correction bias is
mapped with the same rows, `b' = W_RM b`, in either space: new experts are ranked by s' + b' and weighed by s'.
Group-limited families limit the choice among new experts, in their order, to the best of as many groups of
n' / groups experts.

Mapped weights can be negative or sum to nothing when `W_RM` is continuous. They are not clamped (the authors' code
doesn't either): the top-k is taken of them as they are. Where the family rescales the chosen weights to sum 1, they are
divided by their sum if it exceeds `SUM_EPS`; otherwise the k chosen experts get 1/k each, so the result is finite for
any finite mapping. Where the family does not rescale, s' is used as it is, sign included.

With dynamic skipping (NAEE, arXiv 2402.14800, Sec. 3.3) a token's second expert gets weight 0 where its weight is below
`skip_below` times the first's, before any rescaling. The kernel leaves it in its place: what is computed is the paper's
function, not its saving.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moevolve.kernels.products import elementwise, linear
from moevolve.kernels.routing_rule import RoutingGroups, RoutingRule

SUM_EPS = 1e-6
"""Chosen mapped weights that sum to no more than this are replaced by 1/k each, in families that rescale them."""

POSITIVE_EPS = 1e-20
"""What families add to the sum of chosen sigmoids before they divide by it."""


def scores_of(logits: Tensor, rule: RoutingRule) -> Tensor:
    """Scores over all experts, float32, of logits [tokens, n].

    Raises:
        ValueError: the family has none, because it takes the top-k of the logits.
    """
    if rule.scores == "sigmoid":
        return elementwise(torch.sigmoid, logits.float())
    if rule.scores == "softmax":
        return torch.softmax(logits, dim=-1, dtype=torch.float32)
    raise ValueError("the family takes the top-k of the logits and has no scores over all experts")


def top_k(
    scores: Tensor,
    active: int,
    rule: RoutingRule,
    skip_below: float | None = None,
    *,
    bias: Tensor | None = None,
    mapped: bool = False,
) -> tuple[Tensor, Tensor]:
    """The k best experts of each token and their routing weights.

    Args:
        scores: float32 [tokens, experts]; any sign.
        active: experts per token k, at most what the rule's groups let a token reach.
        rule: how the family chooses and weighs.
        skip_below: threshold of dynamic skipping, for k = 2 only; None skips nothing.
        bias: added to the scores for choosing only, float32 [experts].
        mapped: whether scores come of a continuous mapping, so that their sums can vanish (see the module).

    Returns:
        Weights float32 [tokens, k] and expert indices int64 [tokens, k], in descending order of rank.
    """
    if bias is None and rule.groups.count == 1:
        weights, chosen = torch.topk(scores, active, dim=-1)
    else:
        ranks = scores if bias is None else scores + bias
        chosen = torch.topk(_within_groups(ranks, rule.groups), active, dim=-1).indices
        weights = scores.gather(1, chosen)
    used = None
    if skip_below is not None:
        used = _used(weights, skip_below)
        weights = weights * used
    if rule.renormalise:
        total = weights.sum(dim=-1, keepdim=True)
        if mapped:
            uniform = torch.full_like(weights, 1.0 / active) if used is None else used / used.sum(dim=-1, keepdim=True)
            weights = torch.where(total > SUM_EPS, weights / total.clamp_min(SUM_EPS), uniform)
        else:
            weights = weights / (total + POSITIVE_EPS)
    return weights if rule.scale == 1 else weights * rule.scale, chosen


def _used(weights: Tensor, skip_below: float) -> Tensor:
    """1 for experts that dynamic skipping leaves, 0 for others: like `weights` [tokens, 2]."""
    first, second = weights.unbind(dim=-1)
    return torch.stack([torch.ones_like(first), (second >= skip_below * first).to(first.dtype)], dim=-1)


def _within_groups(ranks: Tensor, groups: RoutingGroups) -> Tensor:
    """Ranks [tokens, experts] with minus infinity for experts outside a token's best groups."""
    if groups.count == 1:
        return ranks
    divided = ranks.view(ranks.shape[0], groups.count, -1)
    worth = divided.topk(groups.best, dim=-1).values.sum(dim=-1)
    best = worth.topk(groups.chosen, dim=-1).indices
    barred = torch.ones_like(worth, dtype=torch.bool).scatter_(1, best, False)
    return divided.masked_fill(barred[:, :, None], float("-inf")).view_as(ranks)


def route_mapped(
    logits: Tensor,
    mapping: Tensor,
    active: int,
    rule: RoutingRule,
    skip_below: float | None = None,
    *,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Routing with a continuous mapping of the scores over all n experts (Eq. 5).

    Args:
        logits: router logits over all n experts, [tokens, n], any floating dtype.
        mapping: `W_RM`, float32 [n', n], finite.
        active: experts per token k <= n'.
        rule: how the family chooses and weighs.
        skip_below: see `top_k`.
        bias: the new experts' correction bias, float32 [n'].

    Returns:
        Weights float32 [tokens, k] and indices of new experts int64 [tokens, k].

    Raises:
        ValueError: the family has no scores over all experts.
    """
    return top_k(linear(scores_of(logits, rule), mapping), active, rule, skip_below, bias=bias, mapped=True)


def route_selected(
    logits: Tensor,
    selected: Tensor,
    active: int,
    rule: RoutingRule,
    logits_space: bool,
    skip_below: float | None = None,
    *,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Routing with a one-hot mapping, `W_RM[i, selected[i]] = 1`: no matrix product, and exact.

    Rescaling makes the scale of the softmax over all n cancel, so there (and in logits space) the softmax is taken over
    the selected logits alone: the same function, and one that stays exact for tokens whose selected experts hold almost
    none of the full softmax's mass. Without rescaling the selected weights keep the full softmax's scale. Sigmoids are
    each expert's own: picking them and picking their logits are the same.

    Args:
        logits: router logits over all n experts, [tokens, n], any floating dtype.
        selected: the original expert each new expert is routed like, int64 [n'].
        active: experts per token k <= n'.
        rule: how the family chooses and weighs.
        logits_space: whether the mapping acts on the logits.
        skip_below: see `top_k`.
        bias: the new experts' correction bias, float32 [n'].

    Returns:
        Weights float32 [tokens, k] and indices of new experts int64 [tokens, k].
    """
    if rule.one_hot_folds or logits_space:
        return route_logits(logits.index_select(-1, selected), active, rule, skip_below, bias=bias)
    return top_k(scores_of(logits, rule).index_select(-1, selected), active, rule, skip_below, bias=bias)


def route_logits(
    logits: Tensor, active: int, rule: RoutingRule, skip_below: float | None = None, *, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Routing on the logits of the new experts themselves: `W_RM` already folded into the router's weight.

    Args:
        logits: router logits over the n' new experts, [tokens, n'], any floating dtype.
        active: experts per token k <= n'.
        rule: how the family chooses and weighs.
        skip_below: see `top_k`.
        bias: the new experts' correction bias, float32 [n'].

    Returns:
        Weights float32 [tokens, k] and indices of new experts int64 [tokens, k].
    """
    if rule.scores == "softmax_of_chosen":
        values, chosen = torch.topk(logits, active, dim=-1)
        weights = torch.softmax(values, dim=-1, dtype=torch.float32)
        if skip_below is not None:
            weights = weights * _used(weights, skip_below)
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights * rule.scale, chosen
    return top_k(scores_of(logits, rule), active, rule, skip_below, bias=bias)
