"""FP8 with a scale per block, as DeepSeek-V3 is published (arXiv 2412.19437, Sec. 3.3.2)."""

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

_LARGEST = 448.0
"""Largest number of E4M3."""


class Fp8Blocks(Codec):
    """A matrix has `weight`, float8 [rows, columns], and `weight_scale_inv`, one per block.

    Sides need not be multiples of a block's, as the 576 rows of DeepSeek-V3's `kv_a_proj_with_mqa`.
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

    def unpack(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        return scaled_blocks(parts["weight"], parts["weight_scale_inv"], self._block, dtype)

    def pack(self, values: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        # A block's largest number becomes 448, or more than 224 where scales are powers of two.
        kept = like["weight_scale_inv"].dtype
        scales = blocks_largest(values.float(), self._block) / _LARGEST
        if self._powers or kept == torch.float8_e8m0fnu:
            scales = power_of_two(scales)
        scales = torch.where(scales > 0, scales, 1.0).to(kept)
        inverse = scaled_blocks(torch.ones_like(values), scales, self._block, torch.float32)
        codes = (values.float() / inverse).clamp(-_LARGEST, _LARGEST).to(like["weight"].dtype)
        return {**like, "weight": codes, "weight_scale_inv": scales}

    def scaled(self, parts: Mapping[str, Tensor], factor: float) -> dict[str, Tensor] | None:
        scales = parts["weight_scale_inv"]
        if self._powers or scales.dtype == torch.float8_e8m0fnu:
            return None
        return multiplied(parts, "weight_scale_inv", factor)
