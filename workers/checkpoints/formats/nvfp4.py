"""NVFP4 as ModelOpt writes it: four-bit numbers with an FP8 scale per 16 of a row and a float32 scale per matrix."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from moevolve.evaluators.errors import UserError
from moevolve.workers.checkpoints.formats.base import (
    PackedMatrix,
    Rounding,
    blocks_largest,
    matrix_parts,
    scaled_blocks,
)
from moevolve.workers.checkpoints.formats.fp4 import LARGEST, fp4_bytes

GROUP = 16
"""Numbers of a row that share a scale."""
ROUNDING = Rounding(0.18, (1, GROUP))
"""A sixth, half the step between 4 and 6, and a sixteenth of that for the rounding of the scale."""
_LARGEST_SCALE = 448.0
"""Largest number of E4M3."""


class ModelOptNvfp4:
    """See `PackedFormat`. A matrix has `weight`, uint8 [rows, columns / 2], `weight_scale` and `weight_scale_2`."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        algorithm = settings.get("quant_algo")
        if algorithm != "NVFP4":
            raise UserError(f"modelopt weights quantised by {algorithm} aren't supported; use an NVFP4 checkpoint")

    plain = False
    rounding = ROUNDING

    def matrices(self, names: Collection[str]) -> Iterator[PackedMatrix]:
        """See `PackedFormat`."""
        for module, parts in matrix_parts(names, "weight_scale_2", ["weight", "weight_scale"], ["input_scale"]):
            yield PackedMatrix(f"{module}.weight", parts, self)

    def unpack(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """See `Codec`."""
        from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8

        rows, half = parts["weight"].shape
        values = unpack_fp4_from_uint8(parts["weight"], rows, 2 * half, torch.float32)
        scales = parts["weight_scale"].float() * parts["weight_scale_2"].float()
        return scaled_blocks(values, scales, (1, GROUP), dtype)

    def pack(self, values: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See `Codec`."""
        scales, second = nvfp4_scales(values, like["weight_scale_2"])
        inverse = scaled_blocks(torch.ones_like(values), scales.float() * second.float(), (1, GROUP), torch.float32)
        codes = fp4_bytes(values.float() / inverse)
        return {**like, "weight": codes, "weight_scale": scales, "weight_scale_2": second}

    def scaled(self, parts: Mapping[str, Tensor], factor: float) -> dict[str, Tensor] | None:
        """See `Codec`."""
        second = parts["weight_scale_2"]
        return {**parts, "weight_scale_2": (second.double() * factor).to(second.dtype)}


def nvfp4_scales(values: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Choose the scales of a matrix, so that the largest number of a group becomes 6 before the scale is rounded.

    Args:
        values: Matrix, [rows, columns].
        second: Scale of a matrix that this one replaces, by which all numbers are multiplied. It stays if the scales
            of groups fit E4M3 with it, because servers fuse matrices that have the same one.

    Returns:
        Scales of groups, float8 [rows, columns / 16], and the scale of the matrix in the shape of `second`.
    """
    groups = blocks_largest(values.float(), (1, GROUP)) / LARGEST
    largest = float((groups / second.float()).amax())
    if not _LARGEST_SCALE / 16 <= largest <= _LARGEST_SCALE and float(groups.amax()) > 0:
        second = torch.full_like(second, float(groups.amax()) / _LARGEST_SCALE)
    # A scale that is rounded to 0 would lose its group.
    return (groups / second.float()).clamp(2.0**-9, _LARGEST_SCALE).to(torch.float8_e4m3fn), second
