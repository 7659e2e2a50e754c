"""The interface of a format of quantised weights: which tensors make up a matrix, and what numbers they stand for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from moevolve.evaluators.errors import UserError

Unpack = Callable[[Mapping[str, Tensor], torch.dtype], Tensor]
"""Computes a matrix, or a layer's fused experts, in a given dtype from its parts by their last names."""


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A quantised matrix, or a layer's fused experts, of a checkpoint.

    Attributes:
        name: Name of the tensor in an unquantised checkpoint.
        parts: Names of the tensors that make it up, by their last names, for example `weight_scale_inv`.
        unpack: See `Unpack`.
    """

    name: str
    parts: Mapping[str, str]
    unpack: Unpack = field(repr=False)


class PackedFormat(Protocol):
    """A format of quantised weights, constructed from the `quantization_config` of a checkpoint's config.json.

    Constructing it raises a `UserError` if this kind of the format can't be unpacked.
    """

    def matrices(self, names: Collection[str]) -> Iterator[PackedMatrix]:
        """Find the quantised matrices among the names of a checkpoint's tensors.

        Raises:
            UserError: A part of a matrix is missing.
        """
        ...


def matrix_parts(
    names: Collection[str], root: str, required: Collection[str] = (), optional: Collection[str] = ()
) -> Iterator[tuple[str, dict[str, str]]]:
    """Find the modules that have a tensor `root`, and the parts of their matrices.

    Args:
        names: Names of all tensors, as a set or the keys of a dict.
        root: Last name of the tensor that every such module has.
        required: Last names of further tensors that each must have.
        optional: Last names of further tensors that it may have.

    Yields:
        The module's name and its tensors' names by last name.

    Raises:
        UserError: A required tensor is missing.
    """
    for name in names:
        module, _, last = name.rpartition(".")
        if last != root:
            continue
        parts = {part: f"{module}.{part}" for part in (root, *required, *optional) if f"{module}.{part}" in names}
        missing = [part for part in required if part not in parts]
        if missing:
            raise UserError(f"tensor {name} is quantised, and {module}.{missing[0]} is missing; fetch the files again")
        yield module, parts


def scaled_blocks(values: Tensor, scales: Tensor, block: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Multiply blocks of a matrix by their scales, in float32.

    Args:
        values: Quantised numbers, [rows, columns].
        scales: Scale of every block, [ceil(rows / block rows), ceil(columns / block columns)]; the last blocks may be
            smaller than `block`.
        block: Rows and columns of a block.
        dtype: Dtype of the result.

    Raises:
        ValueError: There is another number of scales.
    """
    rows, columns = values.shape
    wanted = [-(-rows // block[0]), -(-columns // block[1])]
    if list(scales.shape) != wanted:
        raise ValueError(f"there are {list(scales.shape)} scales, and its shape {[rows, columns]} needs {wanted}")
    by_row = scales.float().repeat_interleave(block[0], 0)[:rows]
    return (values.float() * by_row.repeat_interleave(block[1], 1)[:, :columns]).to(dtype)
