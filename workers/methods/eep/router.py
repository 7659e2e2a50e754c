"""The wrapper around the router of each MoE layer: it changes nothing until an EEP edit gives it a plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moevolve.kernels.products import linear
from moevolve.kernels.routing import route_logits, route_mapped, route_selected
from moevolve.workers.families.layers import MoELayer

Routing = tuple[Tensor, Tensor, Tensor]
"""A router's logits [tokens, n or n'], routing weights [tokens, k], and expert indices int64 [tokens, k]."""


@dataclass(frozen=True, slots=True, eq=False)
class RoutingPlan:
    """Routing of an edited layer. Exactly one of `selected`, `mapping` and `folded` is set.

    Attributes:
        active: Experts per token k.
        positions: Position of each kept expert in the layer's expert tensors, int64 [n']; None if kept
            expert i is at position i.
        selected: One-hot `W_RM`: the original expert whose routing weight each kept expert takes, int64 [n'].
        mapping: Continuous `W_RM`, applied to the scores of all n experts, float32 [n', n].
        folded: Router weight with the mapping folded in, `W_RM W_G`, [n', hidden]; logits space only.
        folded_bias: `W_RM b` to go with `folded`, where b is the bias of the router's logits, [n'].
        correction: `W_RM b` where b is the router's correction bias, float32 [n'].
        factors: `W_RM f` where f are the factors of the experts' routing weights, [n'].
        logits_space: True if the mapping applies to logits instead of scores.
        skip_below: Threshold of dynamic skipping; see `moevolve.kernels.routing.top_k`.
    """

    active: int
    positions: Tensor | None = None
    selected: Tensor | None = None
    mapping: Tensor | None = None
    folded: Tensor | None = None
    folded_bias: Tensor | None = None
    correction: Tensor | None = None
    factors: Tensor | None = None
    logits_space: bool = False
    skip_below: float | None = None


class EditableRouter(nn.Module):
    """Replaces a layer's router; without a plan it calls the original one unchanged.

    Attributes:
        inner: The family's router.
        plan: Routing to use instead of `inner`, or None.
        before_forward: Called before tokens are routed, with True if there is no plan. It loads experts that aren't on
            the device.
    """

    def __init__(self, layer: MoELayer) -> None:
        super().__init__()
        self.inner = layer.router
        self.weight_name = layer.family.weight
        self.prepare = layer.family.prepare
        self.gives_probabilities = layer.family.gives_probabilities
        self.rule = layer.rule
        self.casts_weights = layer.family.casts_weights
        self.float32 = layer.family.float32_router
        self.plan: RoutingPlan | None = None
        self.before_forward: Callable[[bool], None] | None = None

    def forward(self, hidden_states: Tensor, *correction: Tensor) -> Routing:
        """Route tokens with hidden states [..., hidden] to positions in the layer's expert tensors.

        Args:
            hidden_states: Hidden states, [..., hidden].
            correction: The correction bias, if the family's MoE blocks pass it to the router.
        """
        if self.before_forward is not None:
            self.before_forward(self.plan is None)
        if self.plan is not None:
            return self.route(self.plan, hidden_states)
        routed: Routing = self.inner(hidden_states, *correction)
        # Logarithms of probabilities are logits, up to a constant per token that no rule depends on.
        return (routed[0].log(), *routed[1:]) if self.gives_probabilities else routed

    def route(self, plan: RoutingPlan, hidden_states: Tensor) -> Routing:
        """Route tokens by a plan to positions in the layer's expert tensors."""
        logits, weights, chosen = self.route_to_kept(plan, hidden_states)
        if plan.positions is not None:
            chosen = plan.positions[chosen]
        return logits, weights.to(hidden_states.dtype) if self.casts_weights else weights, chosen

    def route_to_kept(self, plan: RoutingPlan, hidden_states: Tensor) -> Routing:
        """Route tokens by a plan to kept experts 0 to n' - 1, with routing weights in float32."""
        logits = self._logits(hidden_states, plan)
        if plan.selected is not None:
            weights, chosen = route_selected(
                logits, plan.selected, plan.active, self.rule, plan.logits_space, plan.skip_below, bias=plan.correction
            )
        elif plan.mapping is not None:
            weights, chosen = route_mapped(
                logits, plan.mapping, plan.active, self.rule, plan.skip_below, bias=plan.correction
            )
        else:
            weights, chosen = route_logits(logits, plan.active, self.rule, plan.skip_below, bias=plan.correction)
        return logits, weights if plan.factors is None else weights * plan.factors[chosen], chosen

    def _logits(self, hidden_states: Tensor, plan: RoutingPlan) -> Tensor:
        """Logits of all n experts, or of the n' kept ones if the mapping is folded in: [tokens, n or n']."""
        weight, bias = plan.folded, plan.folded_bias
        if weight is None:
            weight, bias = self.inner.get_parameter(self.weight_name), getattr(self.inner, "bias", None)
        hidden = hidden_states.reshape(-1, weight.shape[1])
        if self.prepare is not None:
            hidden = self.prepare(self.inner, hidden)
        if self.float32:
            hidden, weight = hidden.float(), weight.float()
        return linear(hidden, weight, bias)


def fold(mapping: Tensor, original: Tensor) -> Tensor:
    """Fold a mapping into a router: `W_RM W_G`, or `W_RM b` of its bias.

    Args:
        mapping: `W_RM`, float32 [n', n].
        original: `W_G` [n, hidden], or b [n].

    Returns:
        [n', hidden] or [n'] in the dtype of `original`, accumulated in float32.
    """
    return (mapping @ original.to(torch.float32)).to(original.dtype)
