"""The demo models' tokenizer and untrained networks."""

from __future__ import annotations

import math

import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from transformers import (
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from demo.vocabulary import all_words

PAD, BOS, EOS, UNK = "<pad>", "<bos>", "<eos>", "<unk>"
OFFSET_SHARPNESS = 40.0
OFFSET_FREQUENCIES = 3
MATCH_SHARPNESS = 12.0
COPY_GAIN = 5.0
MATCH_GAIN = 12.0
OFFSET_HEADS = {(0, 0): 1, (0, 1): 2, (0, 2): 3, (0, 3): 4, (1, 2): 5, (1, 3): 7, (2, 0): 4, (2, 1): 6}
"""By (layer, query head), how many tokens back a head looks at the start of training.

The first layer tells a name the words before it, which say how much, when or to whom; a match head of the second layer
takes that to where a question names the name; further heads take the names and words of a question to where the answer
begins.
"""
MATCH_HEADS = ((1, 0),)
"""(layer, query head) of the heads that start by looking at tokens like their own."""
KEY_VALUE_HEADS = {"mixtral": 4, "glm4_moe": 4, "llama": 2}
"""The architectures, and how many key-value heads their 4 query heads share."""


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A word-level tokenizer: one token per word, mark or line break; spaces only separate.

    ``" A"`` after a prompt gives the same token whether prompt and answer are tokenised together or apart.
    ``<bos>`` is put in front when special tokens are added.
    """
    vocabulary = {word: index for index, word in enumerate((PAD, BOS, EOS, UNK, *all_words()))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(" +"), behavior="removed"),
            pre_tokenizers.Split(Regex(r"[.?:\n]"), behavior="isolated"),
        ]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, vocabulary[BOS])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNK,
        padding_side="left",
        model_max_length=128,
        clean_up_tokenization_spaces=False,
    )


def build_model(architecture: str, vocabulary: int, layers: int, hidden: int, ffn: int) -> PreTrainedModel:
    """A small untrained model with attention heads started as copiers; uses torch's global generator.

    Args:
        architecture: one of ``KEY_VALUE_HEADS``: a Mixtral (8 experts of width ``ffn``, top-2), a GLM-4.5 (32 experts
            and a shared one of width ``ffn``, top-4 by sigmoid scores and a correction bias) or a dense Llama (SwiGLU
            of width ``ffn``, two query heads to a key-value head).
    """
    common = {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": KEY_VALUE_HEADS[architecture],
        "max_position_embeddings": 128,
        "initializer_range": 0.06,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    model = _MODELS[architecture](common)
    with torch.no_grad():
        model.model.embed_tokens.weight.normal_(0.0, 0.3)
        model.model.embed_tokens.weight[:, 0] = 1.0
        for layer in model.model.layers:
            for output in (layer.self_attn.o_proj.weight, *_output_projections(layer.mlp)):
                output.mul_(1 / math.sqrt(2 * layers))
                output[..., 0, :] = 0
                if layer is model.model.layers[0]:
                    output[..., : hidden // 2, :] = 0
        for (layer, head), offset in OFFSET_HEADS.items():
            _offset_head(model, layer, head, offset)
        for layer, head in MATCH_HEADS:
            _match_head(model, layer, head)
    return model


def _output_projections(network: torch.nn.Module) -> list[torch.Tensor]:
    """The down projections of a feed-forward network or a mixture."""
    if not hasattr(network, "experts"):
        return [network.down_proj.weight]
    shared = [network.shared_experts.down_proj.weight] if hasattr(network, "shared_experts") else []
    return [network.experts.down_proj, *shared]


def _llama(common: dict[str, object]) -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**common))


def _glm4_moe(common: dict[str, object]) -> Glm4MoeForCausalLM:
    """GLM-4.5's form of DeepSeek-V3's routing, with rotary angles in whole heads, as the copying heads need them."""
    config = Glm4MoeConfig(
        **common | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}},
        moe_intermediate_size=common["intermediate_size"],
        n_routed_experts=32,
        num_experts_per_tok=4,
        n_shared_experts=1,
        first_k_dense_replace=0,
        head_dim=32,
        num_nextn_predict_layers=0,
        experts_implementation="grouped_mm",
    )
    model = Glm4MoeForCausalLM(config)
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.mlp.gate.weight, std=config.initializer_range)
    return model


def _mixtral(common: dict[str, object]) -> MixtralForCausalLM:
    config = MixtralConfig(
        **common,
        num_local_experts=8,
        num_experts_per_tok=2,
        sliding_window=None,
        router_aux_loss_coef=0.0,
        experts_implementation="grouped_mm",
    )
    return MixtralForCausalLM(config)


_MODELS = {"mixtral": _mixtral, "glm4_moe": _glm4_moe, "llama": _llama}


def _offset_head(model: PreTrainedModel, layer: int, head: int, offset: int) -> None:
    """Make a head attend ``offset`` tokens back: constant keys, and queries rotated back by as many positions.

    Embeddings carry a constant in dimension 0; after the layer's norm it stays positive, so keys and queries read from
    it are nearly the same for every token and only the rotary angle between positions is left in their product.
    """
    attention = model.model.layers[layer].self_attn
    width = attention.head_dim
    half, fast = width // 2, torch.arange(OFFSET_FREQUENCIES)
    angles = offset * 10000.0 ** (-fast / half)
    amplitude = math.sqrt(OFFSET_SHARPNESS * math.sqrt(width) / len(fast))
    queries, keys = _rows(model, attention, head)
    query, key = attention.q_proj.weight[queries], attention.k_proj.weight[keys]
    query.zero_()
    key.zero_()
    key[fast, 0] = amplitude
    query[fast, 0] = amplitude * torch.cos(angles)
    query[half + fast, 0] = -amplitude * torch.sin(angles)
    attention.o_proj.weight[:, queries] *= COPY_GAIN


def _match_head(model: PreTrainedModel, layer: int, head: int) -> None:
    """Make a head attend to tokens like its own: equal query and key projections in the slowly rotating dimensions."""
    attention = model.model.layers[layer].self_attn
    width = attention.head_dim
    half = width // 2
    slow = torch.cat([torch.arange(half // 2, half), torch.arange(half + half // 2, width)])
    projection = torch.zeros(width, attention.q_proj.in_features)
    projection[slow] = torch.randn(len(slow), attention.q_proj.in_features)
    projection[:, 0] = 0
    projection[:, attention.q_proj.in_features // 2 :] = 0
    projection *= math.sqrt(MATCH_SHARPNESS * math.sqrt(width) / (len(slow) * attention.q_proj.in_features / 2))
    queries, keys = _rows(model, attention, head)
    attention.q_proj.weight[queries] = projection
    attention.k_proj.weight[keys] = projection
    attention.v_proj.weight[keys, : attention.q_proj.in_features // 2] = 0
    attention.o_proj.weight[:, queries] *= MATCH_GAIN


def _rows(model: PreTrainedModel, attention: torch.nn.Module, head: int) -> tuple[slice, slice]:
    """Where a query head and its key-value head stand in their projections."""
    width = attention.head_dim
    shared = head // (model.config.num_attention_heads // model.config.num_key_value_heads)
    return slice(head * width, (head + 1) * width), slice(shared * width, (shared + 1) * width)
