"""MXFP4 as GPT-OSS is published: blocks of 32 four-bit numbers that share an exponent (OCP Microscaling, v1.0)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from moevolve.evaluators.errors import UserError
from moevolve.workers.checkpoints.formats.base import PackedMatrix, Rounding, power_of_two
from moevolve.workers.checkpoints.formats.fp4 import fp4_bytes

GROUP = 32
"""Numbers of a row that share a scale."""


class GptOssMxfp4:
    """See `PackedFormat`. Fused experts have `_blocks`, uint8 [n, rows, blocks, 16], and `_scales` [n, rows, blocks].

    The unpacked tensor is [n, columns, rows], as the family multiplies from the right.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        pass  # the format has no settings

    plain = False
    rounding = Rounding(1 / 4, (GROUP, 1))

    def matrices(self, names: Collection[str]) -> Iterator[PackedMatrix]:
        """See `PackedFormat`."""
        for name in names:
            if not name.endswith("_blocks"):
                continue
            plain = name.removesuffix("_blocks")
            if f"{plain}_scales" not in names:
                raise UserError(f"tensor {name} is quantised, and {plain}_scales is missing; fetch the files again")
            yield PackedMatrix(plain, {"blocks": name, "scales": f"{plain}_scales"}, self)

    def unpack(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """See `Codec`."""
        from transformers.integrations.mxfp4 import convert_moe_packed_tensors

        # All experts at once take 64-bit indices for every second value: 2.1 GB in a layer of GPT-OSS-20B.
        blocks, scales = parts["blocks"], parts["scales"]
        first = convert_moe_packed_tensors(blocks[:1], scales[:1], dtype=dtype)
        unpacked = first.new_empty((len(blocks), *first.shape[1:]))
        unpacked[:1] = first
        for expert in range(1, len(blocks)):
            one = slice(expert, expert + 1)
            unpacked[one] = convert_moe_packed_tensors(blocks[one], scales[one], dtype=dtype)
        return unpacked

    def pack(self, values: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See `Codec`."""
        blocks = values.float().mT.unflatten(-1, (-1, GROUP))
        scales = mx_scales(blocks.abs().amax(-1))
        exponents = torch.frexp(scales).exponent - 1 + 127
        return {"blocks": fp4_bytes(blocks / scales[..., None]), "scales": exponents.to(torch.uint8)}

    def scaled(self, parts: Mapping[str, Tensor], factor: float) -> dict[str, Tensor] | None:
        """See `Codec`."""
        return None


def mx_scales(largest: Tensor) -> Tensor:
    """Return the scales of blocks by their largest absolute values: the least power of two that no number exceeds 7 of.

    Numbers up to 7 are rounded to 6, as are those from 5 on, so none is more than half a step away. The exponent that
    the specification proposes also has numbers up to 8, which it cuts off at 6.
    """
    return power_of_two(largest / 7).clamp(2.0**-126, 2.0**126)
