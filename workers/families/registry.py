"""The supported model families. A new family is a description in a list of `mixture.py`, `deepseek.py` or `dense.py`.

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

# Family by model type, in the order in which messages list them.
FAMILIES: dict[str, ExpertFamily | DenseFamily] = {
    family.model_type: family for family in (*SOFTMAX, *DEEPSEEK, *SIGMOID, *DENSE)
}

# Classes that `AutoModelForCausalLM` doesn't know, by model type: of causal language models, or of the text models of
# multimodal ones, which have no causal language model of their own.
UNLISTED = {
    "mistral4": "Mistral4ForCausalLM",
    "glm5_next_text": "Glm5NextTextModel",
    "mistral_large4_text": "MistralLarge4TextModel",
    "muse_spark_text": "MuseSparkTextModel",
    "step3p5": "Step3p7TextModel",
}

# Messages give these reasons, and a test compares the model types with all mixtures of transformers.
_REASONS: dict[str, tuple[str, ...]] = {
    "its requests are images of pages": ("deepseek_ocr2", "unlimited_ocr"),
    "its experts' matrices are stored transposed, in a form that exports don't write": ("aria",),
    "its routers weight routed and shared experts together": ("inkling", "inkling_mm_model"),
    "its experts are rows of one matrix per layer": ("dbrx",),
    "its files fuse the matrices of linear attention, in a form that exports don't write": ("lara_mini",),
    "it doesn't generate token by token": ("diffusion_gemma",),
    "its experts are single neurons that a product of keys chooses": ("doge",),
    "its layers for images have experts as well": ("dots3_note",),
    "its layers have other experts for images than for text": ("ernie4_5_vl_moe",),
    "transformers has its text model only inside a class for images, whose head computes in float32": ("hy_v4_vl",),
    "its layers read the results of earlier blocks of layers besides the residual stream": (
        "inkling2",
        "inkling2_loop",
    ),
    "its attention consists of experts as well": ("jetmoe",),
    "transformers wants matrices for its experts without weights, and published checkpoints have none": (
        "longcat_flash",
    ),
    "it needs a cache of its own, which candidates can't share": ("minimax",),
    "it is an encoder and a decoder": ("nllb_moe", "switch_transformers"),
    "it labels tokens instead of generating them": ("openai_privacy_filter",),
    "a layer's router reads what the router of the layer before computed": ("zaya",),
}
# Why mixtures of experts that `transformers` has aren't supported, by model type without the ending `_text`.
NOT_DESCRIBED = {model_type: reason for reason, model_types in _REASONS.items() for model_type in model_types}


def family_of(config: PretrainedConfig, name: str) -> ExpertFamily | DenseFamily:
    """Return the family of a model, which messages call `name`. Raises a `UserError` if it isn't supported."""
    family = FAMILIES.get(config.model_type)
    if family is None:
        unknown = "nothing here describes its feed-forward blocks and routers"
        why = NOT_DESCRIBED.get(config.model_type.removesuffix("_text"), unknown)
        known = ", ".join(f"{f.model_type} ({f.title})" for f in FAMILIES.values())
        raise UserError(
            f"model {name}: model type {config.model_type!r} is not supported: {why}; "
            f"use a checkpoint of one of: {known}"
        )
    if getattr(config, "use_bidirectional_attention", None) in (True, "all"):
        raise UserError(
            f"model {name}: use_bidirectional_attention: its tokens see those after them, so it makes embeddings of "
            "texts and no texts; use a language model"
        )
    return family


def register_class(config: PretrainedConfig) -> None:
    """Make `AutoModelForCausalLM` know the class of a config's text model, in this process; see `UNLISTED`."""
    model_type = config.get_text_config().model_type
    if model_type not in UNLISTED:
        return
    import transformers

    kind, found = transformers.CONFIG_MAPPING[model_type], getattr(transformers, UNLISTED[model_type])
    if kind in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        return
    if only_inside(model_type):
        from moevolve.workers.families.causal import causal_class

        found = causal_class(found)
    # Without `exist_ok` registering a class for a config of transformers itself does nothing.
    transformers.AutoModelForCausalLM.register(kind, found, exist_ok=True)


def only_inside(model_type: str) -> bool:
    """Return whether a text model can be loaded by `transformers` as a part of a multimodal checkpoint only."""
    return UNLISTED.get(model_type, "").endswith("TextModel")


def pads_left(model_type: str) -> bool:
    """Return whether tokens may follow padding in a model; see `Family.pads_left`."""
    family = FAMILIES.get(model_type)
    return family is None or family.pads_left


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
