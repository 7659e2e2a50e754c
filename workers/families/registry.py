"""The supported model families. A new family needs its description in this folder and a line here.

A family with a new way of choosing or weighting experts also needs a routing rule in `moevolve.kernels.routing_rule`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moevolve.evaluators.errors import UserError
from moevolve.workers.families.base import DenseFamily, ExpertFamily
from moevolve.workers.families.deepseek import DEEPSEEK
from moevolve.workers.families.dense import DENSE
from moevolve.workers.families.mixture import SIGMOID, SOFTMAX

if TYPE_CHECKING:
    from transformers import PretrainedConfig

FAMILIES: dict[str, ExpertFamily | DenseFamily] = {
    family.model_type: family for family in (*SOFTMAX, *DEEPSEEK, *SIGMOID, *DENSE)
}
"""Family by model type, in the order in which messages list them."""

_NO_CAUSAL = "transformers has no causal language model for its text part"
_BOTH_WEIGHTED = "its routers weight routed and shared experts together"
_PLACES = "its attention takes tokens in blocks by their place in a padded batch"
_TRANSPOSED = "its experts' matrices are stored transposed, in a form that exports don't write"

NOT_DESCRIBED: dict[str, str] = {
    "aria": _TRANSPOSED,
    "aria_text": _TRANSPOSED,
    "dbrx": "its experts are rows of one matrix per layer",
    "deepseek_ocr2": _NO_CAUSAL,
    "deepseek_v4": _PLACES,
    "diffusion_gemma": "it doesn't generate token by token",
    "doge": "its experts are single neurons that a product of keys chooses",
    "dots3_note": "its layers for images have experts as well",
    "ernie4_5_vl_moe": "its layers have other experts for images than for text",
    "glm5_next": _NO_CAUSAL,
    "glm5_next_text": _NO_CAUSAL,
    "inkling": _BOTH_WEIGHTED,
    "inkling_mm_model": _BOTH_WEIGHTED,
    "inkling2": "its layers read the results of earlier blocks of layers besides the residual stream",
    "jetmoe": "its attention consists of experts as well",
    "llama4": "its router scales the experts' inputs instead of their outputs",
    "llama4_text": "its router scales the experts' inputs instead of their outputs",
    "longcat_flash": "its router also chooses experts without weights, which return their input",
    "minimax": "it needs a cache of its own, which candidates can't share",
    "minimax_m3_vl": _PLACES,
    "minimax_m3_vl_text": _PLACES,
    "mistral4": _NO_CAUSAL,
    "mistral_large4": _NO_CAUSAL,
    "muse_spark": _NO_CAUSAL,
    "nllb_moe": "it is an encoder and a decoder",
    "openai_privacy_filter": "it labels tokens instead of generating them",
    "qwen4_exp": "its layers read the token ids besides the residual stream",
    "qwen4_exp_text": "its layers read the token ids besides the residual stream",
    "step3p7": _NO_CAUSAL,
    "switch_transformers": "it is an encoder and a decoder",
    "unlimited_ocr": _NO_CAUSAL,
    "zaya": "a layer's router reads what the router of the layer before computed",
}
"""Why mixtures of experts that `transformers` has aren't supported, by model type, as the rest of a sentence."""


def family_of(config: PretrainedConfig, name: str) -> ExpertFamily | DenseFamily:
    """Return the family of a model, which messages call `name`. Raises a `UserError` if it isn't supported."""
    family = FAMILIES.get(config.model_type)
    if family is None:
        why = NOT_DESCRIBED.get(config.model_type, "nothing here describes its feed-forward blocks and routers")
        known = ", ".join(f"{f.model_type} ({f.title})" for f in FAMILIES.values())
        raise UserError(
            f"model {name}: model type {config.model_type!r} is not supported: {why}; "
            f"use a checkpoint of one of: {known}"
        )
    return family


def expert_family(model_type: str) -> ExpertFamily | None:
    """Return the family of a model type; None if it isn't a supported mixture of experts."""
    family = FAMILIES.get(model_type)
    return family if isinstance(family, ExpertFamily) else None


def active_experts(config: PretrainedConfig) -> int:
    """Return the number of active experts per token of a mixture of experts."""
    family = expert_family(config.model_type)
    return int(getattr(config, "num_experts_per_tok" if family is None else family.active_field))


def dense_family(model_type: str) -> DenseFamily | None:
    """Return the family of a model type; None if it isn't a supported dense model."""
    family = FAMILIES.get(model_type)
    return family if isinstance(family, DenseFamily) else None


def maskable_types() -> tuple[str, ...]:
    """Return the model types whose attention heads can be masked; see `DenseFamily.masks_heads`."""
    return tuple(each.model_type for each in FAMILIES.values() if isinstance(each, DenseFamily) and each.masks_heads)
