"""Routing of a batch in which every token belongs to one of P candidates, each with its own router mapping `W_RM`.

EEP (arXiv 2407.00945, Eq. 5) as in `moevolve.kernels.routing`, with `W_RM` chosen per token: several candidates that
differ in their mapping share one forward pass over all their tokens. Everything is computed token by token, but for the
products with continuous mappings, which are computed candidate by candidate over that candidate's tokens in their
order. So a candidate's tokens get the bits they get alone from `route_mapped` or `route_selected`, whoever shares the
batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moevolve.kernels.routing import route_logits, scores_of, top_k
from moevolve.kernels.routing_rule import RoutingRule


@dataclass(frozen=True, slots=True, eq=False)
class TokenOwners:
    """Which of P candidates every token of a batch belongs to. Made once per batch, used in every layer.

    Attributes:
        owner: candidate of each token, int64 [tokens], each from 0 to P - 1.
        rows: each candidate's tokens, ascending, P int64 tensors on the device of `owner`; empty where it has none.
    """

    owner: Tensor
    rows: tuple[Tensor, ...]

    @classmethod
    def of(cls, owner: Tensor, candidates: int) -> TokenOwners:
        """From the candidate of each token (waits for a device to know how many each has).

        Args:
            owner: int64 [tokens].
            candidates: P.

        Raises:
            ValueError: a token belongs to no candidate.
        """
        order = torch.argsort(owner, stable=True)
        counts = torch.bincount(owner, minlength=candidates).tolist()
        if len(counts) > candidates:
            raise ValueError(f"a token belongs to candidate {len(counts) - 1} of {candidates}")
        return cls(owner, torch.split(order, counts))

    @property
    def candidates(self) -> int:
        """P."""
        return len(self.rows)


def linear_by_owner(inputs: Tensor, weight: Tensor, owners: TokenOwners, bias: Tensor | None = None) -> Tensor:
    """`weight[owner[t]] inputs[t] + bias[owner[t]]` for every token: routers with a mapping folded in.

    Args:
        inputs: [tokens, features].
        weight: [P, outputs, features].
        owners: of the tokens.
        bias: [P, outputs], or None.

    Returns:
        [tokens, outputs] in the dtype of `inputs`, which that of `weight` and `bias` is too.
    """
    out = inputs.new_empty((inputs.shape[0], weight.shape[1]))
    for candidate, rows in enumerate(owners.rows):
        if len(rows):
            part = None if bias is None else bias[candidate]
            # Rows are gathered even where they lie together, so that the product's operands lie as they do alone.
            out[rows] = torch.nn.functional.linear(inputs.index_select(0, rows), weight[candidate], part)
    return out


def route_mapped_by_owner(
    logits: Tensor,
    mappings: Tensor,
    owners: TokenOwners,
    active: int,
    rule: RoutingRule,
    skip_below: float | None = None,
    *,
    biases: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Routing with each candidate's continuous mapping of the scores over all n experts (Eq. 5).

    Args:
        logits: router logits over all n experts, [tokens, n], any floating dtype.
        mappings: each candidate's `W_RM`, float32 [P, n', n], finite.
        owners: of the tokens.
        active: experts per token k <= n'.
        rule: how the family chooses and weighs.
        skip_below: see `moevolve.kernels.routing.top_k`.
        biases: the new experts' correction biases, float32 [P, n'].

    Returns:
        Weights float32 [tokens, k] and indices of the candidate's new experts int64 [tokens, k], 0 to n' - 1.

    Raises:
        ValueError: the family has no scores over all experts.
    """
    scores = linear_by_owner(scores_of(logits, rule), mappings, owners)
    bias = None if biases is None else biases[owners.owner]
    return top_k(scores, active, rule, skip_below, bias=bias, mapped=True)


def route_selected_by_owner(
    logits: Tensor,
    selected: Tensor,
    owners: TokenOwners,
    active: int,
    rule: RoutingRule,
    logits_space: bool,
    skip_below: float | None = None,
    *,
    biases: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Routing with each candidate's one-hot mapping, `W_RM[p, i, selected[p, i]] = 1`: exact, no matrix product.

    Args:
        logits: router logits over all n experts, [tokens, n], any floating dtype.
        selected: the original expert that each candidate's new experts are routed like, int64 [P, n'].
        owners: of the tokens.
        active: experts per token k <= n'.
        rule: how the family chooses and weighs.
        logits_space: whether the mappings act on the logits.
        skip_below: see `moevolve.kernels.routing.top_k`.
        biases: the new experts' correction biases, float32 [P, n'].

    Returns:
        Weights float32 [tokens, k] and indices of the candidate's new experts int64 [tokens, k], 0 to n' - 1.
    """
    picked = selected[owners.owner]
    bias = None if biases is None else biases[owners.owner]
    if rule.one_hot_folds or logits_space:
        return route_logits(logits.gather(1, picked), active, rule, skip_below, bias=bias)
    return top_k(scores_of(logits, rule).gather(1, picked), active, rule, skip_below, bias=bias)
