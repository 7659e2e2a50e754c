"""Every packer stores, given its scales, the nearest number that the format has: all of them are tried, in float64."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from gguf import quantize
from numpy.typing import NDArray
from packed_checkpoints import LINEAR_FORMATS, Drawn, Floats, fp4_values, fp8_values
from torch import Tensor

from moevolve.workers.checkpoints.formats.base import Codec
from moevolve.workers.checkpoints.formats.gguf import GgufType
from moevolve.workers.checkpoints.formats.registry import packed_format

Parts = Mapping[str, Tensor]
Codes = NDArray[Any]

ROWS, COLUMNS, BLOCK = 16, 64, 5
GGUF = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "MXFP4")
FP4 = fp4_values(np.arange(16))


def array(tensor: Tensor) -> Floats:
    return tensor.double().numpy()


def nibbles(packed: Tensor) -> Codes:
    """Four-bit codes of a row, the lowest bits of a byte or word first."""
    data = packed.contiguous().numpy().view(np.uint8)
    return np.stack([data & 15, data >> 4], axis=-1).reshape(len(data), -1)


def awq_nibbles(packed: Tensor) -> Codes:
    """Word i has outputs 8i + (0, 2, 4, 6, 1, 3, 5, 7), the lowest bits first."""
    found = nibbles(packed).reshape(len(packed), -1, 8)
    codes = np.empty_like(found)
    codes[..., [0, 2, 4, 6, 1, 3, 5, 7]] = found
    return codes.reshape(len(packed), -1)


def spread(scales: Floats, size: int) -> Floats:
    return scales.repeat(size, axis=-1)[..., None]


FP8_SHAPES = {"fp8": (-(-ROWS // BLOCK), -(-COLUMNS // BLOCK)), "fp8 rows": (ROWS, 1), "fp8 matrix": (1,)}


def fp8(parts: Parts) -> tuple[Codes, Floats]:
    levels = fp8_values(np.arange(256).astype(np.uint8))
    levels[[0x7F, 0xFF]] = np.inf  # not numbers
    scales = array(parts.get("weight_scale_inv", parts.get("weight_scale")))
    if parts.keys() == {"weight", "weight_scale_inv"} and scales.shape == (ROWS, COLUMNS // 32):
        scales = np.exp2(scales - 127).repeat(32, 1)
    elif scales.shape == FP8_SHAPES["fp8"]:
        scales = scales.repeat(BLOCK, 0)[:ROWS].repeat(BLOCK, 1)[:, :COLUMNS]
    scales = np.broadcast_to(scales, (ROWS, COLUMNS))
    return parts["weight"].view(torch.uint8).numpy(), scales[..., None] * levels


def gpt_oss(parts: Parts) -> tuple[Codes, Floats]:
    """One expert, of which the rows of the stored blocks are the columns."""
    codes = nibbles(parts["blocks"][0].flatten(1)).T
    scales = spread(np.exp2(array(parts["scales"][0]) - 127), 32)
    return codes, (scales * FP4).swapaxes(0, 1)


def int4(parts: Parts) -> tuple[Codes, Floats]:
    return nibbles(parts["weight_packed"]), spread(array(parts["weight_scale"]), 32) * (np.arange(16) - 8)


def nvfp4(parts: Parts) -> tuple[Codes, Floats]:
    scales = array(parts["weight_scale"]) / array(parts["weight_global_scale"])
    return nibbles(parts["weight_packed"]), spread(scales, 16) * FP4


def modelopt(parts: Parts) -> tuple[Codes, Floats]:
    return nibbles(parts["weight"]), spread(array(parts["weight_scale"]) * array(parts["weight_scale_2"]), 16) * FP4


def mxfp4(parts: Parts) -> tuple[Codes, Floats]:
    return nibbles(parts["weight_packed"]), spread(np.exp2(array(parts["weight_scale"]) - 127), 32) * FP4


def awq(parts: Parts) -> tuple[Codes, Floats]:
    zeros, scales = awq_nibbles(parts["qzeros"]).T, array(parts["scales"]).T
    return awq_nibbles(parts["qweight"]).T, spread(scales, 32) * (np.arange(16) - spread(zeros.astype(float), 32))


def gptq(parts: Parts) -> tuple[Codes, Floats]:
    group_of = parts["g_idx"].numpy()
    zeros, scales = nibbles(parts["qzeros"]).T[:, group_of] + 1.0, array(parts["scales"]).T[:, group_of]
    return nibbles(parts["qweight"].T), scales[..., None] * (np.arange(16) - zeros[..., None])


def ggml(kind: str, parts: Parts) -> tuple[Codes, Floats]:
    """The structures of ggml-common.h: scales, then bits of weight 16, then a block's halves in low and high bits."""
    width = {"Q8_0": 34, "Q4_0": 18, "Q4_1": 20, "Q5_0": 22, "Q5_1": 24, "MXFP4": 17}[kind]
    blocks = parts[""].numpy().reshape(ROWS, -1, width)
    if kind == "MXFP4":
        codes = np.concatenate([blocks[..., 1:] & 15, blocks[..., 1:] >> 4], axis=-1)
        return codes.reshape(ROWS, -1), spread(np.exp2(blocks[..., 0] - 127.0), 32) * FP4
    halves = np.ascontiguousarray(blocks[..., :4]).view(np.float16).astype(np.float64)
    scales = spread(halves[..., 0], 32)
    if kind == "Q8_0":
        codes = blocks[..., 2:].view(np.int8).astype(np.int64) + 128
        return codes.reshape(ROWS, -1), scales * (np.arange(256) - 128)
    codes = np.concatenate([blocks[..., -16:] & 15, blocks[..., -16:] >> 4], axis=-1).astype(np.int64)
    bits = 5 if "Q5" in kind else 4
    if bits == 5:
        codes += 16 * np.unpackbits(blocks[..., -20:-16], axis=-1, bitorder="little").astype(np.int64)
    offset = spread(halves[..., 1], 32) if kind.endswith("_1") else -scales * 2 ** (bits - 1)
    return codes.reshape(ROWS, -1), scales * np.arange(2**bits) + offset


