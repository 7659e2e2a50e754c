"""Tiny quantised checkpoints as published, with the numbers that their formats define, in float64."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

from moevolve.workers.checkpoints.loading import load_model
from moevolve.workers.contract.settings import ModelConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

Floats = NDArray[np.float64]

BLOCK = 5
"""Rows and columns of a block, so that none of the tiny model's sides (6 to 96) is a multiple of it."""


def scaled(values: Floats, scales: Floats, block: int) -> Floats:
    """Weight (i, j) times the scale of block (i // b, j // b)."""
    rows, columns = (np.arange(side) // block for side in values.shape)
    return values * scales[rows][:, columns]


def fp8_values(codes: NDArray[np.uint8]) -> Floats:
    """OCP 8-bit floating point, E4M3: a sign, 4 bits of exponent with bias 7, 3 of mantissa; no infinities."""
    sign = np.where(codes & 0x80, -1.0, 1.0)
    exponent, mantissa = (codes >> 3 & 0xF).astype(np.int64), (codes & 7) / 8
    normal = np.ldexp(1 + mantissa, exponent - 7)
    return sign * np.where(exponent == 0, np.ldexp(mantissa, -6), normal)


def fp4_values(codes: NDArray[np.uint8]) -> Floats:
    """E2M1 numbers: a sign, two bits of exponent with bias 1, one of mantissa."""
    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    return np.where(codes & 8, -1.0, 1.0) * magnitudes[codes & 7]


def mxfp4_values(blocks: NDArray[np.uint8], scales: NDArray[np.uint8]) -> Floats:
    """OCP microscaling, MXFP4: blocks of 32 E2M1 numbers, two in a byte, the first one low, times 2^(scale - 127).

    Args:
        blocks: [..., blocks, 16].
        scales: [..., blocks].

    Returns:
        [..., 32 blocks].
    """
    codes = np.stack([blocks & 0xF, blocks >> 4], axis=-1).reshape(*blocks.shape[:-1], 32)
    values = fp4_values(codes) * np.ldexp(1.0, scales.astype(np.int64) - 127)[..., None]
    return values.reshape(*blocks.shape[:-2], -1)


def write(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
    packed: Mapping[str, Tensor],
    plain: Mapping[str, Floats],
    **settings: Any,
) -> tuple[ModelConfig, ModelConfig]:
    """Write a checkpoint twice: with some tensors quantised, and with the same numbers in float32.

    Args:
        model: Model, which provides the other tensors.
        tokenizer: Tokenizer of the model.
        folder: Folder for both checkpoints.
        packed: Tensors of the quantised checkpoint by name.
        plain: Values of the quantised tensors by name in the float32 checkpoint.
        settings: Further fields of the quantised checkpoint's config.
    """
    for name in ("packed", "plain"):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    state = load_file(folder / "plain" / "model.safetensors")
    whole = state | {name: torch.from_numpy(values).float().contiguous() for name, values in plain.items()}
    save_file(whole, folder / "plain" / "model.safetensors", {"format": "pt"})
    kept = {name: tensor for name, tensor in state.items() if name not in plain}
    save_file(kept | dict(packed), folder / "packed" / "model.safetensors", {"format": "pt"})
    file = folder / "packed" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    one, other = (ModelConfig(str(folder / name), device="cpu", dtype="float32") for name in ("packed", "plain"))
    return one, other


def fp8_checkpoint(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path
) -> tuple[ModelConfig, ModelConfig]:
    """Write a DeepSeek-V3 with FP8 weights and a scale per block of 5 x 5; see `write`."""
    model.save_pretrained(folder / "names")
    numbers, packed, plain = np.random.default_rng(3), {}, {}
    for name, tensor in load_file(folder / "names" / "model.safetensors").items():
        if not name.endswith(("proj.weight", "_mqa.weight")) or tensor.ndim != 2:
            continue
        codes = tensor.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        scales = numbers.uniform(0.4, 1.7, [-(-side // BLOCK) for side in codes.shape]).astype(np.float32)
        packed |= {
            name: torch.from_numpy(codes.copy()).view(torch.float8_e4m3fn),
            f"{name}_scale_inv": torch.from_numpy(scales),
        }
        plain[name] = scaled(fp8_values(codes), scales.astype(np.float64), BLOCK)
    shapes = {values.shape for values in plain.values()}
    assert any(rows % -(-rows // BLOCK) for rows, _ in shapes), "rows that rows of scales don't divide"
    assert any(rows % BLOCK and not rows % -(-rows // BLOCK) for rows, _ in shapes), "and that they divide by chance"
    settings = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic"}
    return write(model, tokenizer, folder, packed, plain, quantization_config=settings | {"fmt": "e4m3"})


def mistral4_checkpoint(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path
) -> tuple[ModelConfig, ModelConfig]:
    """Write a Mistral 4 with FP8 weights, a scale per matrix or fused expert, and those of activations; see `write`."""
    model.save_pretrained(folder / "names")
    numbers, packed, plain = np.random.default_rng(6), {}, {}
    for name, tensor in load_file(folder / "names" / "model.safetensors").items():
        if not name.endswith(("proj.weight", "_mqa.weight", "experts.gate_up_proj", "experts.down_proj")):
            continue
        codes = tensor.to(torch.float8_e4m3fn).view(torch.uint8).numpy().copy()
        scales = numbers.uniform(0.4, 1.7, codes.shape[:-2]).astype(np.float32)
        packed |= {
            name: torch.from_numpy(codes).view(torch.float8_e4m3fn),
            f"{name}_scale_inv": torch.from_numpy(np.asarray(scales)),
            f"{name.removesuffix('.weight') + ('.' if name.endswith('weight') else '_')}activation_scale": torch.ones(
                codes.shape[:-2]
            ),
        }
        plain[name] = fp8_values(codes) * scales.astype(np.float64)[..., None, None]
    settings = {"quant_method": "fp8", "weight_block_size": None, "activation_scheme": "static"}
    return write(model, tokenizer, folder, packed, plain, quantization_config=settings)


def deepseek_v4_checkpoint(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path
) -> tuple[ModelConfig, ModelConfig]:
    """Write a DeepSeek-V4 as published: FP8 with powers of two per block, and MXFP4 experts; see `write`.

    The published names have no `model.` before them. The experts' sides must be multiples of 32.
    """
    model.save_pretrained(folder / "names")
    numbers, packed, plain = np.random.default_rng(5), {}, {}
    for name, tensor in load_file(folder / "names" / "model.safetensors").items():
        if name.endswith((".w1.weight", ".w2.weight", ".w3.weight")) and ".experts." in name:
            rows, columns = tensor.shape
            blocks = numbers.integers(0, 256, (rows, columns // 32, 16), dtype=np.uint8)
            exponents = numbers.integers(119, 126, (rows, columns // 32), dtype=np.uint8)
            weight = torch.from_numpy(blocks).flatten(1).view(torch.int8)
            plain[name] = mxfp4_values(blocks, exponents)
        elif name.endswith((".wq_a.weight", ".wq_b.weight", ".wkv.weight", ".w1.weight", ".w2.weight", ".w3.weight")):
            codes = tensor.to(torch.float8_e4m3fn).view(torch.uint8).numpy().copy()
            exponents = numbers.integers(125, 129, [-(-side // BLOCK) for side in codes.shape], dtype=np.uint8)
            weight = torch.from_numpy(codes).view(torch.float8_e4m3fn)
            plain[name] = scaled(fp8_values(codes), np.ldexp(1.0, exponents.astype(np.int64) - 127), BLOCK)
        else:
            continue
        scale = torch.from_numpy(exponents)  # bytes, as some checkpoints have them
        if ".shared_experts." not in name:
            scale = scale.view(torch.float8_e8m0fnu)
        packed |= {name: weight, f"{name.removesuffix('weight')}scale": scale}
    settings = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "scale_fmt": "ue8m0", "expert_dtype": "fp4"}
    configs = write(model, tokenizer, folder, packed, plain, quantization_config=settings)
    file = Path(configs[0].path) / "model.safetensors"
    published = {name.removeprefix("model.").replace("embed_tokens", "embed"): t for name, t in load_file(file).items()}
    save_file(published, file, {"format": "pt"})
    return configs


def mxfp4_checkpoint(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path
) -> tuple[ModelConfig, ModelConfig]:
    """Write a GPT-OSS with MXFP4 experts; see `write`. Its sides must be multiples of 32."""
    numbers, packed, plain = np.random.default_rng(4), {}, {}
    for name, tensor in model.state_dict().items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            continue
        experts, inputs, outputs = tensor.shape
        blocks = numbers.integers(0, 256, (experts, outputs, inputs // 32, 16), dtype=np.uint8)
        scales = numbers.integers(119, 126, (experts, outputs, inputs // 32), dtype=np.uint8)
        packed |= {f"{name}_blocks": torch.from_numpy(blocks), f"{name}_scales": torch.from_numpy(scales)}
        plain[name] = mxfp4_values(blocks, scales).transpose(0, 2, 1)
    return write(model, tokenizer, folder, packed, plain, quantization_config={"quant_method": "mxfp4"}, dtype=None)


def pairs(codes: NDArray[np.uint8]) -> Tensor:
    """Two four-bit codes of a row in a byte, the first one low."""
    return torch.from_numpy(codes[:, 0::2] | codes[:, 1::2] << 4)


def words(codes: NDArray[np.int64], order: Sequence[int] = range(8)) -> Tensor:
    """Eight four-bit codes of a row in an int32; bits 4i to 4i + 3 hold number `order[i]` of the eight."""
    grouped = codes.reshape(len(codes), -1, 8)
    packed = sum(grouped[:, :, place] << 4 * i for i, place in enumerate(order))
    return torch.from_numpy(np.asarray(packed).astype(np.uint32).view(np.int32))


class Drawn:
    """Random codes and scales of one matrix, whose numbers have so few bits that bfloat16 holds their products.

    Args:
        shape: Outputs and inputs of the matrix; inputs are a multiple of 32, outputs of 8.
        group: Inputs that share a scale; 0 for all.
    """

    def __init__(self, numbers: np.random.Generator, shape: tuple[int, int], group: int) -> None:
        self.rows, self.columns = shape
        self.group = group or self.columns
        self.codes = numbers.integers(0, 16, shape)
        self.zeros = numbers.integers(1, 16, (self.rows, self.columns // self.group))
        self.scales = numbers.integers(8, 16, self.zeros.shape) / 256.0

    def spread(self, values: Floats) -> Floats:
        """Repeat one value per group for all columns of the group."""
        return values.repeat(self.group, axis=1)

    @property
    def bytes(self) -> NDArray[np.uint8]:
        return self.codes.astype(np.uint8)


def int4(draw: Drawn) -> tuple[dict[str, Tensor], Floats]:
    """compressed-tensors, pack-quantized: signed numbers, stored plus 8."""
    parts = {
        "weight_packed": words(draw.codes),
        "weight_scale": torch.from_numpy(draw.scales).bfloat16(),
        "weight_shape": torch.tensor([draw.rows, draw.columns]),
    }
    return parts, (draw.codes - 8) * draw.spread(draw.scales)


def nvfp4(draw: Drawn) -> tuple[dict[str, Tensor], Floats]:
    """compressed-tensors, nvfp4-pack-quantized: a global scale divides."""
    parts = {
        "weight_packed": pairs(draw.bytes),
        "weight_scale": torch.from_numpy(draw.scales * 256).to(torch.float8_e4m3fn),
        "weight_global_scale": torch.tensor([64.0]),
        "input_global_scale": torch.tensor([3.0]),
    }
    return parts, fp4_values(draw.bytes) * draw.spread(draw.scales) * 4


def modelopt(draw: Drawn) -> tuple[dict[str, Tensor], Floats]:
    """ModelOpt's NVFP4: the second scale multiplies."""
    parts = {
        "weight": pairs(draw.bytes),
        "weight_scale": torch.from_numpy(draw.scales * 256).to(torch.float8_e4m3fn),
        "weight_scale_2": torch.tensor(1 / 64),
        "input_scale": torch.tensor(0.3),
    }
    return parts, fp4_values(draw.bytes) * draw.spread(draw.scales) * 4


def eight_bits(draw: Drawn, scales: Floats) -> tuple[Tensor, Floats]:
    """Random numbers of E4M3 with an exponent of few bits, and what they are times scales."""
    codes = (draw.codes + 48 + 128 * (draw.codes % 3 == 0)).astype(np.uint8)
    return torch.from_numpy(codes).view(torch.float8_e4m3fn), fp8_values(codes) * scales


def fbgemm(draw: Drawn) -> tuple[dict[str, Tensor], Floats]:
    """FBGEMM: a scale per row."""
    weight, values = eight_bits(draw, draw.scales)
    return {"weight": weight, "weight_scale": torch.from_numpy(draw.scales).float()}, values


def fp8_channels(draw: Drawn) -> tuple[dict[str, Tensor], Floats]:
    """compressed-tensors, float-quantized, with the scales of rows in one dimension, as other programs have them."""
    parts, values = fbgemm(draw)
    return parts | {"weight_scale": parts["weight_scale"].flatten()}, values


def modelopt_fp8(draw: Drawn) -> tuple[dict[str, Tensor], Floats]:
    """ModelOpt: a scale per matrix, and one of its inputs."""
    weight, values = eight_bits(draw, draw.scales[:1, :1])
    parts = {"weight_scale": torch.tensor(draw.scales[0, 0]).float(), "input_scale": torch.tensor(0.3)}
    return {"weight": weight, **parts}, values


def mxfp8(draw: Drawn, name: str = "weight_scale_inv") -> tuple[dict[str, Tensor], Floats]:
    """MiniMax-M3 and ModelOpt: exponents of powers of two, as bytes."""
    exponents = draw.zeros + 115
    weight, values = eight_bits(draw, draw.spread(np.ldexp(1.0, exponents - 127)))
    return {"weight": weight, name: torch.from_numpy(exponents.astype(np.uint8))}, values


def mxfp4(draw: Drawn) -> tuple[dict[str, Tensor], Floats]:
    """compressed-tensors, mxfp4-pack-quantized: the exponent of a power of two."""
    exponents = draw.zeros + 115
    parts = {"weight_packed": pairs(draw.bytes), "weight_scale": torch.from_numpy(exponents.astype(np.uint8))}
    return parts, fp4_values(draw.bytes) * draw.spread(np.ldexp(1.0, exponents - 127))


def awq(draw: Drawn) -> tuple[dict[str, Tensor], Floats]:
    """AutoAWQ, GEMM: transposed, and eight outputs in a word in an order of their own."""
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    parts = {
        "qweight": words(np.ascontiguousarray(draw.codes.T), order),
        "qzeros": words(np.ascontiguousarray(draw.zeros.T), order),
        "scales": torch.from_numpy(draw.scales.T.copy()).half(),
    }
    return parts, (draw.codes - draw.spread(draw.zeros)) * draw.spread(draw.scales)


def gptq(draw: Drawn) -> tuple[dict[str, Tensor], Floats]:
    """GPTQ with inputs in an order of activations: groups are named by input, and zero points stored less one."""
    group_of = np.random.default_rng(draw.columns).permutation(np.arange(draw.columns) // draw.group)
    parts = {
        "qweight": words(draw.codes).T.contiguous(),
        "qzeros": words(np.ascontiguousarray(draw.zeros.T) - 1),
        "scales": torch.from_numpy(draw.scales.T.copy()).half(),
        "g_idx": torch.from_numpy(group_of.astype(np.int32)),
    }
    return parts, (draw.codes - draw.zeros[:, group_of]) * draw.scales[:, group_of]


def scheme(kind: str, group: int | None, **weights: Any) -> dict[str, Any]:
    """Quantisation config of compressed-tensors."""
    arguments = {"num_bits": 4, "symmetric": True, "group_size": group} | weights
    groups = {"group_0": {"targets": ["Linear"], "weights": arguments, "format": kind}}
    ignored = ["lm_head", "re:.*mlp.gate$"]
    return {"quant_method": "compressed-tensors", "format": kind, "config_groups": groups, "ignore": ignored}


Pack = Callable[[Drawn], tuple[dict[str, Tensor], Floats]]
LINEAR_FORMATS: dict[str, tuple[Pack, int, dict[str, Any]]] = {
    "int4": (int4, 32, scheme("pack-quantized", 32, type="int", strategy="group")),
    "nvfp4": (nvfp4, 16, scheme("nvfp4-pack-quantized", 16, type="float", strategy="tensor_group")),
    "mxfp4-compressed": (mxfp4, 32, scheme("mxfp4-pack-quantized", 32, type="float", strategy="group")),
    "modelopt": (modelopt, 16, {"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}),
    "fp8 channels": (fp8_channels, 0, scheme("float-quantized", None, type="float", num_bits=8, strategy="channel")),
    "fbgemm": (fbgemm, 0, {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}),
    "modelopt fp8": (modelopt_fp8, 0, {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}),
    "modelopt mxfp8": (partial(mxfp8, name="weight_scale"), 32, {"quant_method": "modelopt", "quant_algo": "MXFP8"}),
    "mxfp8": (mxfp8, 32, {"quant_method": "mxfp8", "activation_scheme": "dynamic", "ignored_layers": ["lm_head"]}),
    "awq": (awq, 32, {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}),
    "gptq": (gptq, 32, {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "sym": False}),
}
"""Formats that quantise every linear layer by itself: how, numbers per group, and the quantisation config."""


def linear_checkpoint(
    kind: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path
) -> tuple[ModelConfig, ModelConfig]:
    """Write a Qwen3-MoE whose projections, experts included, are in one of `LINEAR_FORMATS`; see `write`."""
    pack, group, settings = LINEAR_FORMATS[kind]
    model.save_pretrained(folder / "names")
    numbers, packed, plain = np.random.default_rng(5), {}, {}
    for name, tensor in load_file(folder / "names" / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            continue
        rows, columns = tensor.shape
        parts, values = pack(Drawn(numbers, (rows, columns), group))
        packed |= {f"{name.removesuffix('weight')}{part}": each.contiguous() for part, each in parts.items()}
        plain[name] = values
    return write(model, tokenizer, folder, packed, plain, quantization_config=settings)


def llama4_checkpoint(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path
) -> tuple[ModelConfig, ModelConfig]:
    """Write a Llama-4 with the experts in int4 of compressed-tensors, one by one and not transposed; see `write`.

    Such checkpoints have the names of the modules that `transformers` puts in the place of fused experts
    (`SequentialLlama4TextExperts`).
    """
    pack, group, settings = LINEAR_FORMATS["int4"]
    numbers, packed, plain = np.random.default_rng(7), {}, {}
    for name, tensor in model.state_dict().items():
        if ".feed_forward.experts." not in name:
            continue
        stem, fused = name.rsplit(".", 1)
        sides = ("gate_proj", "up_proj") if fused == "gate_up_proj" else ("down_proj",)
        whole = np.empty(tensor.shape)
        for expert in range(len(tensor)):
            width = tensor.shape[2] // len(sides)
            for place, side in enumerate(sides):
                parts, values = pack(Drawn(numbers, (width, tensor.shape[1]), group))
                packed |= {f"{stem}.{expert}.{side}.{part}": each.contiguous() for part, each in parts.items()}
                whole[expert, :, place * width : (place + 1) * width] = values.T
        plain[name] = whole
    return write(model, tokenizer, folder, packed, plain, quantization_config=settings)


def checkpoint_in_format(
    kind: str, make: Callable[..., PreTrainedModel], tokenizer: PreTrainedTokenizerFast, folder: Path
) -> ModelConfig:
    """Write a quantised checkpoint of a small model.

    Args:
        kind: `fp8`, `fp8_matrix`, `fp8_mxfp4`, `mxfp4`, `llama4 int4`, or one of `LINEAR_FORMATS`.
        make: Creates a tiny model of a family with changed settings.
        tokenizer: Tokenizer of the model.
        folder: Folder of the checkpoint.
    """
    if kind == "fp8":
        return fp8_checkpoint(make("deepseek_v3"), tokenizer, folder)[0]
    if kind == "mxfp4":
        return mxfp4_checkpoint(make("gpt_oss", **MXFP4_SIZES), tokenizer, folder)[0]
    if kind == "fp8_matrix":
        return mistral4_checkpoint(make("mistral4", n_group=1, topk_group=1), tokenizer, folder)[0]
    if kind == "fp8_mxfp4":
        return deepseek_v4_checkpoint(make("deepseek_v4", **V4_SIZES), tokenizer, folder)[0]
    if kind == "llama4 int4":
        return llama4_checkpoint(make("llama4_text", **LLAMA4_SIZES), tokenizer, folder)[0]
    return linear_checkpoint(kind, make("qwen3_moe", **LINEAR_SIZES), tokenizer, folder)[0]


MXFP4_SIZES = {"intermediate_size": 32, "hidden_size": 96, "head_dim": 24}
LLAMA4_SIZES = {"hidden_size": 64, "intermediate_size": 32}
V4_SIZES = {"moe_intermediate_size": 32}
LINEAR_SIZES = {"hidden_size": 64, "moe_intermediate_size": 32}


def same_numbers(packed: ModelConfig, plain: ModelConfig, dtypes: Sequence[str] = ("float32", "bfloat16")) -> None:
    """Both checkpoints load equal tensors, in float32 and in the default bfloat16."""
    for dtype in dtypes:
        found = load_model(replace(packed, dtype="auto" if dtype == "bfloat16" else "float32"))[0].state_dict()
        expected = load_model(replace(plain, dtype=dtype))[0].state_dict()  # type: ignore[arg-type]
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert found[name].dtype == tensor.dtype, name
            assert torch.equal(found[name], tensor), name
