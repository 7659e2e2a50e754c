"""FP8 with a scale per block, as DeepSeek-V3 is published (arXiv 2412.19437, Sec. 3.3.2)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from moevolve.evaluators.errors import UserError
from moevolve.workers.checkpoints.formats.base import PackedMatrix, matrix_parts, scaled_blocks


class Fp8Blocks:
    """See `PackedFormat`. A matrix has `weight`, float8 [rows, columns], and `weight_scale_inv`, one per block.

    Sides need not be multiples of a block's, as the 576 rows of DeepSeek-V3's `kv_a_proj_with_mqa`.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        block = settings.get("weight_block_size")
        if not block:
            raise UserError("fp8 weights without weight_block_size aren't supported; use ones with block scales")
        self._block = int(block[0]), int(block[1])

    def matrices(self, names: Collection[str]) -> Iterator[PackedMatrix]:
        """See `PackedFormat`."""
        for module, parts in matrix_parts(names, "weight_scale_inv", ["weight"]):
            yield PackedMatrix(f"{module}.weight", parts, self._unpack)

    def _unpack(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        return scaled_blocks(parts["weight"], parts["weight_scale_inv"], self._block, dtype)
