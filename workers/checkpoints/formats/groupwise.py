"""AWQ (arXiv 2306.00978) and GPTQ (arXiv 2210.17323): integers of a few bits, with a scale and a zero point per group.

Both store the transposed matrix, [inputs, outputs]. Their codes are unpacked by the library of compressed-tensors.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from moevolve.evaluators.errors import UserError
from moevolve.workers.checkpoints.formats.base import Codec, PackedMatrix, packed_matrices

# Which of eight neighbouring outputs each four bits of a word have, from the lowest ones.
_AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


class Awq(Codec):
    """A matrix has `qweight`, `qzeros` and `scales`, in the order that AutoAWQ's GEMM reads."""

    _others: tuple[str, ...] = ("qzeros", "scales")

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._symmetric = not settings.get("zero_point", True)
        bits, version = settings.get("bits", 4), str(settings.get("version", "gemm")).lower()
        if bits != 4 or version != "gemm":
            raise UserError(f"awq weights of {bits} bits in version {version} aren't supported; use 4 bits and gemm")

    def matrices(self, names: Collection[str]) -> Iterator[PackedMatrix]:
        return packed_matrices(self, names, "qweight", self._others)

    def unpack(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        codes, zeros, group_of = self._codes(parts)
        return ((codes - zeros[group_of]) * parts["scales"].float()[group_of]).T.to(dtype)

    def pack(self, values: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        _, zeros, group_of = self._codes(like)
        codes, zeros, scales = _rounded(values, group_of, zeros, like["scales"], range(16), self._symmetric)
        return {**like, "qweight": _awq_words(codes), "qzeros": _awq_words(zeros), "scales": scales}

    def _codes(self, parts: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Codes [inputs, outputs] and zero points [groups, outputs], float32, and the group of every input."""
        from compressed_tensors.entrypoints.convert.converters import AutoAWQConverter

        codes, zeros = AutoAWQConverter.reverse_awq_order(
            *AutoAWQConverter.unpack_awq(parts["qweight"], parts["qzeros"], 4), 4
        )
        group_of = torch.arange(len(codes)) // (len(codes) // len(zeros))
        # Shifting a negative int32 fills its upper bits with ones.
        return (codes & 15).float(), (zeros & 15).float(), group_of


class Gptq(Awq):
    """A matrix has `qweight`, `qzeros`, `scales` and the group of every input, `g_idx`."""

    _others = ("qzeros", "scales", "g_idx")

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._bits = int(settings.get("bits", 4))
        if self._bits not in (2, 4, 8):
            raise UserError(f"gptq weights of {self._bits} bits aren't supported; use 2, 4 or 8 bits")
        # The first version of the format stores zero points less one.
        self._less = 0 if settings.get("checkpoint_format") == "gptq_v2" else 1
        self._symmetric = bool(settings.get("sym", True))

    def pack(self, values: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

        _, zeros, group_of = self._codes(like)
        allowed = range(self._less, 2**self._bits)  # a zero point of 0 isn't the same to all kernels if stored as -1
        codes, zeros, scales = _rounded(values, group_of, zeros, like["scales"], allowed, self._symmetric)
        half = 2 ** (self._bits - 1)  # the library packs signed integers
        packed = pack_to_int32((codes - half).to(torch.int8), self._bits, packed_dim=0)
        points = pack_to_int32((zeros - self._less - half).to(torch.int8), self._bits, packed_dim=1)
        return {**like, "qweight": packed, "qzeros": points, "scales": scales}

    def _codes(self, parts: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

        scales, group_of, half = parts["scales"], parts["g_idx"].long(), 2 ** (self._bits - 1)
        shape = torch.Size((len(group_of), scales.shape[1]))
        codes = unpack_from_int32(parts["qweight"], self._bits, shape, packed_dim=0).float() + half
        zeros = unpack_from_int32(parts["qzeros"], self._bits, scales.shape, packed_dim=1).float() + half
        return codes, zeros + self._less, group_of


def _rounded(
    values: Tensor, group_of: Tensor, zeros: Tensor, scales: Tensor, allowed: range, symmetric: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Round a matrix to the nearest numbers of the format.

    A group keeps its former scale and zero point if its largest error is no larger with them. Otherwise its codes range
    from its smallest number, or 0, to its largest one. Codes go from 0 to the last `allowed` zero point. Returns codes
    [inputs, outputs], zero points [groups, outputs] and scales, for a matrix [outputs, inputs].
    """
    exact, last = values.float().T.contiguous(), allowed[-1]
    index = group_of[:, None].expand_as(exact)
    # Groups without inputs, and the side of 0 on which a group has no numbers, have the extreme 0.
    highest = torch.zeros(scales.shape).scatter_reduce(0, index, exact, "amax")
    lowest = torch.zeros(scales.shape).scatter_reduce(0, index, exact, "amin")
    if symmetric:
        steps = torch.maximum(highest / (last - zeros).clamp_min(1), -lowest / zeros.clamp_min(1))
    else:
        steps = (highest - lowest) / last
    steps = torch.where(steps > 0, steps, scales.float()).to(scales.dtype)
    points = zeros  # of symmetric formats kernels expect them in the middle
    if not symmetric:
        nearest = (-lowest / steps.float()).nan_to_num(0.0, 0.0, 0.0).round()
        points = nearest.clamp(allowed[0], last)

    def coded(scales: Tensor, zeros: Tensor) -> tuple[Tensor, Tensor]:
        steps = scales.float()[group_of]
        codes = ((exact / steps).nan_to_num(0.0, 0.0, 0.0).round() + zeros[group_of]).clamp(0, last)
        error = (exact - (codes - zeros[group_of]) * steps).abs()
        return codes, torch.zeros(scales.shape).scatter_reduce(0, index, error, "amax")

    before, error_before = coded(scales, zeros)
    after, error_after = coded(steps, points)
    kept = error_before <= error_after
    return (
        torch.where(kept[group_of], before, after),
        torch.where(kept, zeros, points),
        torch.where(kept, scales, steps),
    )


def _awq_words(codes: Tensor) -> Tensor:
    """Pack codes [rows, columns] into words of eight neighbours in a row, int32 [rows, columns / 8]."""
    grouped = codes.to(torch.int64).unflatten(1, (-1, 8))[..., _AWQ_ORDER]
    words = (grouped << torch.arange(0, 32, 4)).sum(-1)
    return torch.where(words < 1 << 31, words, words - (1 << 32)).to(torch.int32)
