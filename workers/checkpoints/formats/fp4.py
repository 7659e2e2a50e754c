"""Four-bit floating-point numbers, E2M1 (OCP Microscaling, v1.0), with scales per group of a row: MXFP4 and NVFP4.

E2M1 has 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives. MXFP4 has a power of two per 32 numbers, NVFP4 an FP8 scale per
16 numbers and a float32 scale per matrix.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from moevolve.evaluators.errors import UserError
from moevolve.workers.checkpoints.formats.base import (
    Codec,
    PackedMatrix,
    blocks_largest,
    packed_matrices,
    power_of_two,
    scaled_blocks,
)
from moevolve.workers.checkpoints.settings import Only, Settings, check_settings

# Numbers of a row that share a scale.
MX_GROUP, NV_GROUP = 32, 16

# Largest numbers of E2M1 and of E4M3.
_LARGEST, _LARGEST_SCALE = 6.0, 448.0
# Numbers halfway between neighbours, by the code of the smaller one.
_MIDDLES = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])


MXFP4_SETTINGS: Settings = {
    "quant_method": "chooses this format",
    "modules_to_not_convert": "told by the tensors",
    "dequantize": "asks transformers to unpack",
}
# Settings of ModelOpt, without those that its algorithms have values of their own for.
_MODELOPT: Settings = {
    "quant_method": "chooses this format",
    # Quantised matrices are those that have scales.
    "exclude_modules": "told by the tensors",
    "ignore": "told by the tensors",
    # Weights are unpacked, and activations and caches computed as they are.
    "kv_cache_scheme": "of the cache",
    "kv_cache_quant_algo": "of the cache",
    "producer": "the program that wrote it",
}
# Of the groups in these settings, which are spelled as those of compressed-tensors.
_MODELOPT_GROUP: Settings = {
    "weights": "see below",
    "input_activations": "of activations",
    "targets": "told by the tensors",
}


def check_modelopt(settings: Mapping[str, Any], algorithms: Sequence[str], bits: int, group: int | None) -> None:
    """Refuse settings of ModelOpt that don't say one of some algorithms, or a number of bits or of a group's numbers.

    `group` is None for one scale per matrix.
    """
    algorithm = settings.get("quant_algo")
    if str(algorithm).lower() not in algorithms:
        raise UserError(
            f"modelopt weights quantised by {algorithm} aren't supported; use an NVFP4, FP8 or MXFP8 checkpoint"
        )
    sizes = Only(() if group is None else (group,), "another number of numbers that share a scale")
    known = _MODELOPT | {"quant_algo": "see above", "group_size": sizes}
    check_settings({**settings, "config_groups": None}, known, "its quantization_config")
    strategies = ("tensor",) if group is None else ("tensor_group", "group")
    weights: Settings = {
        "num_bits": Only((bits,), "another number of bits"),
        "type": Only(("float",), "another kind of numbers"),
        "group_size": sizes,
        "strategy": Only(strategies, "scales of other parts of a matrix"),
        "symmetric": "the numbers have no zero points",
    }
    for name, each in (settings.get("config_groups") or {}).items():
        where = f"its quantization_config.config_groups.{name}"
        check_settings(each, _MODELOPT_GROUP, where)
        check_settings(each["weights"], weights, f"{where}.weights")


def fp4_bytes(values: Tensor) -> Tensor:
    """Round numbers [..., even] to the nearest of E2M1, ties to the even code, and larger ones than 6 to 6.

    Returns codes, uint8 [..., half], the first of two numbers in the low bits.
    """
    size = values.abs().float().contiguous()
    below = torch.bucketize(size, _MIDDLES)  # a number in the middle gets the smaller code
    up = (below % 2 == 1) & (size == _MIDDLES[below.clamp_max(len(_MIDDLES) - 1)])
    codes = (below + up + 8 * values.signbit()).to(torch.uint8)
    return codes[..., 0::2] | codes[..., 1::2] << 4


def fp4_numbers(codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the numbers of codes [..., half] of 8 bits, the first of two in the low bits: [..., even] of a dtype."""
    positive = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=dtype, device=codes.device)
    numbers = torch.cat((positive, -positive))
    pairs = torch.stack((numbers.repeat(16), numbers.repeat_interleave(16)), dim=1)
    found = pairs.index_select(0, codes.view(torch.uint8).flatten().int())
    return found.view(*codes.shape[:-1], 2 * codes.shape[-1])


