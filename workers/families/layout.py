"""Where the MoE layers of a model are, and how each supported family holds its experts and routes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn

from moevolve.evaluators.errors import UserError
from moevolve.kernels.routing_rule import RoutingRule
from moevolve.workers.families.dense_layout import DENSE_FAMILIES, DenseFamily
from moevolve.workers.families.family_rules import (
    MakesRule,
    deepseek_v2_rule,
    deepseek_v3_rule,
    gpt_oss_rule,
    softmax_rule,
)

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


EXPERT_TENSORS = ("gate_up_proj", "down_proj")
"""The fused expert parameters of families without biases: [n, 2I, H] and [n, H, I]."""

BIASED_EXPERT_TENSORS = ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")
"""Those of GPT-OSS: [n, H, 2I] (gates and ups alternate), [n, 2I], [n, I, H] and [n, H]."""

CORRECTION_BIAS = "e_score_correction_bias"
"""Name of the buffer [n], float32, that some routers add to their scores for choosing only."""


@dataclass(frozen=True, slots=True)
class Family:
    """How one `transformers` model type holds its experts and routes.

    Attributes:
        model_type: `model_type` of its config.
        title: what people call it.
        casts_weights: whether routing weights are cast to the router's dtype before the experts see them (Mixtral's
            stay float32).
        rule: makes the routing rule of one router.
        experts_field: where its config counts the experts.
        router: name of the router in a MoE block.
        tensors: names of the fused expert parameters.
        float32_router: whether logits are computed in float32 whatever the router's dtype.
        sdpa: whether `transformers` has its attention as sdpa.
    """

    model_type: str
    title: str
    casts_weights: bool
    rule: MakesRule = softmax_rule
    experts_field: str = "num_experts"
    router: str = "gate"
    tensors: tuple[str, ...] = EXPERT_TENSORS
    float32_router: bool = False
    sdpa: bool = True


def _deepseek(model_type: str, title: str, rule: MakesRule) -> Family:
    return Family(model_type, title, False, rule, experts_field="n_routed_experts", float32_router=True)


FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        Family("mixtral", "Mixtral", casts_weights=False),
        Family("qwen2_moe", "Qwen1.5/2-MoE", casts_weights=True),
        Family("qwen3_moe", "Qwen3-MoE", casts_weights=True),
        Family("olmoe", "OLMoE", casts_weights=True),
        _deepseek("deepseek_v2", "DeepSeek-V2", deepseek_v2_rule),
        _deepseek("deepseek_v3", "DeepSeek-V3", deepseek_v3_rule),
        _deepseek("glm4_moe", "GLM-4-MoE", deepseek_v3_rule),
        Family(
            "gpt_oss",
            "GPT-OSS",
            casts_weights=True,
            rule=gpt_oss_rule,
            router="router",
            tensors=BIASED_EXPERT_TENSORS,
            sdpa=False,
        ),
    )
}


@dataclass(frozen=True, slots=True)
class MoELayer:
    """Handle of one MoE block.

    Attributes:
        index: index of the decoder layer.
        block: the module that holds the router and `experts`.
        router: the family's own router; `weight` is [n, hidden].
        experts: the family's fused experts; see `Family.tensors`.
        rule: how the router chooses and weighs.
        family: the family.
    """

    index: int
    block: nn.Module
    router: nn.Module
    experts: nn.Module
    rule: RoutingRule
    family: Family

    @property
    def gate(self) -> nn.Module:
        """What stands where the router stood: itself, or the wrapper that edits put around it."""
        gate = getattr(self.block, self.family.router)
        assert isinstance(gate, nn.Module)
        return gate

    @property
    def router_weight(self) -> Tensor:
        weight = self.router.weight
        assert isinstance(weight, Tensor)
        return weight

    @property
    def router_bias(self) -> Tensor | None:
        """What the router adds to its logits, [n]."""
        return getattr(self.router, "bias", None)

    @property
    def correction_bias(self) -> Tensor | None:
        """What the router adds to its scores for choosing only, float32 [n]."""
        return getattr(self.router, CORRECTION_BIAS, None)

    @property
    def renormalise(self) -> bool:
        """Whether the top-k routing weights are rescaled to sum 1."""
        return self.rule.renormalise

    @property
    def count(self) -> int:
        """Experts n of the original layer."""
        return int(self.router_weight.shape[0])

    def expert_tensors(self) -> dict[str, Tensor]:
        """The fused expert parameters that the model runs on now, by name."""
        return {name: getattr(self.experts, name) for name in self.family.tensors}


def family_of(config: PretrainedConfig, name: str) -> Family | DenseFamily:
    """The family of a model's config, of mixture-of-experts or of dense networks.

    Args:
        config: a `transformers` config.
        name: the model as the user named it, for the message.

    Raises:
        UserError: the model type is not supported.
    """
    families: dict[str, Family | DenseFamily] = {**FAMILIES, **DENSE_FAMILIES}
    family = families.get(config.model_type)
    if family is None:
        known = ", ".join(f"{f.model_type} ({f.title})" for f in families.values())
        raise UserError(
            f"model {name}: model type {config.model_type!r} is not supported; use a checkpoint of one of: {known}"
        )
    return family


def find_moe_layers(model: PreTrainedModel, name: str) -> tuple[MoELayer, ...]:
    """Handles of the MoE blocks of a loaded or meta-device model, in order of depth; dense layers are passed over.

    Empty for a dense family.

    Args:
        model: a causal language model of a supported family, not yet edited.
        name: the model as the user named it, for messages.

    Raises:
        UserError: the family is not supported, or it is one of experts and no layer holds any.
    """
    family = family_of(model.config, name)
    if not isinstance(family, Family):
        return ()
    layers = []
    for index, decoder_layer in enumerate(model.model.layers):
        block = decoder_layer.mlp
        if not (hasattr(block, family.router) and hasattr(block, "experts")):
            continue
        router = getattr(block, family.router)
        if not all(hasattr(block.experts, tensor) for tensor in family.tensors):
            raise UserError(
                f"model {name}: the experts of layer {index} are packed ({type(block.experts).__name__}), and only "
                "plain numbers can be pruned and merged; load it dequantised"
            )
        layers.append(MoELayer(index, block, router, block.experts, family.rule(router, model.config), family))
    if not layers:
        raise UserError(
            f"model {name}: none of its {len(model.model.layers)} layers (model type {family.model_type}) holds "
            "experts, so there is nothing to prune; use a mixture-of-experts checkpoint"
        )
    return tuple(layers)
