"""The router wrapper installed once per MoE layer: transparent until an EEP edit gives it a plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moevolve.kernels.routing import route_logits, route_mapped, route_selected
from moevolve.workers.layout import MoELayer


@dataclass(frozen=True, slots=True, eq=False)
class RoutingPlan:
    """How an edited layer routes. Exactly one of `selected`, `mapping` and `folded` is set.

    Attributes:
        active: experts per token k.
        slots: where new expert i lies in the layer's expert tensors, int64 [n']; None when it lies at i.
        selected: one-hot `W_RM`: the original expert whose routing weight new expert i takes, int64 [n'].
        mapping: continuous `W_RM` on the softmax over n, float32 [n', n].
        folded: `W_RM W_G`, the router's weight with the mapping in it (logits space), [n', hidden].
        logits_space: whether the mapping acts on the logits.
        skip_below: threshold of dynamic skipping; see `moevolve.kernels.routing.top_k`.
    """

    active: int
    slots: Tensor | None = None
    selected: Tensor | None = None
    mapping: Tensor | None = None
    folded: Tensor | None = None
    logits_space: bool = False
    skip_below: float | None = None


class EditableRouter(nn.Module):
    """Stands where the family's router stood and calls it unchanged while no plan is set.

    Attributes:
        inner: the family's router.
        plan: how to route instead, or None.
        before_unedited: called before the family's router runs (originals that are elsewhere come back then).
    """

    def __init__(self, layer: MoELayer) -> None:
        super().__init__()
        self.inner = layer.router
        self.renormalise = layer.renormalise
        self.casts_weights = layer.casts_weights
        self.plan: RoutingPlan | None = None
        self.before_unedited: Callable[[], None] | None = None

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Route tokens.

        Args:
            hidden_states: [..., hidden].

        Returns:
            The router's logits [tokens, n or n'], routing weights [tokens, k], and for each the index of its expert in
            the layer's expert tensors, int64 [tokens, k].
        """
        plan = self.plan
        if plan is None:
            if self.before_unedited is not None:
                self.before_unedited()
            return self.inner(hidden_states)
        weight = self.inner.weight if plan.folded is None else plan.folded
        assert isinstance(weight, Tensor)
        logits = nn.functional.linear(hidden_states.reshape(-1, weight.shape[1]), weight)
        active, rescale, skip = plan.active, self.renormalise, plan.skip_below
        if plan.selected is not None:
            weights, chosen = route_selected(logits, plan.selected, active, rescale, plan.logits_space, skip)
        elif plan.mapping is not None:
            weights, chosen = route_mapped(logits, plan.mapping, active, rescale, skip)
        else:
            weights, chosen = route_logits(logits, active, rescale, skip)
        if plan.slots is not None:
            chosen = plan.slots[chosen]
        return logits, weights.to(logits.dtype) if self.casts_weights else weights, chosen


def fold(mapping: Tensor, router_weight: Tensor) -> Tensor:
    """`W_RM W_G`: the router's weight with a logits-space mapping in it.

    Args:
        mapping: `W_RM`, float32 [n', n].
        router_weight: `W_G`, [n, hidden].

    Returns:
        [n', hidden] in the dtype of `router_weight`, accumulated in float32.
    """
    return (mapping @ router_weight.to(torch.float32)).to(router_weight.dtype)
