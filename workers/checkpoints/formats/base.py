"""The interface of a format of quantised weights: which tensors make up a matrix, and what numbers they stand for."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from moevolve.evaluators.errors import UserError


class Codec:
    """How the numbers of a matrix, or of a layer's fused experts, are stored in tensors, its parts by last name.

    Attributes:
        plain: Whether the numbers are stored one by one as they are, so that writing them anew quantises nothing.
    """

    plain = False

    def unpack(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """Compute the matrix in a given dtype."""
        raise NotImplementedError

    def pack(self, values: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Round other numbers to the nearest that the format has, with scales from the largest ones.

        Values have the shape that `unpack` gives. What they don't determine, such as scales of activations, is taken
        from `like`, the parts of a matrix of this shape, whose names, shapes and dtypes the result has. Raises a
        `UserError` if this kind of the format has no packer.
        """
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A quantised matrix, or a layer's fused experts, of a checkpoint.

    Attributes:
        name: Name of the tensor in an unquantised checkpoint.
        parts: Names of the tensors that make it up, by their last names, for example `weight_scale_inv`.
    """

    name: str
    parts: Mapping[str, str]
    codec: Codec = field(repr=False)


class Plain(Codec):
    """Numbers in a dtype of torch, in one part."""

    plain = True

    def unpack(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        return next(iter(parts.values())).to(dtype)

    def pack(self, values: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        ((name, before),) = like.items()
        # Numbers that are the same in the dtype of `values` keep their bits.
        return {name: torch.where(before.to(values.dtype) == values, before, values.to(before.dtype))}


class PackedFormat(Protocol):
    """A format of quantised weights, constructed from the `quantization_config` of a checkpoint's config.json.

    Both raise a `UserError`: this kind of the format can't be unpacked, or a part of a matrix is missing.
    """

    def matrices(self, names: Collection[str]) -> Iterator[PackedMatrix]:
        """Find the quantised matrices among the names of a checkpoint's tensors."""
        ...


def packed_matrices(
    codec: Codec, names: Collection[str], root: str, required: Collection[str] = (), optional: Collection[str] = ()
) -> Iterator[PackedMatrix]:
    """Find the weights of modules that have a tensor `root`, which only modules with a quantised matrix have.

    Args:
        codec: Codec of the matrices.
        names: Names of all tensors, as a set or the keys of a dict.
        root: Last name of a tensor of every matrix.
        required: Last names of further tensors that each must have; a `UserError` names the first that is missing.
        optional: Last names of further tensors that it may have.
    """
    for name in names:
        module, _, last = name.rpartition(".")
        if last == root:
            yield packed_matrix(codec, names, module, (root, *required), optional)


def packed_matrix(
    codec: Codec, names: Collection[str], module: str, required: Collection[str], optional: Collection[str] = ()
) -> PackedMatrix:
    """Return the weight of a quantised module; see `packed_matrices`."""
    parts = {part: f"{module}.{part}" for part in (*required, *optional) if f"{module}.{part}" in names}
    missing = [part for part in required if part not in parts]
    if missing:
        there = next(iter(parts.values()))
        raise UserError(f"tensor {there} is quantised, and {module}.{missing[0]} is missing; fetch the files again")
    return PackedMatrix(f"{module}.weight", parts, codec)


def scaled_blocks(values: Tensor, scales: Tensor, block: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Multiply blocks of a matrix [rows, columns] by their scales, in float32.

    There is a scale for every `block` (rows, columns): [ceil(rows / block rows), ceil(columns / block columns)]. Raises
    a `ValueError` for another number of scales.
    """
    rows, columns = values.shape
    wanted = [-(-rows // block[0]), -(-columns // block[1])]
    if list(scales.shape) != wanted:
        raise ValueError(f"there are {list(scales.shape)} scales, and its shape {[rows, columns]} needs {wanted}")
    by_row = scales.float().repeat_interleave(block[0], 0)[:rows]
    return (values.float() * by_row.repeat_interleave(block[1], 1)[:, :columns]).to(dtype)


def blocks_largest(values: Tensor, block: tuple[int, int]) -> Tensor:
    """Return the largest absolute value of every block, [..., ceil(rows / block rows), ceil(columns / block columns)].

    The last blocks may be smaller.
    """
    rows, columns = values.shape[-2:]
    padded = torch.nn.functional.pad(values.abs(), (0, -columns % block[1], 0, -rows % block[0]))
    return padded.unflatten(-1, (-1, block[1])).amax(-1).unflatten(-2, (-1, block[0])).amax(-2)


def power_of_two(values: Tensor) -> Tensor:
    """Round positive numbers up to a power of two; zeros become 1."""
    mantissa, exponent = torch.frexp(values.double())
    return torch.ldexp(torch.ones_like(mantissa), exponent - (mantissa == 0.5).to(exponent.dtype)).float()
