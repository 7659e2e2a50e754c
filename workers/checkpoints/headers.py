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
ADAPTER_FILE = "adapter_config.json"

# Name of a routed expert, or of a tensor of it, in checkpoints that have experts one by one.
EXPERT = re.compile(r"(?P<block>.+\.experts)\.(?P<expert>\d+)(?P<rest>\..+)?")

# A multiple of disks' blocks, large enough to read at their speed, and little beside a layer.
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


def weight_files(directory: Path) -> list[Path]:
    """Return the files that have a checkpoint's weights, sorted by name.

    It is the only place that chooses them, so that whatever is searched, identified, exported or planned is the same.

    Raises:
        UserError: There are none, more than one set of weights, or others to be added to them.
    """
    single, index = directory / SINGLE_FILE, directory / INDEX_FILE
    if (directory / ADAPTER_FILE).is_file():
        raise UserError(
            f"{directory / ADAPTER_FILE}: the folder has an adapter, which loads only where peft is installed; merge "
            "it into the weights (peft's `merge_and_unload`, then `save_pretrained`), or remove the adapter's files"
        )
    names = sorted(set(_weight_map(index).values())) if index.is_file() else [SINGLE_FILE]
    if single.is_file() and SINGLE_FILE not in names:
        raise UserError(
            f"{directory} has two sets of weights: {SINGLE_FILE}, and {names[0]} and others that {INDEX_FILE} names; "
            "remove the one that isn't the model's"
        )
    for name in names:
        if not (directory / name).is_file():
            if not index.is_file():
                raise UserError(
                    f"{directory} has neither {SINGLE_FILE} nor {INDEX_FILE}, so it's unknown which files have the "
                    "weights; pickled weights are never loaded: fetch the checkpoint again, or convert it first"
                )
            raise UserError(f"{index} names {name}, which doesn't exist; fetch it again")
    return [directory / name for name in names]


def refuse_layers(layers: int, tensors: int, path: object) -> None:
    """Refuse a config with more layers than the files have tensors, before a model of so many layers is made.

    Raises:
        UserError: It has; the message names the checkpoint, `path`.
    """
    if layers > tensors:
        raise UserError(
            f"model {path}: its config says {layers:,} layers, and its files have {tensors:,} tensors; fetch both anew "
            "from one place"
        )


def stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Read the headers of a checkpoint's files; returns its tensors by name, file by file in order of position.

    Raises:
        UserError: See `weight_files`; or a file ends early, or its header is invalid, or index and files disagree.
    """
    index = directory / INDEX_FILE
    found: dict[str, StoredTensor] = {}
    for file in weight_files(directory):
        for tensor in file_tensors(file):
            if tensor.name in found:
                raise UserError(
                    f"tensor {tensor.name} is both in {found[tensor.name].file} and in {tensor.file}; "
                    "remove the file that isn't the checkpoint's"
                )
            found[tensor.name] = tensor
    for name, file_name in _weight_map(index).items() if index.is_file() else ():
        if name not in found or found[name].file.name != file_name:
            raise UserError(f"{index} says that tensor {name} is in {file_name}, and it isn't; fetch both files again")
    return found


def _weight_map(index: Path) -> dict[str, str]:
    try:
        found = TypeAdapter(dict[str, str]).validate_python(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{index} has no valid weight_map; fetch the file again") from error
    inside = [name for name in found.values() if Path(name).name != name or not name.endswith(".safetensors")]
    if inside or not found:
        what = f"names {inside[0]!r}" if inside else "names no file"
        raise UserError(f"{index} {what}, where safetensors files of its own folder are expected; fetch the file again")
    return found


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