def mxfp4_parts(values: Tensor) -> tuple[Tensor, Tensor]:
    """Pack numbers [..., columns] as MXFP4.

    Returns:
        Codes, uint8 [..., columns / 2], and the biased exponents of the scales, uint8 [..., columns / 32].
    """
    groups = values.float().unflatten(-1, (-1, MX_GROUP))
    # The least power of two that no number exceeds 7 of. Numbers from 5 to 7 are rounded to 6, so none is more than
    # half a step away. The exponent that the specification proposes also has numbers up to 8, which it cuts off at 6.
    scales = power_of_two(groups.abs().amax(-1) / 7).clamp(2.0**-126, 2.0**126)
    exponents = torch.frexp(scales).exponent - 1 + 127
    return fp4_bytes((groups / scales[..., None]).flatten(-2)), exponents.to(torch.uint8)


class GptOssMxfp4(Codec):
    """MXFP4 as GPT-OSS is published: fused experts `_blocks`, uint8 [n, rows, groups, 16], `_scales` [n, rows, groups].

    The unpacked tensor is [n, columns, rows], as the family multiplies from the right.
    """

    def __init__(self, settings: Mapping[str, object]) -> None:
        check_settings(settings, MXFP4_SETTINGS, "its quantization_config")

    def matrices(self, names: Collection[str]) -> Iterator[PackedMatrix]:
        for name in names:
            if not name.endswith("_blocks"):
                continue
            plain = name.removesuffix("_blocks")
            if f"{plain}_scales" not in names:
                raise UserError(f"tensor {name} is quantised, and {plain}_scales is missing; fetch the files again")
            yield PackedMatrix(plain, {"blocks": name, "scales": f"{plain}_scales"}, self)

    def unpack(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        experts, rows, groups = parts["scales"].shape
        found = torch.empty((experts, MX_GROUP * groups, rows), dtype=dtype)
        # Powers of two are exact in every dtype but float16, which has too few exponents.
        computed = torch.float32 if dtype == torch.float16 else dtype
        powers = torch.ldexp(torch.ones(256, dtype=torch.float64), torch.arange(256) - 127).to(computed)
        # All experts at once would take 32-bit indices for every second value: 1.1 GB in a layer of GPT-OSS-20B.
        for expert, (blocks, scales) in enumerate(zip(parts["blocks"], parts["scales"], strict=True)):
            numbers = fp4_numbers(blocks, computed) * powers[scales.int()][..., None]
            found[expert] = numbers.view(rows, -1).t()
        return found

    def pack(self, values: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        codes, exponents = mxfp4_parts(values.mT)
        return {"blocks": codes.unflatten(-1, (-1, MX_GROUP // 2)), "scales": exponents}


class ModelOptNvfp4(Codec):
    """NVFP4 as ModelOpt writes it: `weight`, uint8 [rows, columns / 2], `weight_scale` and `weight_scale_2`."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        check_modelopt(settings, ("nvfp4", "w4a16_nvfp4"), 4, NV_GROUP)

    def matrices(self, names: Collection[str]) -> Iterator[PackedMatrix]:
        return packed_matrices(self, names, "weight_scale_2", ["weight", "weight_scale"], ["input_scale"])

    def unpack(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8

        rows, half = parts["weight"].shape
        values = unpack_fp4_from_uint8(parts["weight"], rows, 2 * half, torch.float32)
        scales = parts["weight_scale"].float() * parts["weight_scale_2"].float()
        return scaled_blocks(values, scales, (1, NV_GROUP), dtype)

    def pack(self, values: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        scales, second = nvfp4_scales(values, like["weight_scale_2"])
        inverse = scaled_blocks(torch.ones_like(values), scales.float() * second.float(), (1, NV_GROUP), torch.float32)
        codes = fp4_bytes(values.float() / inverse)
        return {**like, "weight": codes, "weight_scale": scales, "weight_scale_2": second}


def nvfp4_scales(values: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Choose the scales of a matrix [rows, columns]: a group's largest number becomes 6 before the scale is rounded.

    All numbers are multiplied by the scale `second` of the matrix that this one replaces. It stays if the scales of
    groups fit E4M3 with it, because servers fuse matrices that have the same one.

    Returns:
        Scales of groups, float8 [rows, columns / 16], and the scale of the matrix in the shape of `second`.
    """
    groups = blocks_largest(values.float(), (1, NV_GROUP)) / _LARGEST
    largest = float((groups / second.float()).amax())
    if not _LARGEST_SCALE / 16 <= largest <= _LARGEST_SCALE and float(groups.amax()) > 0:
        second = torch.full_like(second, float(groups.amax()) / _LARGEST_SCALE)
    # A scale that is rounded to 0 would lose its group.
    return (groups / second.float()).clamp(2.0**-9, _LARGEST_SCALE).to(torch.float8_e4m3fn), second
