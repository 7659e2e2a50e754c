"""Published models in few layers: their configs, what their files call their tensors, and in which dtype these are.

Widths, counts of experts and vocabularies are the published ones, from `configs/models`. Only the number of layers is
smaller, and the number of experts where a machine couldn't hold one layer otherwise; `Spec.scaled` says so.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

CONFIGS = Path(__file__).parents[3] / "configs" / "models"


@dataclass(frozen=True)
class Spec:
    """One model of the lab.

    Attributes:
        name: of its folder in `configs/models`.
        layers: decoder layers that are left, dense ones first where the model begins with such.
        dense: how many of them are dense, in a model of experts.
        changes: settings that aren't the published ones, beside the number of layers.
        retained: experts that candidates keep in the lab's searches, about half.
        router_space: of these searches.
    """

    name: str
    layers: int
    dense: int = 0
    retained: int = 0
    changes: dict[str, Any] = field(default_factory=dict)
    router_space: str = "probs"

    @property
    def published(self) -> dict[str, Any]:
        """The published config."""
        settings: dict[str, Any] = json.loads((CONFIGS / self.name / "config.json").read_text())
        return settings

    @property
    def config(self) -> dict[str, Any]:
        """The published config with few layers; with fewer tokens, special ones come round to lower numbers."""
        config = few_layers(self.published, self.layers, self.dense) | self.changes
        ids = {name: config[name] for name in config if name.endswith("_token_id") and isinstance(config[name], int)}
        return config | {name: place % config["vocab_size"] for name, place in ids.items()}

    @property
    def scaled(self) -> str:
        """What isn't as published, for people."""
        share = [f"{self.layers} of {self.published['num_hidden_layers']} layers"]
        share += [f"{name} {value} of {self.published[name]}" for name, value in self.changes.items()]
        return ", ".join(share)


SPECS = {
    spec.name: spec
    for spec in (
        Spec("mixtral-8x7b", 2, retained=4),
        Spec("mixtral-8x22b", 1, retained=4),
        Spec("qwen1.5-moe-a2.7b", 2, retained=30),
        Spec("qwen2-57b-a14b", 1, retained=32),
        Spec("qwen3-30b-a3b", 1, retained=64),
        Spec("olmoe-1b-7b", 2, retained=32),
        Spec("deepseek-v2-lite", 2, dense=1, retained=32),
        # One layer of 256 experts is 11 GB in FP8 and 23 GB unpacked.
        Spec("deepseek-v3", 2, dense=1, retained=16, changes={"n_routed_experts": 32}),
        # A layer that chooses experts by token ids and one that doesn't. 256 experts would be 3.4 GB, unpacked 12.9 GB.
        Spec(
            "deepseek-v4-flash",
            2,
            retained=16,
            router_space="logits",
            changes={
                "n_routed_experts": 64,
                "mlp_layer_types": ["hash_moe", "moe"],
                "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention"],
            },
        ),
        Spec("glm-4.5-air", 2, dense=1, retained=64),
        Spec("gpt-oss-20b", 2, retained=16, router_space="logits"),
        Spec("llama-3-8b", 1),
        Spec("opt-13b", 1),
    )
}


def few_layers(published: dict[str, Any], layers: int, dense: int = 0) -> dict[str, Any]:
    """A config with fewer layers, and with what it says layer by layer cut to these."""
    config = published | {"num_hidden_layers": layers}
    if "first_k_dense_replace" in config:
        config["first_k_dense_replace"] = dense
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:layers]
    return config


