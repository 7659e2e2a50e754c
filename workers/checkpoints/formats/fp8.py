"""FP8 with a scale per block, as DeepSeek-V3 is published (arXiv 2412.19437, Sec. 3.3.2), and most of DeepSeek-V4."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from moevolve.evaluators.errors import UserError
from moevolve.workers.checkpoints.formats.base import (
    Codec,
    PackedMatrix,
    blocks_largest,
    matrix_parts,
    multiplied,
    power_of_two,
    scaled_blocks,
)
from moevolve.workers.checkpoints.formats.fp4 import MX_GROUP, fp4_numbers, mxfp4_parts

_LARGEST = 448.0
"""Largest number of E4M3."""


_SCALES = ("weight_scale_inv", "scale")
"""Last names of the scales: DeepSeek-V3's, which most others have, too, and DeepSeek-V4's."""

_FOUR_BITS = (torch.int8, torch.uint8)
"""Dtypes of matrices with two numbers in a byte."""


class Fp8Blocks(Codec):
    """A matrix has `weight`, float8 [rows, columns], and `weight_scale_inv` or `scale`, one per block.

    Sides need not be multiples of a block's, as the 576 rows of DeepSeek-V3's `kv_a_proj_with_mqa`. DeepSeek-V4's
    experts are MXFP4 instead: `weight` int8 [rows, columns / 2], and scales [rows, columns / 32], powers of two.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        block = settings.get("weight_block_size")
        if not block:
            raise UserError("fp8 weights without weight_block_size aren't supported; use ones with block scales")
        self._block = int(block[0]), int(block[1])
        # DeepSeek-V3.1's scales are powers of two, although their dtype is float32.
        self._powers = settings.get("scale_fmt") == "ue8m0"

    def matrices(self, names: Collection[str]) -> Iterator[PackedMatrix]:
        for module, parts in matrix_parts(names, "weight_scale_inv", ["weight"]):
            yield PackedMatrix(f"{module}.weight", parts, self)
        for module, parts in matrix_parts(names, "scale", optional=["weight"]):
            if "weight" in parts:  # other modules may have a parameter of this name
                yield PackedMatrix(f"{module}.weight", parts, self)

    def unpack(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        weight, scales = parts["weight"], parts[_scales(parts)]
        if weight.dtype in _FOUR_BITS:
            return scaled_blocks(fp4_numbers(weight), scales, (1, MX_GROUP), dtype)
        return scaled_blocks(weight, scales, self._block, dtype)

    def pack(self, values: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        name = _scales(like)
        kept = like[name].dtype
        if like["weight"].dtype in _FOUR_BITS:
            codes, exponents = mxfp4_parts(values)
            return {**like, "weight": codes.view(like["weight"].dtype), name: exponents.view(kept)}
        # A block's largest number becomes 448, or more than 224 where scales are powers of two.
        scales = blocks_largest(values.float(), self._block) / _LARGEST
        if self._powers or kept == torch.float8_e8m0fnu:
            scales = power_of_two(scales)
        scales = torch.where(scales > 0, scales, 1.0).to(kept)
        inverse = scaled_blocks(torch.ones_like(values), scales, self._block, torch.float32)
        codes = (values.float() / inverse).clamp(-_LARGEST, _LARGEST).to(like["weight"].dtype)
        return {**like, "weight": codes, name: scales}

    def scaled(self, parts: Mapping[str, Tensor], factor: float) -> dict[str, Tensor] | None:
        name = _scales(parts)
        if self._powers or parts[name].dtype == torch.float8_e8m0fnu:
            return None
        return multiplied(parts, name, factor)


def _scales(parts: Mapping[str, Tensor]) -> str:
    """Name of the part with the scales."""
    return next(name for name in _SCALES if name in parts)
