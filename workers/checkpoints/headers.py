"""The tensors of a safetensors folder, known from the headers of its files alone."""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moevolve.evaluators.errors import UserError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

EXPERT = re.compile(r"(?P<block>.+\.experts)\.(?P<expert>\d+)(?P<rest>\..+)?")
"""Name of a routed expert, or of a tensor of it, in checkpoints that have experts one by one."""

_BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
    "F4": 4,
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
}
"""Bits per element of the dtypes of safetensors files."""

_CHUNK = 1 << 24


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file.

    Attributes:
        name: Name in the checkpoint.
        file: File that contains it.
        dtype: Dtype as the format spells it, for example `BF16` in safetensors and `Q4_K` in GGUF.
        shape: Sizes of the dimensions.
        start: Position of its first byte in the file.
        nbytes: Size in bytes.
    """

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int

    @property
    def alignment(self) -> int:
        """Bytes per element, at least 1."""
        return max(1, _BITS[self.dtype] // 8)

    def chunks(self, rows: tuple[int, ...] | None = None) -> Iterator[bytes]:
        """Read the tensor's bytes, at most 16 MiB at a time.

        Args:
            rows: Indices along the first dimension to read, in this order; None reads the whole tensor.
        """
        size = self.nbytes if rows is None else self.nbytes // self.shape[0]
        with self.file.open("rb") as stream:
            for row in (0,) if rows is None else rows:
                stream.seek(self.start + row * size)
                left = size
                while left:
                    chunk = stream.read(min(left, _CHUNK))
                    if not chunk:
                        raise UserError(f"{self.file} ended within tensor {self.name}; fetch the file again")
                    left -= len(chunk)
                    yield chunk


def stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Read the headers of a checkpoint's files; returns its tensors by name, file by file in order of position.

    Raises:
        UserError: A file is missing, ends early or has an invalid header, or the index and the files disagree.
    """
    index = directory / INDEX_FILE
    if not index.is_file():
        return {tensor.name: tensor for tensor in file_tensors(directory / SINGLE_FILE)}
    found: dict[str, StoredTensor] = {}
    weight_map = _weight_map(index)
    for name in sorted(set(weight_map.values())):
        if not (directory / name).is_file():
            raise UserError(f"{index} names {name}, and there is no such file; fetch it again")
        for tensor in file_tensors(directory / name):
            if tensor.name in found:
                raise UserError(
                    f"tensor {tensor.name} is both in {found[tensor.name].file} and in {tensor.file}; "
                    "remove the file that isn't the checkpoint's"
                )
            found[tensor.name] = tensor
    for name, file in weight_map.items():
        if name not in found or found[name].file.name != file:
            raise UserError(f"{index} says that tensor {name} is in {file}, and it isn't; fetch both files again")
    return found


def _weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        valid = isinstance(weight_map, dict) and all(isinstance(file, str) for file in weight_map.values())
    except (ValueError, KeyError, TypeError):
        valid = False
    if not valid:
        raise UserError(f"{index} has no valid weight_map; fetch the file again")
    return {str(name): file for name, file in weight_map.items()}


def file_tensors(file: Path) -> list[StoredTensor]:
    """Read the header of a safetensors file; returns its tensors in order of position.

    Raises:
        UserError: The file is missing, ends early or has an invalid header.
    """
    header, begin = read_header(file)
    size = file.stat().st_size
    tensors = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            first, last = entry["data_offsets"]
            dtype, shape = str(entry["dtype"]), tuple(int(side) for side in entry["shape"])
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"{file}: the entry of tensor {name} in its header is invalid; fetch it again") from error
        if dtype not in _BITS:
            raise UserError(f"{file}: tensor {name} is of dtype {dtype}, which is unknown here; update moevolve")
        if (last - first) * 8 != math.prod(shape) * _BITS[dtype]:
            raise UserError(
                f"{file}: tensor {name} takes {last - first} bytes, and its shape {list(shape)} of {dtype} takes "
                f"{math.prod(shape) * _BITS[dtype] // 8}; fetch the file again"
            )
        if begin + last > size:
            raise UserError(f"{file} ends early: tensor {name} goes up to byte {begin + last}, the file has {size}")
        tensors.append(StoredTensor(name, file, dtype, shape, begin + first, last - first))
    return sorted(tensors, key=lambda tensor: tensor.start)


def read_header(file: Path) -> tuple[dict[str, Any], int]:
    """Read the header of a safetensors file.

    Returns:
        The header, and the position of the first byte after it.

    Raises:
        UserError: The file is missing, or has no valid header.
    """
    try:
        with file.open("rb") as stream:
            size = struct.unpack("<Q", stream.read(8))[0]
            # More than this is refused by the safetensors library as well.
            header = json.loads(stream.read(size)) if size <= 100_000_000 else None
    except FileNotFoundError as error:
        raise UserError(f"{file}: no such file; give the folder of a checkpoint with safetensors files") from error
    except (ValueError, struct.error):
        header = None
    if not isinstance(header, dict):
        raise UserError(f"{file} has no valid safetensors header, or ends within it; fetch the file again")
    return header, 8 + size
