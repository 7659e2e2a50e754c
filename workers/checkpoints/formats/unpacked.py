"""A quantised checkpoint seen as an unquantised one: tensors are unpacked when they are read, one at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import EllipsisType

import torch
from torch import Tensor

from moevolve.evaluators.errors import UserError
from moevolve.workers.checkpoints.formats.base import Codec, PackedFormat, Plain
from moevolve.workers.checkpoints.headers import StoredTensor
from moevolve.workers.checkpoints.shards import read_tensor


@dataclass(frozen=True, slots=True)
class UnpackedTensor:
    """A tensor that is read from its files, and unpacked, on `tensor[...]`, as a slice of the safetensors library is.

    Of fused experts, `tensor[first:last]` reads some.

    Attributes:
        name: Name in an unquantised checkpoint.
        parts: Stored tensors by last name.
        dtype: Dtype that quantised tensors are unpacked to; plain ones keep theirs.
    """

    name: str
    parts: Mapping[str, StoredTensor]
    codec: Codec = field(repr=False)
    dtype: torch.dtype

    def __getitem__(self, which: EllipsisType | slice) -> Tensor:
        parts = {last: read_tensor(stored)[which] for last, stored in self.parts.items()}
        if self.codec.plain:
            return next(iter(parts.values()))
        try:
            return self.codec.unpack(parts, self.dtype)
        except (ValueError, RuntimeError, IndexError) as error:
            file = next(iter(self.parts.values())).file
            raise UserError(f"{file}: tensor {self.name} can't be unpacked: {error}; fetch the file again") from error


def unpacked_tensors(
    stored: Mapping[str, StoredTensor], packed: PackedFormat, dtype: torch.dtype
) -> dict[str, UnpackedTensor]:
    """Return a quantised checkpoint's tensors by the names that they have in an unquantised one.

    Raises:
        UserError: A part of a quantised tensor is missing.
    """
    found, used = {}, set()
    for matrix in packed.matrices(stored.keys()):
        parts = {last: stored[name] for last, name in matrix.parts.items()}
        found[matrix.name] = UnpackedTensor(matrix.name, parts, matrix.codec, dtype)
        used |= set(matrix.parts.values())
    plain = plain_tensors({name: tensor for name, tensor in stored.items() if name not in used})
    return plain | found


def plain_tensors(stored: Mapping[str, StoredTensor]) -> dict[str, UnpackedTensor]:
    """Return tensors that aren't quantised, by name."""
    return {name: UnpackedTensor(name, {"": tensor}, Plain(), torch.float32) for name, tensor in stored.items()}
