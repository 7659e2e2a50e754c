"""Routing over mapped experts: the router mapping `W_RM` of EEP (arXiv 2407.00945, Eq. 5), for every family's rule.

The mapping acts on the scores over all n experts, `s' = W_RM s` with s the softmax or the sigmoid of the logits, or on
the logits, `l' = W_RM l`, from which the scores are then computed. If a family chooses experts by s + b, the correction
bias is mapped as well, `b' = W_RM b`: new experts are ranked by s' + b' and weighted by s'. Group-limited routing
divides the new experts, in order, into the same number of groups.

With a continuous `W_RM` mapped weights can be negative or sum to zero. They aren't clamped, as in the authors' code:
the top-k of them is chosen. If the family rescales the chosen weights to sum to 1, they are divided by their sum if
that exceeds `SUM_EPS`; otherwise the k chosen experts get 1/k each, so the result is finite for any finite mapping. If
the family doesn't rescale, s' is used with its sign.

With dynamic skipping (NAEE, arXiv 2402.14800, Sec. 3.3) a token's second expert gets weight 0 if its weight is below
`skip_below` times the first expert's, before any rescaling. The expert is still computed: this is the paper's function,
not its saving.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from moevolve.kernels.products import elementwise, linear
from moevolve.kernels.routing_rule import RoutingGroups, RoutingRule

# Weights [tokens, k], float32 unless the rule rounds them, and indices of new experts int64 [tokens, k], in descending
# order of rank.
Routed = tuple[Tensor, Tensor]

# Chosen mapped weights with at most this sum are replaced by 1/k each, in families that rescale them.
SUM_EPS = 1e-6

# Value that families add to the sum of chosen sigmoids before they divide by it.
POSITIVE_EPS = 1e-20


def scores_of(logits: Tensor, rule: RoutingRule) -> Tensor:
    """Compute the scores over all experts from logits [tokens, n], float32 unless the rule rounds them."""
    values = logits if rule.rounds else logits.float()
    if rule.scores == "sigmoid":
        return elementwise(torch.sigmoid, values)
    if rule.scores == "softmax":
        return torch.softmax(values, dim=-1)
    raise ValueError(f"the family chooses experts by their logits ({rule.scores}) and has no scores over all of them")


def top_k(
    scores: Tensor,
    active: int,
    rule: RoutingRule,
    skip_below: float | None = None,
    *,
    bias: Tensor | None = None,
    ranks: Tensor | None = None,
    mapped: bool = False,
    chosen: Tensor | None = None,
) -> Routed:
    """Choose the k best experts of each token and compute their routing weights.

    Args:
        scores: Scores of any sign, [tokens, experts], in the dtype that the weights are to have.
        active: Number k of experts per token, at most the number that the rule's groups allow.
        rule: Routing rule of the family.
        skip_below: Threshold of dynamic skipping, for k = 2 only; None for no skipping.
        bias: Correction bias, added to the ranks for choosing only, float32 [experts]; None for none.
        ranks: What experts are chosen by, [tokens, experts]; None for the scores.
        mapped: True if the scores come from a continuous mapping, so that their sum can be zero.
        chosen: Experts of each token, int64 [tokens, k]; None to choose them by their ranks.
    """
    if chosen is None:
        ranks = scores if ranks is None else ranks
        ranks = ranks if bias is None else ranks + bias
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
    """1 for experts that are used and 0 for skipped ones, in the shape of `weights` [tokens, 2]."""
    first, second = weights.unbind(dim=-1)
    return torch.stack([torch.ones_like(first), (second >= skip_below * first).to(first.dtype)], dim=-1)


def _within_groups(ranks: Tensor, groups: RoutingGroups) -> Tensor:
    """Set ranks [tokens, experts] to minus infinity for experts outside a token's best groups."""
    if groups.count == 1:
        return ranks
    by_group = ranks.view(ranks.shape[0], groups.count, -1)
    group_ranks = by_group.topk(groups.best, dim=-1).values.sum(dim=-1)
    best = group_ranks.topk(groups.chosen, dim=-1).indices
    excluded = torch.ones_like(group_ranks, dtype=torch.bool).scatter_(1, best, False)
    return by_group.masked_fill(excluded[:, :, None], float("-inf")).view_as(ranks)


def route_mapped(
    logits: Tensor,
    mapping: Tensor,
    active: int,
    rule: RoutingRule,
    skip_below: float | None = None,
    *,
    bias: Tensor | None = None,
) -> Routed:
    """Route by logits [tokens, n] with a continuous mapping of the scores, `W_RM` float32 [n', n]; see `top_k`.

    Raises:
        ValueError: The family has no scores over all experts.
    """
    return top_k(linear(scores_of(logits.float(), rule), mapping), active, rule, skip_below, bias=bias, mapped=True)


