"""The types of a GGUF file's tensors: unpacked by the gguf library, and packed where it can."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from moevolve.evaluators.errors import UserError
from moevolve.workers.checkpoints.formats.base import SCALE_FLOOR, Codec, Rounding

INSTEAD = "Q8_0"
"""Type of changed tensors whose own type the library only unpacks. Its blocks of 32 divide the rows of all others."""

_ROUNDING = {"Q8_0": 1 / 254, "Q4_0": 1 / 8, "Q4_1": 1 / 15, "Q5_0": 1 / 16, "Q5_1": 1 / 31, "MXFP4": 1 / 4}
"""Largest error by type that can be packed, divided by the block's largest absolute value.

Scales of Q4_0 and Q5_0 give the largest number the code -8 or -16, so that its negative is cut off a step earlier.
"""
_BLOCK = 32
"""Numbers of a row that share a scale, in all types that can be packed."""

SCALES = {
    **dict.fromkeys(("Q8_0", "Q4_0", "Q5_0", "IQ4_NL", "IQ4_XS", "IQ3_XXS", "IQ3_S"), (0, 2)),
    **dict.fromkeys(("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ1_S"), (0, 2)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 4)),
    "Q2_K": (80, 84),
    "Q3_K": (108, 110),
    "Q6_K": (208, 210),
}
"""First byte and end, within a block, of the float16 numbers that all of its numbers are multiplied by.

Source: the structures of https://github.com/ggml-org/llama.cpp/blob/master/ggml/src/ggml-common.h.
"""


class GgufType(Codec):
    """A type such as `Q4_K`. A tensor has one part, its bytes: uint8 [..., bytes of a row].

    Attributes:
        packs: Whether there is a packer for the type.
    """

    def __init__(self, kind: str) -> None:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        self.kind = kind
        self._type = GGMLQuantizationType[kind]
        self._bytes = GGML_QUANT_SIZES[self._type][1]
        self.plain = kind in ("F32", "F16", "BF16")
        self.packs = self.plain or kind in _ROUNDING
        self.rounding = Rounding(_ROUNDING.get(kind, 0.0) + 2**-9, (1, _BLOCK), SCALE_FLOOR)

    def unpack(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        from gguf import dequantize

        (data,) = parts.values()
        return torch.from_numpy(np.array(dequantize(data.contiguous().numpy(), self._type), np.float32)).to(dtype)

    def pack(self, values: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        from gguf import quantize

        if not self.packs:
            raise UserError(f"GGUF tensors of type {self.kind} can't be written anew; write them as {INSTEAD}")
        exact = values.float()
        if self.plain:
            # Numbers that are the same in the dtype of `values` keep their bits.
            before = self.unpack(like, torch.float32)
            exact = torch.where(before.to(values.dtype) == values, before, exact)
        packed = quantize(exact.contiguous().numpy(), self._type)
        return {"": torch.from_numpy(np.ascontiguousarray(packed).view(np.uint8))}

    def scaled(self, parts: Mapping[str, Tensor], factor: float) -> dict[str, Tensor] | None:
        if self.kind not in SCALES:
            return None
        (data,) = parts.values()
        first, end = SCALES[self.kind]
        blocks = data.numpy().reshape(-1, self._bytes).copy()
        scales = blocks[:, first:end].copy().view(np.float16).astype(np.float64) * factor
        blocks[:, first:end] = scales.astype(np.float16).view(np.uint8)
        return {"": torch.from_numpy(blocks).reshape(data.shape)}
