"""AWQ (arXiv 2306.00978) and GPTQ (arXiv 2210.17323): integers of a few bits, with a scale and a zero point per group.

Both store the transposed matrix, [inputs, outputs]. Their codes are unpacked by the library of compressed-tensors.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from moevolve.evaluators.errors import UserError
from moevolve.workers.checkpoints.formats.base import PackedMatrix, Rounding, matrix_parts


class Awq:
    """See `PackedFormat`. A matrix has `qweight`, `qzeros` and `scales`, in the order that AutoAWQ's GEMM reads."""

    plain = False
    rounding = Rounding(0.0)

    def __init__(self, settings: Mapping[str, Any]) -> None:
        bits, version = settings.get("bits", 4), str(settings.get("version", "gemm")).lower()
        if bits != 4 or version != "gemm":
            raise UserError(f"awq weights of {bits} bits in version {version} aren't supported; use 4 bits and gemm")

    def matrices(self, names: Collection[str]) -> Iterator[PackedMatrix]:
        """See `PackedFormat`."""
        for module, parts in matrix_parts(names, "qweight", ["qzeros", "scales"]):
            yield PackedMatrix(f"{module}.weight", parts, self)

    def unpack(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """See `Codec`."""
        from compressed_tensors.entrypoints.convert.converters import AutoAWQConverter

        codes, zeros = AutoAWQConverter.reverse_awq_order(
            *AutoAWQConverter.unpack_awq(parts["qweight"], parts["qzeros"], 4), 4
        )
        group = codes.shape[0] // zeros.shape[0]
        # Shifting a negative int32 fills its upper bits with ones.
        shifted = (codes & 15) - (zeros & 15).repeat_interleave(group, 0)
        return (shifted.float() * parts["scales"].float().repeat_interleave(group, 0)).T.to(dtype)

    def pack(self, values: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See `Codec`; not supported."""
        raise UserError("AWQ weights can't be written anew; export the individual with --form stock")

    def scaled(self, parts: Mapping[str, Tensor], factor: float) -> dict[str, Tensor] | None:
        """See `Codec`. Scales are float16 as a rule."""
        return {**parts, "scales": (parts["scales"].double() * factor).to(parts["scales"].dtype)}


class Gptq:
    """See `PackedFormat`. A matrix has `qweight`, `qzeros`, `scales` and the group of every input, `g_idx`."""

    plain = False
    rounding = Rounding(0.0)

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._bits = int(settings.get("bits", 4))
        if self._bits not in (2, 4, 8):
            raise UserError(f"gptq weights of {self._bits} bits aren't supported; use 2, 4 or 8 bits")
        # The first version of the format stores zero points less one.
        self._less = 0 if settings.get("checkpoint_format") == "gptq_v2" else 1

    def matrices(self, names: Collection[str]) -> Iterator[PackedMatrix]:
        """See `PackedFormat`."""
        for module, parts in matrix_parts(names, "qweight", ["qzeros", "scales", "g_idx"]):
            yield PackedMatrix(f"{module}.weight", parts, self)

    def unpack(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """See `Codec`."""
        from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

        scales, group_of = parts["scales"].float(), parts["g_idx"].long()
        shape = torch.Size((len(group_of), scales.shape[1]))
        # Both are unpacked less 2^(bits - 1), which their difference cancels.
        codes = unpack_from_int32(parts["qweight"], self._bits, shape, packed_dim=0)
        zeros = unpack_from_int32(parts["qzeros"], self._bits, scales.shape, packed_dim=1).float() + self._less
        return ((codes.float() - zeros[group_of]) * scales[group_of]).T.to(dtype)

    def pack(self, values: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See `Codec`; not supported."""
        raise UserError("GPTQ weights can't be written anew; export the individual with --form stock")

    def scaled(self, parts: Mapping[str, Tensor], factor: float) -> dict[str, Tensor] | None:
        """See `Codec`. Scales are float16 as a rule."""
        return {**parts, "scales": (parts["scales"].double() * factor).to(parts["scales"].dtype)}