@dataclass(frozen=True)
class Stored:
    """A tensor of a published file.

    Attributes:
        name: there.
        shape: there.
        dtype: as safetensors calls it.
        kind: what its numbers are: `weight` of a linear layer, `ones`, `small` ones, `packed` 4-bit pairs, `exponents`
            or `scales` of blocks, or `eighths`, exponents of blocks of FP8; `given` ones are `values`.
        inputs: numbers that a weight's outputs are sums over.
        values: the numbers themselves where these matter, as integers of 64 bits.
        sizes: factors of equal parts of a tensor, in their order; experts differ by them.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: str
    inputs: int = 1
    values: tuple[int, ...] = ()
    sizes: tuple[float, ...] = (1.0,)


_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_BLOCK = 128
_NOT_PACKED = ("embed_tokens", "lm_head", "norm", "mlp.gate.")
# Standard deviation of the logarithms of a layer's experts' sizes, as of their outputs' norms in `planted.py`: most of
# a layer's energy is in few experts, and none are equal.
_SPREAD = 0.5


def stored_tensors(config: dict[str, Any]) -> Iterator[Stored]:
    """The tensors of a published checkpoint of a config, in order of their names in the model.

    Names and shapes are those of the model in `transformers`, with its fused experts taken apart as on the hub; layers
    for speculative decoding are left out, which `transformers` doesn't load.
    """
    if config["model_type"] == "deepseek_v4":
        yield from _deepseek_v4(config)
        return
    dtype = _DTYPES[config["dtype"]]
    packed = config.get("quantization_config", {}).get("quant_method")
    for name, shape in _model_shapes(config):
        if ".mlp.experts." in name:
            each = _packed_experts(name, shape) if packed == "mxfp4" else _single_experts(config, name, shape, dtype)
        else:
            each = iter([_plain(_on_hub(config, name), shape, dtype)])
        for tensor in each:
            yield from _in_fp8(tensor) if packed == "fp8" else [tensor]


def _deepseek_v4(config: dict[str, Any]) -> Iterator[Stored]:
    """FP8 with exponents for blocks, and MXFP4 experts; names are the decoder's own, as `transformers` maps them."""
    from moevolve.workers.checkpoints.state import SavedNames

    saved = SavedNames(_model(config)).tensors.values()
    shapes = {name: tuple(tensor.shape) for tensors in saved for name, tensor in tensors.items()}
    for full, shape in shapes.items():
        name = full.removeprefix("model.").replace("embed_tokens.", "embed.")
        scale = f"{name.removesuffix('weight')}scale"
        if ".experts." in name:
            yield Stored(name, (shape[0], shape[1] // 2), "I8", "packed", shape[1])
            yield Stored(scale, (shape[0], shape[1] // 32), "F8_E8M0", "exponents", shape[1])
        elif name.endswith("tid2eid"):
            numbers = np.random.default_rng(len(name)).random((shape[0], config["n_routed_experts"]))
            chosen = numbers.argsort(axis=1)[:, : shape[1]]
            yield Stored(name, shape, "I64", "given", values=tuple(chosen.flatten().tolist()))
        elif name.endswith((".wq_a.weight", ".wq_b.weight", ".wkv.weight", ".wo_b.weight", ".w1.weight")):
            yield Stored(name, shape, "F8_E4M3", "weight", shape[1])
            yield Stored(scale, tuple(-(-size // _BLOCK) for size in shape), "F8_E8M0", "eighths", shape[1])
        elif ".hc_" in name or name.startswith("hc_") or name.endswith((".ape", ".bias")):
            yield Stored(name, shape, "F32", "small")
        else:
            yield _plain(name, shape, _DTYPES[config["dtype"]])


def _model(config: dict[str, Any]) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {name: value for name, value in config.items() if name not in ("model_type", "quantization_config")}
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **settings))


def _model_shapes(config: dict[str, Any]) -> list[tuple[str, tuple[int, ...]]]:
    model = _model(config)
    made = model.config
    names = [(name, tuple(tensor.shape)) for name, tensor in model.state_dict().items()]
    tied = getattr(made, "tie_word_embeddings", False)
    return [(name, shape) for name, shape in names if not (tied and name == "lm_head.weight")]


def _on_hub(config: dict[str, Any], name: str) -> str:
    return name.replace(".mlp.", ".block_sparse_moe.") if config["model_type"] == "mixtral" else name


def _plain(name: str, shape: tuple[int, ...], dtype: str) -> Stored:
    if name.endswith("e_score_correction_bias"):
        return Stored(name, shape, "F32", "small")
    if name.endswith(("bias", "sinks")):
        return Stored(name, shape, dtype, "small")
    if len(shape) == 1:
        return Stored(name, shape, dtype, "ones")
    return Stored(name, shape, dtype, "weight", shape[1])


def _single_experts(config: dict[str, Any], name: str, shape: tuple[int, ...], dtype: str) -> Iterator[Stored]:
    """Gate and up projection one after the other, as they are fused, expert by expert."""
    prefix, fused = name.rsplit(".", 1)
    experts, rows, inputs = shape
    given = ("w1", "w3", "w2") if config["model_type"] == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    parts = given[:2] if fused == "gate_up_proj" else given[2:]
    for expert, size in enumerate(_sizes(name, experts)):
        for part in parts:
            path = _on_hub(config, f"{prefix}.{expert}.{part}.weight")
            yield Stored(path, (rows // len(parts), inputs), dtype, "weight", inputs, sizes=(size,))


def _sizes(name: str, experts: int) -> tuple[float, ...]:
    """Factors of the weights of a layer's experts; only output projections have other ones than 1."""
    if "down_proj" not in name:
        return (1.0,) * experts
    drawn = np.random.default_rng(zlib.crc32(name.encode())).normal(0, _SPREAD, experts)
    return tuple(np.exp(drawn).tolist())


def _packed_experts(name: str, shape: tuple[int, ...]) -> Iterator[Stored]:
    """GPT-OSS keeps [n, in, out] as out rows of 16-byte blocks of 32 inputs, with an exponent each."""
    if name.endswith("bias"):
        yield Stored(name, shape, "BF16", "small")
        return
    experts, inputs, outputs = shape
    yield Stored(f"{name}_blocks", (experts, outputs, inputs // 32, 16), "U8", "packed", inputs)
    scales = (experts, outputs, inputs // 32)
    yield Stored(f"{name}_scales", scales, "U8", "exponents", inputs, sizes=_sizes(name, experts))


def _in_fp8(tensor: Stored) -> Iterator[Stored]:
    """Weights of linear layers as DeepSeek-V3 has them: 8 bits, and a scale for every 128 rows and columns or less."""
    if tensor.kind != "weight" or any(part in tensor.name for part in _NOT_PACKED):
        yield tensor
        return
    yield replace(tensor, dtype="F8_E4M3", sizes=(1.0,))
    blocks = tuple(-(-size // _BLOCK) for size in tensor.shape)
    yield Stored(f"{tensor.name}_scale_inv", blocks, "F32", "scales", tensor.inputs, sizes=tensor.sizes)
