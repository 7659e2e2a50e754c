"""Step-3.5 and 3.7, whose experts get the backends that `transformers` gives those of other families."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch import nn
from transformers.integrations.moe import use_experts_implementation
from transformers.models.step3p7.modeling_step3p7 import Step3p7Experts


@use_experts_implementation
class StepExperts(Step3p7Experts):
    """Takes over the parameters of a layer's experts, and the bound of their gates and inputs."""

    def __init__(self, backend: SimpleNamespace, experts: Step3p7Experts) -> None:
        nn.Module.__init__(self)
        self.num_experts, self.limit, self.act_fn = experts.num_experts, experts.limit, experts.act_fn
        self.gate_up_proj, self.down_proj = experts.gate_up_proj, experts.down_proj


def adapt_step(layer: Any, backend: str) -> None:
    """Replace the experts of a decoder layer, if it has any; `backend` is the `experts_implementation`."""
    if hasattr(layer.mlp, "experts"):
        # The decorator reads the backend from what it takes for a model's config.
        layer.mlp.experts = StepExperts(SimpleNamespace(_experts_implementation=backend), layer.mlp.experts)
