"""Where the MoE layers of a model are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn

from moevolve.evaluators.errors import UserError
from moevolve.kernels.routing_rule import RoutingRule
from moevolve.workers.dense_layout import DENSE_FAMILIES, DenseFamily
from moevolve.workers.families import CORRECTION_BIAS, FAMILIES, Family

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


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
