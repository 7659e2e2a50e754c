"""Tiny quantised checkpoints as published, with the numbers that their formats define, in float64."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

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


def mxfp4_values(blocks: NDArray[np.uint8], scales: NDArray[np.uint8]) -> Floats:
    """OCP microscaling, MXFP4: blocks of 32 E2M1 numbers, two in a byte, the first one low, times 2^(scale - 127).

    Args:
        blocks: [..., blocks, 16].
        scales: [..., blocks].

    Returns:
        [..., 32 blocks].
    """
    codes = np.stack([blocks & 0xF, blocks >> 4], axis=-1).reshape(*blocks.shape[:-1], 32)
    exponent, mantissa = (codes >> 1 & 3).astype(np.int64), (codes & 1) / 2
    size = np.where(exponent == 0, mantissa, np.ldexp(1 + mantissa, exponent - 1))
    values = np.where(codes & 8, -size, size) * np.ldexp(1.0, scales.astype(np.int64) - 127)[..., None]
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
