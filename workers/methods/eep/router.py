"""The router wrapper installed once per MoE layer: transparent until an EEP edit gives it a plan."""

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
    """How an edited layer routes. Exactly one of `selected`, `mapping` and `folded` is set.

    Attributes:
        active: experts per token k.
        slots: where new expert i lies in the layer's expert tensors, int64 [n']; None when it lies at i.
        selected: one-hot `W_RM`: the original expert whose routing weight new expert i takes, int64 [n'].
        mapping: continuous `W_RM` on the softmax over n, float32 [n', n].
        folded: `W_RM W_G`, the router's weight with the mapping in it (logits space), [n', hidden].
        folded_bias: with `folded`, `W_RM b` of a router whose logits have a bias, [n'].
        correction: `W_RM b` of a router that chooses with a correction bias, float32 [n'].
        logits_space: whether the mapping acts on the logits.
        skip_below: threshold of dynamic skipping; see `moevolve.kernels.routing.top_k`.
    """

    active: int
    slots: Tensor | None = None
    selected: Tensor | None = None
    mapping: Tensor | None = None
    folded: Tensor | None = None
    folded_bias: Tensor | None = None
    correction: Tensor | None = None
    logits_space: bool = False
    skip_below: float | None = None


class EditableRouter(nn.Module):
    """Stands where the family's router stood and calls it unchanged while no plan is set.

    Attributes:
        inner: the family's router.
        plan: how to route instead, or None.
        before: called before tokens are routed, with whether there is no plan: experts that are elsewhere come then.
    """

    def __init__(self, layer: MoELayer) -> None:
        super().__init__()
        self.inner = layer.router
        self.rule = layer.rule
        self.casts_weights = layer.family.casts_weights
        self.float32 = layer.family.float32_router
        self.plan: RoutingPlan | None = None
        self.before: Callable[[bool], None] | None = None

    def forward(self, hidden_states: Tensor) -> Routing:
        """Route tokens.

        Args:
            hidden_states: [..., hidden].

        Returns:
            The router's logits, routing weights, and for each the index of its expert in the layer's expert tensors.
        """
        if self.before is not None:
            self.before(self.plan is None)
        if self.plan is not None:
            return self.follow(self.plan, hidden_states)
        routed: Routing = self.inner(hidden_states)
        return routed

    def follow(self, plan: RoutingPlan, hidden_states: Tensor) -> Routing:
        """Route tokens [..., hidden] by a plan."""
        logits, weights, chosen = self.choose(plan, hidden_states)
        if plan.slots is not None:
            chosen = plan.slots[chosen]
        return logits, self.as_weights(weights, logits), chosen

    def choose(self, plan: RoutingPlan, hidden_states: Tensor) -> Routing:
        """The same among the new experts, whatever their slots, and with routing weights in float32."""
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
        return logits, weights, chosen

    def as_weights(self, weights: Tensor, logits: Tensor) -> Tensor:
        """Routing weights in the dtype in which the family's experts see them."""
        return weights.to(logits.dtype) if self.casts_weights else weights

    def original_logits(self, hidden_states: Tensor) -> Tensor:
        """Of all n experts, for hidden states [..., hidden]: [tokens, n]."""
        weight = self.inner.weight
        assert isinstance(weight, Tensor)
        return self._linear(hidden_states, weight, getattr(self.inner, "bias", None))

    def _logits(self, hidden_states: Tensor, plan: RoutingPlan) -> Tensor:
        """Of all n experts, or of n' where the mapping is folded in: [tokens, n or n']."""
        if plan.folded is None:
            return self.original_logits(hidden_states)
        return self._linear(hidden_states, plan.folded, plan.folded_bias)

    def _linear(self, hidden_states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        hidden = hidden_states.reshape(-1, weight.shape[1])
        if self.float32:
            hidden, weight = hidden.float(), weight.float()
        return linear(hidden, weight, bias)


def fold(mapping: Tensor, original: Tensor) -> Tensor:
    """`W_RM W_G` or `W_RM b`: a router's weight or bias with a mapping in it.

    Args:
        mapping: `W_RM`, float32 [n', n].
        original: `W_G` or b, [n, hidden] or [n].

    Returns:
        [n', hidden] or [n'] in the dtype of `original`, accumulated in float32.
    """
    return (mapping @ original.to(torch.float32)).to(original.dtype)