DECODERS = {
    **dict.fromkeys((*FP8_SHAPES, "mxfp8"), fp8),
    "mxfp4": gpt_oss,
    "int4": int4,
    "nvfp4": nvfp4,
    "mxfp4-compressed": mxfp4,
    "modelopt": modelopt,
    "awq": awq,
    "gptq": gptq,
}


def sample(kind: str, numbers: np.random.Generator) -> tuple[Codec, Parts]:
    """A codec, and a packed matrix of 16 x 64 numbers."""
    if kind in GGUF:
        return GgufType(kind), {"": torch.from_numpy(quantize(np.ones((ROWS, COLUMNS), np.float32), Type[kind]))}
    if kind in FP8_SHAPES:
        block = {"weight_block_size": [BLOCK, BLOCK]} if kind == "fp8" else {}
        scale, scales = "weight_scale_inv" if block else "weight_scale", torch.ones(FP8_SHAPES[kind])
        weight = torch.ones(ROWS, COLUMNS).to(torch.float8_e4m3fn)
        return named_codec({"quant_method": "fp8"} | block, {"weight": weight, scale: scales})
    if kind == "mxfp4":
        blocks = torch.zeros((1, ROWS, COLUMNS // 32, 16), dtype=torch.uint8)
        codec, _ = named_codec({"quant_method": "mxfp4"}, {"weight_blocks": blocks, "weight_scales": blocks[..., 0]})
        return codec, {"blocks": blocks.mT.reshape(1, ROWS, -1, 16), "scales": blocks[..., 0]}
    pack, group, settings = LINEAR_FORMATS[kind]
    return named_codec(settings, pack(Drawn(numbers, (ROWS, COLUMNS), group))[0])


def named_codec(settings: dict[str, Any], parts: Parts) -> tuple[Codec, Parts]:
    (matrix,) = packed_format(settings["quant_method"], settings, "m").matrices({f"x.{part}" for part in parts})
    return matrix.codec, parts


def decoded(kind: str, parts: Parts) -> tuple[Floats, Floats]:
    """The numbers that the codes stand for, and all that each could: [rows, columns] and [rows, columns, levels]."""
    codes, levels = ggml(kind, parts) if kind in GGUF else DECODERS[kind](parts)
    return np.take_along_axis(levels, codes.astype(np.int64)[..., None], -1)[..., 0], levels


@pytest.mark.parametrize("kind", [*DECODERS, *(pytest.param(kind, id=f"gguf {kind}") for kind in GGUF)])
def test_numbers_are_rounded_to_the_nearest(kind: str) -> None:
    numbers = np.random.default_rng(6)
    codec, parts = sample(kind, numbers)
    # Rows of random numbers, and rows of equal steps that are not as many as the codes; one group of zeros.
    values = numbers.normal(0, 0.02, (ROWS, COLUMNS))
    values[ROWS // 2 :] = np.linspace(-0.05, 0.06, ROWS // 2 * COLUMNS).reshape(ROWS // 2, COLUMNS)
    values[0, :32] = 0
    shape = (1, COLUMNS, ROWS) if kind == "mxfp4" else (ROWS, COLUMNS)
    values = (values.T if kind == "mxfp4" else values).astype(np.float32).astype(np.float64)
    meant = torch.from_numpy(values).float().reshape(shape)
    packed = codec.pack(meant, parts)
    assert packed.keys() == parts.keys()
    assert all((packed[key].dtype, packed[key].shape) == (parts[key].dtype, parts[key].shape) for key in parts)

    found, levels = decoded(kind, packed)
    nearest = np.abs(levels - values[..., None]).min(-1)
    # GGUF's codes are chosen before the scale is rounded to 16 bits, which can shift the middle between two of them.
    slack = 2**-10 if kind in GGUF and kind != "MXFP4" else 1e-6
    assert (np.abs(found - values) <= nearest + slack * np.abs(values).max()).all()
    unpacked = codec.unpack(packed, torch.float32)
    np.testing.assert_allclose(unpacked.reshape(values.shape).numpy(), found, rtol=2**-8, atol=1e-9)

    # Numbers that the format has stay what they are.
    again = codec.pack(torch.from_numpy(found).float().reshape(shape), packed)
    np.testing.assert_allclose(decoded(kind, again)[0], found, rtol=1e-6, atol=1e-12)
