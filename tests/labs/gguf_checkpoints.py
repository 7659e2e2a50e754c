"""Tiny GGUF checkpoints with the names and orders that llama.cpp's converter gives, spelled out here."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file, save_file
from torch import Tensor

from moevolve.workers.contract.settings import ModelConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

ARCHITECTURES = {
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "olmoe": "olmoe",
    "gpt_oss": "gpt-oss",
}
DENSE = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "phi3": "phi3",
    "starcoder2": "starcoder2",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
}
SETTINGS = {
    **{family: {"hidden_size": 64, "intermediate_size": 32, "head_dim": 16} for family in DENSE},
    "mixtral": {"hidden_size": 64, "intermediate_size": 32},
    "qwen2_moe": {
        "hidden_size": 64,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "mlp_only_layers": [],
    },
    "qwen3_moe": {"hidden_size": 64, "moe_intermediate_size": 32},
    "olmoe": {"hidden_size": 64, "intermediate_size": 32},
    "gpt_oss": {"hidden_size": 96, "intermediate_size": 32, "head_dim": 24},
}
"""Settings of tiny models whose columns are multiples of 32, the smallest block of GGUF's types."""

_FRAME = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    **{f"self_attn.{one}_proj": f"attn_{one}" for one in "qkv"},
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    **dict.fromkeys(("mlp.gate", "mlp.router", "block_sparse_moe.gate"), "ffn_gate_inp"),
    **{f"mlp.{one}_proj": f"ffn_{one}" for one in ("gate", "up", "down")},
    **{f"mlp.shared_expert.{one}_proj": f"ffn_{one}_shexp" for one in ("gate", "up", "down")},
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_MATRICES = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}
_EXPERT = re.compile(r"(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)\.weight")
_MAPPED = re.compile(r"blk\.\d+\.(ffn_\w+_exps|ffn_(gate|up|down)|attn_[qkv]|attn_output)\.weight|token_embd\.weight")


def gguf_checkpoint(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path, kind: Type = Type.Q8_0, files: int = 1
) -> tuple[ModelConfig, ModelConfig]:
    """Write a model as GGUF next to its config and tokenizer, and the same numbers in float32 as safetensors.

    Args:
        model: Tiny model of one of `ARCHITECTURES` or `DENSE`.
        tokenizer: Tokenizer of the model.
        folder: Folder for both checkpoints.
        kind: Type of the experts' and the attention's matrices.
        files: Files of the GGUF checkpoint.
    """
    for name in ("packed", "plain"):
        tokenizer.save_pretrained(folder / name)
    model.config.save_pretrained(folder / "packed")
    model.save_pretrained(folder / "plain")
    state = load_file(folder / "plain" / "model.safetensors")
    stored = quantised(moved(converted(state, model.config), model.config, 1), kind)
    write_gguf(folder / "packed" / "model.gguf", stored, metadata(model.config), files)
    numbers = {name: torch.from_numpy(gguf.dequantize(*each).copy()) for name, each in stored.items()}
    numbers = moved(numbers, model.config, -1)
    # Values that convert to those of the file are found by converting positions along with them.
    save_file(reverted(numbers, state, model.config), folder / "plain" / "model.safetensors", {"format": "pt"})
    first = "model.gguf" if files == 1 else f"model-00001-of-{files:05}.gguf"
    one, other = folder / "packed" / first, folder / "plain"
    return tuple(ModelConfig(str(at), device="cpu", dtype="float32") for at in (one, other))  # type: ignore[return-value]


