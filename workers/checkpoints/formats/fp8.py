"""FP8 with a scale per block, as DeepSeek-V3 and -V4 are published, or per matrix, as Mistral 4.

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
from moevolve.workers.checkpoints.formats.fp4 import MX_GROUP, fp4_numbers, mxfp4_parts

# Largest number of E4M3.
_LARGEST = 448.0


# Last names of the scales: DeepSeek-V3's, which most others have, too, and DeepSeek-V4's.
_SCALES = ("weight_scale_inv", "scale")
# Dtypes of scales that are powers of two, the second one of their biased exponents as bytes.
_POWERS = (torch.float8_e8m0fnu, torch.uint8)
# Dtypes of matrices with two numbers in a byte.
_FOUR_BITS = (torch.int8, torch.uint8)


class Fp8(Codec):
    """A matrix has `weight`, float8 [rows, columns], and `weight_scale_inv` or `scale`, one per block or one in all.

    Sides need not be multiples of a block's, as the 576 rows of DeepSeek-V3's `kv_a_proj_with_mqa`. Fused experts have
    a further dimension first, and their scales are named after them, as `gate_up_proj_scale_inv`. DeepSeek-V4's experts
    are MXFP4 instead: `weight` int8 [rows, columns / 2], and scales [rows, columns / 32], powers of two.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        block = settings.get("weight_block_size")
        self._block = None if block is None else (int(block[0]), int(block[1]))
        # DeepSeek-V3.1's scales are powers of two, although their dtype is float32.
        self._powers = settings.get("scale_fmt") == "ue8m0"

    def matrices(self, names: Collection[str]) -> Iterator[PackedMatrix]:
        yield from packed_matrices(self, names, "weight_scale_inv", ["weight"], ["activation_scale"])
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
        if weight.dtype in _FOUR_BITS:
            return scaled_blocks(fp4_numbers(weight), scales, (1, MX_GROUP), dtype)
        if self._block is None:
            if scales.numel() != 1:
                raise ValueError(f"there are {list(scales.shape)} scales, and without weight_block_size it needs one")
            return (weight.float() * scales.float()).to(dtype)
        return scaled_blocks(weight, scales, self._block, dtype)

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
        scales = blocks_largest(values.float(), self._block).reshape(like[name].shape) / _LARGEST
        if self._powers or kept in _POWERS:
            scales = power_of_two(scales)
        scales = torch.where(scales > 0, scales, 1.0)
        scales = scales.to(torch.float8_e8m0fnu).view(kept) if kept in _POWERS else scales.to(kept)
        inverse = self._unpacked(torch.ones_like(values), scales, torch.float32)
        codes = (values.float() / inverse).clamp(-_LARGEST, _LARGEST).to(like["weight"].dtype)
        return {**like, "weight": codes, name: scales}


def _scales(parts: Mapping[str, Tensor]) -> str:
    """Return the name of the part with the scales."""
    return next(name for name in _SCALES if name in parts)
