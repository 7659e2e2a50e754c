"""Where the MoE layers of a model are, and how each supported family routes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn

from moevolve.evaluators.errors import UserError
from moevolve.workers.dense_layout import DENSE_FAMILIES, DenseFamily

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

EXPERT_TENSORS = ("gate_up_proj", "down_proj")
"""The fused expert parameters of every supported family: [n, 2I, H] and [n, H, I]."""


@dataclass(frozen=True, slots=True)
class Family:
    """How one `transformers` model type routes.

    Attributes:
        model_type: `model_type` of its config.
        title: what people call it.
        casts_weights: whether routing weights are cast to the router's dtype before the experts see them (Mixtral's
            stay float32).
    """

    model_type: str
    title: str
    casts_weights: bool


FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        Family("mixtral", "Mixtral", casts_weights=False),
        Family("qwen2_moe", "Qwen1.5/2-MoE", casts_weights=True),
        Family("qwen3_moe", "Qwen3-MoE", casts_weights=True),
        Family("olmoe", "OLMoE", casts_weights=True),
    )
}


@dataclass(frozen=True, slots=True)
class MoELayer:
    """Handle of one MoE block.

    Attributes:
        index: index of the decoder layer.
        block: the module that holds `gate` (router) and `experts`.
        router: the family's own router; `weight` is [n, hidden].
        experts: the family's fused experts; `gate_up_proj` [n, 2I, H], `down_proj` [n, H, I].
        renormalise: whether the top-k routing weights are rescaled to sum 1.
        casts_weights: see `Family`.
    """

    index: int
    block: nn.Module
    router: nn.Module
    experts: nn.Module
    renormalise: bool
    casts_weights: bool

    @property
    def router_weight(self) -> Tensor:
        weight = self.router.weight
        assert isinstance(weight, Tensor)
        return weight

    @property
    def count(self) -> int:
        """Experts n of the original layer."""
        return int(self.router_weight.shape[0])


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
        if not (hasattr(block, "gate") and hasattr(block, "experts")):
            continue
        renormalise = bool(getattr(block.gate, "norm_topk_prob", True))
        layers.append(MoELayer(index, block, block.gate, block.experts, renormalise, family.casts_weights))
    if not layers:
        raise UserError(
            f"model {name}: none of its {len(model.model.layers)} layers (model type {family.model_type}) holds "
            "experts, so there is nothing to prune; use a mixture-of-experts checkpoint"
        )
    return tuple(layers)
