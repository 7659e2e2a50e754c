"""Dense Llamas and Mistrals whose networks became experts, as ordinary Mixtrals.

A Mixtral weights the outputs of its experts by the softmax over those chosen: with one expert per token the weight is
1. Its router has no bias, its networks are gated and have none, and its attention is a Llama's.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

from moevolve.workers.checkpoints.state import empty_model
from moevolve.workers.contract.methods import Resident

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_SHARED_SETTINGS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "max_position_embeddings",
    "initializer_range",
    "rms_norm_eps",
    "use_cache",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "tie_word_embeddings",
    "sliding_window",
    "attention_dropout",
    "rope_parameters",
    "dtype",
)
"""Settings of families that become Mixtrals that mean the same in one."""


def mixtral_obstacle(resident: Resident) -> str | None:
    """Why a model is no Mixtral once top-1 experts with routers in float32 replace its networks; None if it is one."""
    config, family = resident.model.config, resident.dense_layers[0].family
    if not family.becomes_mixtral:
        return f"a {family.title} with experts isn't a Mixtral"
    if getattr(config, "attention_bias", False) or getattr(config, "mlp_bias", False):
        return "its layers have biases, and a Mixtral's have none"
    dtype = str(resident.model.dtype).removeprefix("torch.")
    if dtype != "float32":
        # Its router is a linear layer without a dtype of its own: scores that differ in float32 tie once rounded.
        return (
            f"a Mixtral routes in the model's dtype, {dtype}, and this model in float32: rounded scores send tokens to "
            "other experts. As float32 it is exact (--dtype float32)"
        )
    return None


def empty_mixtral(resident: Resident, experts: int, width: int) -> PreTrainedModel:
    """A Mixtral on the meta device, for a model that fits one.

    Args:
        resident: the model.
        experts: per layer; one is active per token.
        width: neurons per expert.
    """
    from transformers import MixtralConfig, MixtralForCausalLM

    source = resident.model.config
    settings = {name: copy.deepcopy(getattr(source, name)) for name in _SHARED_SETTINGS if hasattr(source, name)}
    config = MixtralConfig(**settings, intermediate_size=width, num_local_experts=experts, num_experts_per_tok=1)
    return empty_model(MixtralForCausalLM, config, resident.model.dtype)