def converted(state: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
    """Rename, stack and reorder the tensors of a Hugging Face checkpoint as llama.cpp's converter does."""
    found, experts = {}, defaultdict(dict)
    for name, tensor in state.items():
        if not name.startswith("model.layers."):
            module, _, last = name.rpartition(".")
            found[f"{_FRAME[module]}.{last}"] = tensor
            continue
        _, _, layer, rest = name.split(".", 3)
        block, expert = f"blk.{layer}.", _EXPERT.fullmatch(rest)
        if expert is not None:
            experts[f"{block}ffn_{_MATRICES[expert[2]]}_exps.weight"][int(expert[1])] = tensor
        elif rest.startswith("mlp.experts."):
            found |= {block + each: values for each, values in gpt_oss_experts(rest, tensor).items()}
        elif rest == "self_attn.sinks":
            found[f"{block}attn_sinks.weight"] = tensor
        else:
            module, _, last = rest.rpartition(".")
            mapped = _LAYER[module]
            if config.model_type.startswith(("gpt_oss", "gemma")) and module == "post_attention_layernorm":
                mapped = "post_attention_norm"
            if config.model_type in ("mixtral", "llama", "mistral") and mapped in ("attn_q", "attn_k"):
                heads = config.num_attention_heads if mapped == "attn_q" else config.num_key_value_heads
                found[f"{block}{mapped}.{last}"] = neighbours(tensor, heads)
            else:
                found[f"{block}{mapped}.{last}"] = tensor[0] if module == "mlp.shared_expert_gate" else tensor
    return found | {name: torch.stack([each[i] for i in range(len(each))]) for name, each in experts.items()}


def moved(tensors: dict[str, Tensor], config: Any, by: int) -> dict[str, Tensor]:
    """Add a number to the norms of a Gemma, which stores what it adds to 1, and llama.cpp their sum."""
    gemma = config.model_type.startswith("gemma")
    return {name: each + by if gemma and "norm." in name else each for name, each in tensors.items()}


def gpt_oss_experts(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Divide GPT-OSS's alternating gate and up columns, and give matrices one row per output."""
    kind = "bias" if name.endswith("_bias") else "weight"
    parts = {"ffn_down_exps": tensor}
    if "gate_up" in name:
        parts = {"ffn_gate_exps": tensor[..., 0::2], "ffn_up_exps": tensor[..., 1::2]}
    return {f"{part}.{kind}": each if kind == "bias" else each.mT.contiguous() for part, each in parts.items()}


def neighbours(tensor: Tensor, heads: int) -> Tensor:
    """Order a head's rows 0, h/2, 1, h/2 + 1, ..., as llama.cpp's rotary embedding of Llama expects."""
    rows = []
    for head in tensor.chunk(heads):
        half = len(head) // 2
        rows += [head[row + offset] for row in range(half) for offset in (0, half)]
    return torch.stack(rows)


def reverted(numbers: dict[str, Tensor], state: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
    """Return the Hugging Face checkpoint whose conversion is `numbers`, with the names and shapes of `state`."""
    sizes = torch.tensor([tensor.numel() for tensor in state.values()])
    starts = (sizes.cumsum(0) - sizes).tolist()
    places = {
        name: torch.arange(start, start + tensor.numel()).reshape(tensor.shape)
        for (name, tensor), start in zip(state.items(), starts, strict=True)
    }
    flat = torch.full((int(sizes.sum()),), torch.nan)
    for name, where in converted(places, config).items():
        flat[where.flatten()] = numbers[name].float().flatten()
    return {name: flat[where] for name, where in places.items()}


def quantised(tensors: dict[str, Tensor], kind: Type) -> dict[str, tuple[np.ndarray[Any, Any], Type]]:
    """Quantise the matrices of experts and attention, and the embeddings; the others stay float32."""
    return {name: typed(values, kind if _MAPPED.fullmatch(name) else Type.F32) for name, values in tensors.items()}


def typed(values: Tensor, kind: Type) -> tuple[np.ndarray[Any, Any], Type]:
    """Quantise a tensor; Q4_K, which the library only unpacks, gets random codes with small scales."""
    array = np.ascontiguousarray(values.float().numpy())
    if array.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]:
        kind = Type.Q8_0
    if kind != Type.Q4_K:
        return gguf.quantize(array, kind), kind
    size, width = gguf.GGML_QUANT_SIZES[kind]
    numbers = np.random.default_rng(array.size)
    blocks = numbers.integers(0, 256, (*array.shape[:-1], array.shape[-1] // size, width), dtype=np.uint8)
    # A block begins with two float16 numbers, the scales of scales and of minima; 0x1400 is 2^-10.
    blocks[..., :4] = [0, 0x14, 0, 0x14]
    return blocks.reshape(*array.shape[:-1], -1), kind


def metadata(config: Any) -> dict[str, Any]:
    """The metadata from which a model can be built, without its vocabulary."""
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    width = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    keys = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "expert_feed_forward_length": width,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head,
        "attention.value_length": head,
        "rope.freq_base": float(rope["rope_theta"]),
    }
    if config.model_type == "starcoder2":
        keys["attention.layer_norm_epsilon"] = float(config.norm_epsilon)
    else:
        keys["attention.layer_norm_rms_epsilon"] = float(config.rms_norm_eps)
    if config.model_type.startswith(("gemma", "phi3")):
        keys["attention.sliding_window"] = config.sliding_window
    if config.model_type == "phi3":
        keys["rope.dimension_count"] = int(head * rope["partial_rotary_factor"])
        keys["rope.scaling.original_context_length"] = config.original_max_position_embeddings
    if config.model_type == "gemma2":
        keys |= {name: getattr(config, name) for name in ("attn_logit_softcapping", "final_logit_softcapping")}
    if config.model_type == "gemma3_text":
        keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": rope["factor"]}
        keys["rope.freq_base_swa"] = config.rope_parameters["sliding_attention"]["rope_theta"]
    if config.model_type in ARCHITECTURES:
        keys["expert_count"] = getattr(config, "num_experts", None) or config.num_local_experts
        keys["expert_used_count"] = config.num_experts_per_tok
    if hasattr(config, "shared_expert_intermediate_size"):
        keys["expert_shared_feed_forward_length"] = config.shared_expert_intermediate_size
    if config.model_type == "gpt_oss":
        keys["attention.sliding_window"] = config.sliding_window
    architecture = (ARCHITECTURES | DENSE)[config.model_type]
    return {"general.name": "tiny", **{f"{architecture}.{key}": value for key, value in keys.items()}} | {
        "general.architecture": architecture
    }


def write_gguf(file: Path, stored: dict[str, tuple[Any, Type]], keys: dict[str, Any], files: int = 1) -> None:
    """Write tensors and metadata with the library's writer; several files as its splitting names them."""
    writer = gguf.GGUFWriter(
        file, keys["general.architecture"], split_max_tensors=0 if files == 1 else -(-len(stored) // files)
    )
    for key, value in keys.items():
        if key == "general.architecture":
            continue
        add = {
            bool: writer.add_bool,
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
            list: writer.add_array,
        }
        add[type(value)](key, value)
    for name, (array, kind) in stored.items():
        writer.add_tensor(name, array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def vocabulary() -> dict[str, Any]:
    """Metadata of a byte-level tokenizer with 260 tokens: all bytes, two merges, and an end token."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    tokens = [*bytes_to_unicode().values(), "he", "hel", "lo", "<|end|>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * (len(tokens) - 1) + [3],
        "tokenizer.ggml.merges": ["h e", "he l", "l o"],
        "tokenizer.ggml.eos_token_id": len(tokens) - 1,
    }


def lone_gguf(model: PreTrainedModel, file: Path, kind: Type = Type.Q8_0) -> ModelConfig:
    """Write a model with `vocabulary()` as GGUF, with nothing next to it."""
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        state = load_file(Path(folder) / "model.safetensors")
    write_gguf(file, quantised(converted(state, model.config), kind), metadata(model.config) | vocabulary())
    return ModelConfig(str(file), device="cpu", dtype="float32")
