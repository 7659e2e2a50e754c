"""MoE blocks that `transformers` implements with another interface than others', in the form that others have.

Routers return logits, weights and experts, and experts run on the tokens that chose them. Parameters stay the same,
under the same names.

`transformers` runs every expert of Llama-4 on every token, with zeros for tokens that didn't choose it, and its router
returns scores of all experts. Step-3.5's experts have no backends there.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import use_experts_implementation
from transformers.models.step3p7.modeling_step3p7 import Step3p7Experts

from moevolve.workers.families.base import EXPERTS_BACKEND


def adapt(layer: Any) -> None:
    """Replace the MoE block of a decoder layer, if it has one."""
    # The decorator below reads the backend from what it takes for a model's config.
    config = SimpleNamespace(_experts_implementation=EXPERTS_BACKEND)
    if hasattr(layer, "feed_forward") and hasattr(layer.feed_forward, "experts"):
        layer.feed_forward = Llama4Block(config, layer.feed_forward)
    elif hasattr(layer, "mlp") and hasattr(layer.mlp, "experts"):
        layer.mlp.experts = StepExperts(config, layer.mlp.experts)


class Llama4Router(nn.Module):
    """Takes over a router's weight; returns logits [tokens, n], weights [tokens, k] and experts int64 [tokens, k]."""

    def __init__(self, router: Any) -> None:
        super().__init__()
        self.weight, self.top_k = router.weight, router.top_k

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = nn.functional.linear(hidden_states, self.weight)
        best, chosen = torch.topk(logits, self.top_k, dim=-1)
        return logits, torch.sigmoid(best.float()).to(logits.dtype), chosen


@use_experts_implementation(is_transposed=True)
class Llama4Experts(nn.Module):
    """Takes over the parameters of a layer's experts, [n, hidden, 2I] and [n, I, hidden]."""

    scales_inputs = True
    """Routing weights multiply inputs, which is left to who calls this."""

    def __init__(self, config: SimpleNamespace, experts: Any) -> None:
        super().__init__()
        self.num_experts, self.act_fn = experts.num_experts, experts.act_fn
        self.gate_up_proj, self.down_proj = experts.gate_up_proj, experts.down_proj

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Sum the outputs [tokens, hidden] of chosen experts times weights, one expert after the other."""
        out = torch.zeros_like(hidden_states)
        for expert in top_k_index.unique().tolist():
            tokens, place = torch.where(top_k_index == expert)
            gate_up = hidden_states[tokens] @ self.gate_up_proj[expert]
            given = self._apply_gate(gate_up) @ self.down_proj[expert]  # type: ignore[operator]  # of the decorator
            out.index_add_(0, tokens, (given * top_k_weights[tokens, place, None]).to(out.dtype))
        return out


class Llama4Block(nn.Module):
    """Takes over the parts of a MoE block."""

    def __init__(self, config: SimpleNamespace, block: Any) -> None:
        super().__init__()
        self.router, self.shared_expert = Llama4Router(block.router), block.shared_expert
        self.experts = Llama4Experts(config, block.experts)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        hidden = hidden_states.reshape(-1, hidden_states.shape[-1])
        logits, weights, chosen = self.router(hidden)
        inputs = (hidden[:, None] * weights[..., None]).flatten(0, 1)
        ones = torch.ones((len(inputs), 1), dtype=hidden.dtype, device=hidden.device)
        routed = self.experts(inputs, chosen.reshape(-1, 1), ones).view(*chosen.shape, -1).sum(dim=1)
        return self.shared_expert(hidden) + routed, logits


@use_experts_implementation
class StepExperts(Step3p7Experts):
    """Takes over the parameters of a layer's experts, and the bound of their gates and inputs."""

    def __init__(self, config: SimpleNamespace, experts: Step3p7Experts) -> None:
        nn.Module.__init__(self)
        self.num_experts, self.limit, self.act_fn = experts.num_experts, experts.limit, experts.act_fn
        self.gate_up_proj, self.down_proj = experts.gate_up_proj, experts.down_proj
