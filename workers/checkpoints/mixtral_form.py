"""Dense Llamas and Mistrals whose feed-forward networks were divided into experts, as stock Mixtral checkpoints.

A Mixtral weights the outputs of its experts by the softmax over the chosen ones, which is 1 for one expert per token.
Its attention is Llama's, its networks are gated, and neither these nor its router have biases.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

from moevolve.workers.checkpoints.state import empty_model
from moevolve.workers.contract.methods import Resident

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Config fields that mean the same in a Mixtral's config and in those of the families that become Mixtrals.
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


def mixtral_obstacle(resident: Resident) -> str | None:
    """Return why a dense model with top-1 experts and float32 routers isn't equal to a Mixtral; None if it is."""
    config, family = resident.model.config, resident.dense_layers[0].family
    if not family.becomes_mixtral:
        return f"a {family.title} with experts isn't a Mixtral"
    if getattr(config, "attention_bias", False) or getattr(config, "mlp_bias", False):
        return "its layers have biases, and a Mixtral's have none"
    dtype = str(resident.model.dtype).removeprefix("torch.")
    if dtype != "float32":
        # A Mixtral's router runs in the model's dtype, where rounding makes scores tie that differ in float32.
        return (
            f"a Mixtral routes in the model's dtype, {dtype}, and this model in float32: rounded scores send tokens to "
            "other experts. As float32 it is exact (--dtype float32)"
        )
    return None


def empty_mixtral(resident: Resident, experts: int, width: int) -> PreTrainedModel:
    """Build the Mixtral for a dense model without `mixtral_obstacle`, on the meta device, with top-1 routing.

    Its layers have `experts` of `width` neurons each.
    """
    from transformers import MixtralConfig, MixtralForCausalLM

    source = resident.model.config
    settings = {name: copy.deepcopy(getattr(source, name)) for name in _SHARED_SETTINGS if hasattr(source, name)}
    config = MixtralConfig(**settings, intermediate_size=width, num_local_experts=experts, num_experts_per_tok=1)
    return empty_model(MixtralForCausalLM, config, resident.model.dtype)
