"""The router's arithmetic as one kernel: the named option beside `moevolve.kernels.routing_population`.

It computes the same function with float32 sums in another order (see `moevolve.kernels.triton_router` for how far that
goes), so it is off unless it is asked for.
"""

from __future__ import annotations

from torch import Tensor

from moevolve.kernels.dispatch import uses_triton
from moevolve.kernels.routing_population import TokenOwners, route_mapped_by_owner, route_selected_by_owner
from moevolve.kernels.routing_rule import RoutingRule


def can_fuse(rule: RoutingRule, *tensors: Tensor) -> bool:
    """Whether there is a fused kernel for a family's rule (no groups, scores over all experts) on these tensors."""
    return rule.groups.count == 1 and rule.scores != "softmax_of_chosen" and uses_triton(*tensors)


def route_fused(
    logits: Tensor,
    mappings: Tensor,
    owners: TokenOwners,
    active: int,
    rule: RoutingRule,
    logits_space: bool = False,
    *,
    biases: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Route every token with its candidate's mapping, by one kernel where there is one, else by torch.

    Args:
        logits: router logits over all n experts, [tokens, n].
        mappings: continuous float32 [P, n', n] on the scores, or one-hot as int64 [P, n'].
        owners: of the tokens.
        active: experts per token k <= n'.
        rule: how the family chooses and weighs.
        logits_space: for one-hot mappings, whether they act on the logits.
        biases: the new experts' correction biases, float32 [P, n'].

    Returns:
        Weights float32 [tokens, k] and indices of the candidate's new experts int64 [tokens, k].

    Raises:
        ValueError: a continuous mapping for a family without scores over all experts.
    """
    one_hot = mappings.dim() == 2
    if can_fuse(rule, logits, mappings):
        from moevolve.kernels.triton_router import route

        bias = None if biases is None else biases.contiguous()
        alone = rule.one_hot_folds or logits_space
        return route(logits.contiguous(), owners.owner, mappings.contiguous(), bias, active, rule, alone)
    if one_hot:
        return route_selected_by_owner(logits, mappings, owners, active, rule, logits_space, biases=biases)
    return route_mapped_by_owner(logits, mappings, owners, active, rule, biases=biases)
