"""NVFP4 as ModelOpt writes it: four-bit numbers with an FP8 scale per 16 of a row and a float32 scale per matrix."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from moevolve.evaluators.errors import UserError
from moevolve.workers.checkpoints.formats.base import PackedMatrix, matrix_parts, scaled_blocks

GROUP = 16
"""Numbers of a row that share a scale."""


class ModelOptNvfp4:
    """See `PackedFormat`. A matrix has `weight`, uint8 [rows, columns / 2], `weight_scale` and `weight_scale_2`."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        algorithm = settings.get("quant_algo")
        if algorithm != "NVFP4":
            raise UserError(f"modelopt weights quantised by {algorithm} aren't supported; use an NVFP4 checkpoint")

    def matrices(self, names: Collection[str]) -> Iterator[PackedMatrix]:
        """See `PackedFormat`."""
        for module, parts in matrix_parts(names, "weight_scale_2", ["weight", "weight_scale"], ["input_scale"]):
            yield PackedMatrix(f"{module}.weight", parts, _unpack)


def _unpack(parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8

    rows, half = parts["weight"].shape
    values = unpack_fp4_from_uint8(parts["weight"], rows, 2 * half, torch.float32)
    scales = parts["weight_scale"].float() * parts["weight_scale_2"].float()
    return scaled_blocks(values, scales, (1, GROUP), dtype)
