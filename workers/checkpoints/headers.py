"""The tensors of a safetensors folder, known from the headers of its files alone."""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from safetensors import SafetensorError, safe_open

from moevolve.evaluators.errors import UserError, first_line

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

EXPERT = re.compile(r"(?P<block>.+\.experts)\.(?P<expert>\d+)(?P<rest>\..+)?")
"""Name of a routed expert, or of a tensor of it, in checkpoints that have experts one by one."""

_CHUNK = 1 << 24


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file.

    Attributes:
        dtype: Dtype as the format spells it, for example `BF16` in safetensors and `Q4_K` in GGUF.
        start: Position of its first byte in the file.
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
        return max(1, self.nbytes // max(1, math.prod(self.shape)))

    def chunks(self, rows: tuple[int, ...] | None = None) -> Iterator[bytes]:
        """Read the tensor's bytes, or those of some `rows` of its first dimension, at most 16 MiB at a time."""
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

    def checksum(self) -> int:
        """Return the CRC-32 of the tensor's bytes."""
        checksum = 0
        for chunk in self.chunks():
            checksum = zlib.crc32(chunk, checksum)
        return checksum


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
        return TypeAdapter(dict[str, str]).validate_python(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{index} has no valid weight_map; fetch the file again") from error


def file_tensors(file: Path) -> list[StoredTensor]:
    """Read the header of a safetensors file; returns its tensors in order of position. See `read_header`."""
    header, begin = read_header(file)
    tensors = []
    for name, entry in header.items():
        if name != "__metadata__":
            first, last = entry["data_offsets"]
            tensors.append(StoredTensor(name, file, entry["dtype"], tuple(entry["shape"]), begin + first, last - first))
    return sorted(tensors, key=lambda tensor: tensor.start)


def read_header(file: Path) -> tuple[dict[str, Any], int]:
    """Return the header of a safetensors file, and the position of the first byte after it.

    Raises:
        UserError: The file is missing, ends early, or its header is invalid.
    """
    try:
        with safe_open(file, "np"):
            pass  # checks the header and the file's length
    except FileNotFoundError as error:
        raise UserError(f"{file}: no such file; give the folder of a checkpoint with safetensors files") from error
    except SafetensorError as error:
        raise UserError(
            f"{file} isn't a valid safetensors file, or ends early ({first_line(error)}); fetch the file again"
        ) from error
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        return json.loads(stream.read(size)), 8 + size