def route_selected(
    logits: Tensor,
    selected: Tensor,
    active: int,
    rule: RoutingRule,
    logits_space: bool,
    skip_below: float | None = None,
    *,
    bias: Tensor | None = None,
    chosen: Tensor | None = None,
) -> Routed:
    """Route with a one-hot mapping, `W_RM[i, selected[i]] = 1`, exactly and without a matrix product; see `top_k`.

    Rescaling cancels the scale of the softmax over all n experts. So with it, or in logits space, the softmax is taken
    over the selected logits alone: the same function, which stays exact for tokens whose selected experts have almost
    none of the full softmax. Without rescaling the selected weights keep the scale of the full softmax. Sigmoids don't
    depend on other experts, so selecting them is the same as selecting their logits.

    Args:
        logits: Router logits over all n experts, [tokens, n], of any floating dtype.
        selected: Original expert that each new expert is routed like, int64 [n'].
        logits_space: True if the mapping acts on the logits.
    """
    if rule.one_hot_folds or logits_space:
        return route_logits(logits.index_select(-1, selected), active, rule, skip_below, bias=bias, chosen=chosen)
    return top_k(scores_of(logits, rule).index_select(-1, selected), active, rule, skip_below, bias=bias)


def route_logits(
    logits: Tensor,
    active: int,
    rule: RoutingRule,
    skip_below: float | None = None,
    *,
    bias: Tensor | None = None,
    chosen: Tensor | None = None,
) -> Routed:
    """Route by logits [tokens, n'] of the new experts, with `W_RM` folded into the router's weight; see `top_k`.

    `sparse_mixer` skips nothing.
    """
    if rule.scores == "sparse_mixer":
        return _sparse_mixer(logits, rule.nearness)
    if rule.scores == "softmax_of_chosen":
        values, chosen = torch.topk(logits, active, dim=-1)
        weights = torch.softmax(values, dim=-1, dtype=torch.float32)
        if skip_below is not None:
            weights = weights * _used(weights, skip_below)
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights * rule.scale, chosen
    if rule.scores == "sigmoid_of_chosen":
        scores = elementwise(torch.sigmoid, logits.float())
        return top_k(scores, active, rule, skip_below, bias=bias, ranks=logits)
    if rule.scores == "sqrt_softplus_of_chosen":
        scores = elementwise(functional.softplus, logits if rule.rounds else logits.float()).sqrt()
        return top_k(scores, active, rule, skip_below, bias=bias, chosen=chosen)
    return top_k(scores_of(logits, rule), active, rule, skip_below, bias=bias)


def kept_places(kept: Sequence[int], experts: int) -> Tensor:
    """Return the `places` of `choose_kept`: where each of n original experts is in `kept` first, or -1, int64 [n]."""
    places = torch.full((experts,), -1)
    for place, expert in reversed([*enumerate(kept)]):
        places[expert] = place
    return places


def choose_kept(chosen: Tensor, places: Tensor, retained: int, active: int) -> Tensor:
    """Choose kept experts for tokens whose experts are fixed, such as by a table of token ids.

    A token gets those of its experts that are kept, in order and over again up to k: experts that it gets twice count
    twice, so that rescaled weights are those of its kept experts alone where k is a multiple of their number. A token
    none of whose experts is kept gets those with its experts' numbers modulo n'.

    Args:
        chosen: Original experts of every token, int64 [tokens, any].
        places: Number of the kept expert that takes each original expert's tokens, or -1, int64 [n].
        retained: Number n' of kept experts.
        active: Number k of experts per token.

    Returns:
        Kept experts, int64 [tokens, k].
    """
    found = places[chosen]
    none = (found < 0).all(dim=1, keepdim=True)
    found = torch.where(none, chosen % retained, found)
    order = torch.argsort((found < 0).to(torch.int8), dim=1, stable=True)
    count = (found >= 0).sum(dim=1, keepdim=True)
    turns = torch.arange(active, device=chosen.device) % count
    return found.gather(1, order.gather(1, turns))


def _sparse_mixer(logits: Tensor, nearness: float) -> Routed:
    """Choose two experts of each token one after the other, and weight each by a softmax over those near it.

    Source: GRIN (arXiv 2409.12136), Sec. 2.2, at inference, as implemented in `transformers` for Phi-3.5-MoE: in the
    logits' dtype, which decides which of them are near.
    """
    weights, chosen, left = [], [], logits
    for _ in range(2):
        best, index = left.max(dim=-1, keepdim=True)
        far = (best - logits) / torch.maximum(logits.abs(), best) > nearness
        weights.append(torch.softmax(left.masked_fill(far, float("-inf")), dim=-1).gather(-1, index))
        chosen.append(index)
        left = left.scatter(-1, index, float("-inf"))
    return torch.cat(weights, dim=-1).float(), torch.cat(chosen, dim=-1)
