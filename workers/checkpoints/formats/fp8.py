"""FP8 with a scale per block, as DeepSeek-V3 and -V4 are published, per row, as FBGEMM's, or per matrix, as Mistral 4.

Source: DeepSeek-V3 (arXiv 2412.19437), Sec. 3.3.2. DeepSeek-V4's experts have four bits.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from moevolve.workers.checkpoints.formats.base import (
    Codec,
    PackedMatrix,
    blocks_largest,
    packed_matrices,
    power_of_two,
    scaled_blocks,
)
from moevolve.workers.checkpoints.formats.fp4 import MX_GROUP, check_modelopt, fp4_numbers, mxfp4_parts
from moevolve.workers.checkpoints.settings import Only, Settings, check_settings

# Largest number of E4M3.
_LARGEST = 448.0


FP8_SETTINGS: Settings = {
    "quant_method": "chooses this format",
    "weight_block_size": "applied",
    "scale_fmt": Only(("ue8m0", "float", "float32"), "scales in another format"),
    "fmt": Only(("e4m3", "float8_e4m3fn", "e5m2", "float8_e5m2"), "numbers in another format than their dtype"),
    "format": Only(("e4m3", "float8_e4m3fn", "e5m2", "float8_e5m2"), "numbers in another format than their dtype"),
    "bits": Only((8,), "numbers of other than eight bits"),
    "expert_dtype": Only(("fp4", "fp8"), "experts in another dtype"),
    "weight_scale_semantics": Only(("inverse",), "scales that divide"),
    "weight_scale_method": "told by the shapes of scales",
    "group_size": "told by weight_block_size and the shapes of scales",
    # Weights are unpacked, and activations and caches computed as they are.
    "activation_scheme": "of activations",
    "activation_scale_ub": "of activations",
    "kv_cache_scheme": "of the cache",
    # Quantised matrices are those that have scales.
    "modules_to_not_convert": "told by the tensors",
    "modules_to_convert": "told by the tensors",
    "ignored_layers": "told by the tensors",
    "ignore": "told by the tensors",
    "dequantize": "asks transformers to unpack",
}

# Last names of the scales: DeepSeek-V3's, which most others have, too, AutoFP8's and DeepSeek-V4's.
_SCALES = ("weight_scale_inv", "weight_scale", "scale")
# Last names of the scales of activations, which unpacked weights don't need.
_ACTIVATIONS = ("activation_scale", "input_scale", "act_scale")
# Dtypes of scales that are powers of two, the second one of their biased exponents as bytes.
_POWERS = (torch.float8_e8m0fnu, torch.uint8)
# Dtypes of matrices with a number in a byte, and with two.
_EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2)
_FOUR_BITS = (torch.int8, torch.uint8)


class Fp8(Codec):
    """A matrix has `weight`, float8 [rows, columns], and scales, one per block, one per row or one in all.

    Sides need not be multiples of a block's, as the 576 rows of DeepSeek-V3's `kv_a_proj_with_mqa`. Fused experts have
    a further dimension first, and their scales are named after them, as `gate_up_proj_scale_inv`. DeepSeek-V4's experts
    are MXFP4 instead: `weight` int8 [rows, columns / 2], and scales [rows, columns / 32], powers of two.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        check_settings(settings, FP8_SETTINGS, "its quantization_config")
        block = settings.get("weight_block_size")
        self._block = None if block is None else (int(block[0]), int(block[1]))
        # What transformers takes where nothing is said; other programs mean a scale per matrix.
        self._implied = None if "weight_block_size" in settings else (128, 128)
        # DeepSeek-V3.1's scales are powers of two, although their dtype is float32.
        self._powers = settings.get("scale_fmt") == "ue8m0"

    def matrices(self, names: Collection[str]) -> Iterator[PackedMatrix]:
        for root in ("weight_scale_inv", "weight_scale"):
            yield from packed_matrices(self, names, root, ["weight"], _ACTIVATIONS)
        for matrix in packed_matrices(self, names, "scale", optional=["weight"]):
            if "weight" in matrix.parts:  # other modules may have a parameter of this name
                yield matrix
        for name in names:
            fused = name.removesuffix("_scale_inv")
            if name != fused and fused in names and not fused.endswith(".weight"):
                activation = f"{fused}_activation_scale"
                more = {"activation_scale": activation} if activation in names else {}
                yield PackedMatrix(fused, {"weight": fused, "weight_scale_inv": name, **more}, self)

    def unpack(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        weight, scales = parts["weight"], parts[_scales(parts)]
        if weight.ndim == 3:
            return torch.stack([self._unpacked(*each, dtype) for each in zip(weight, scales, strict=True)])
        return self._unpacked(weight, scales, dtype)

    def _unpacked(self, weight: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        if scales.dtype == torch.uint8:
            scales = scales.view(torch.float8_e8m0fnu)
        numbers = fp4_numbers(weight) if weight.dtype in _FOUR_BITS else weight
        block = self._block_of(weight, scales)
        return scaled_blocks(numbers, scales.reshape(1, 1) if scales.numel() == 1 else scales, block, dtype)

    def _block_of(self, weight: Tensor, scales: Tensor) -> tuple[int, int]:
        """Rows and columns that have a scale. Raises a `ValueError` if the settings don't tell."""
        rows, columns = weight.shape
        if weight.dtype in _FOUR_BITS:
            return 1, MX_GROUP
        if weight.dtype not in _EIGHT_BITS:
            raise ValueError(f"it has scales, and its numbers are {weight.dtype} instead of FP8")
        if self._block is None and (scales.numel() == 1 or scales.shape == (rows, 1)):
            return (rows, columns) if scales.numel() == 1 else (1, columns)
        block = self._block or self._implied
        if block is None:
            raise ValueError(
                f"there are {list(scales.shape)} scales, and without weight_block_size it needs one, or one per row"
            )
        return block

    def pack(self, values: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        name = _scales(like)
        if values.ndim == 3:
            made = [
                self.pack(one, {"weight": weight, name: scale})
                for one, weight, scale in zip(values, like["weight"], like[name], strict=True)
            ]
            return {**like, **{part: torch.stack([each[part] for each in made]) for part in ("weight", name)}}
        kept = like[name].dtype
        if like["weight"].dtype in _FOUR_BITS:
            codes, exponents = mxfp4_parts(values)
            return {**like, "weight": codes.view(like["weight"].dtype), name: exponents.view(kept)}
        # A block's largest number becomes 448, or more than 224 where scales are powers of two.
        block = self._block_of(like["weight"], like[name])
        scales = blocks_largest(values.float(), block).reshape(like[name].shape) / _LARGEST
        if self._powers or kept in _POWERS:
            scales = power_of_two(scales)
        scales = torch.where(scales > 0, scales, 1.0)
        scales = scales.to(torch.float8_e8m0fnu).view(kept) if kept in _POWERS else scales.to(kept)
        inverse = self._unpacked(torch.ones_like(like["weight"]), scales, torch.float32)
        codes = (values.float() / inverse).clamp(-_LARGEST, _LARGEST).to(like["weight"].dtype)
        return {**like, "weight": codes, name: scales}


class ModelOptFp8(Fp8):
    """FP8 as ModelOpt writes it: a scale per matrix, or with MXFP8 a power of two per 32 numbers of a row."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        groups = MX_GROUP if str(settings["quant_algo"]).lower() == "mxfp8" else None
        check_modelopt(settings, ("fp8", "mxfp8"), 8, groups)
        super().__init__({"weight_block_size": groups and [1, groups]})


def _scales(parts: Mapping[str, Tensor]) -> str:
    """Return the name of the part with the scales."""
    return next(name for name in _SCALES if name in parts)
