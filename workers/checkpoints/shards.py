"""Writes safetensors files tensor by tensor, and reads a few tensors at a time, so that no whole file is in memory."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from moevolve.evaluators.errors import UserError
from moevolve.workers.checkpoints.headers import INDEX_FILE, SINGLE_FILE, StoredTensor

# As `save_pretrained` of transformers 4.
MAX_SHARD_BYTES = 5_000_000_000

# Size in bytes of the largest element: tensors must start at a multiple of their element size, without gaps.
_ALIGNMENT = 8
# Upper bound on the bytes of a tensor's entry in the header, without its name, for up to four dimensions.
_ENTRY = 128
# Names of dtypes in safetensors files.
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
}

_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


def header_room(names: Iterable[str]) -> int:
    """Upper bound on the bytes before the data of a file with these tensors: its header, and the length of that.

    Data begins at a multiple of 64 bytes.
    """
    room = 64 + sum(len(json.dumps(name)) + _ENTRY for name in names)
    return -(-room // 64) * 64


def checksum(tensor: Tensor) -> int:
    """Return the CRC-32 of a host tensor's bytes."""
    return zlib.crc32(_bytes(tensor))


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


class ShardWriter:
    """Writes tensors, in any order, into `model.safetensors` or into several files with an index.

    `planned` has the approximate size in bytes of every tensor by name, in the approximate order of writing.

    Attributes:
        checksums: CRC-32 of the written tensors by name.
    """

    def __init__(self, directory: Path, planned: Mapping[str, int]) -> None:
        self.checksums: dict[str, int] = {}
        self._directory = directory
        groups: list[list[str]] = [[]]
        filled = 0
        for name, size in planned.items():
            if groups[-1] and filled + size > MAX_SHARD_BYTES:
                groups.append([])
                filled = 0
            groups[-1].append(name)
            filled += size
        count = len(groups)
        names = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)] if count > 1 else [SINGLE_FILE]
        self._shards = [ShardFile(directory / name, group) for name, group in zip(names, groups, strict=True)]
        self._shard_of = {name: shard for shard in self._shards for name in shard.planned}

    def write(self, name: str, tensor: Tensor) -> None:
        """Write a tensor of any device. Raises a `ValueError` if it isn't planned, or was already written."""
        if name not in self._shard_of or name in self.checksums:
            raise ValueError(f"tensor {name} isn't planned, or was already written")
        host = tensor.detach().cpu().contiguous()
        self.checksums[name] = checksum(host)
        self._shard_of[name].write(name, host)

    def finish(self) -> None:
        """Write the headers, and the index. Raises a `ValueError` if a planned tensor is missing."""
        missing = sorted(self._shard_of.keys() - self.checksums.keys())
        if missing:
            raise ValueError(f"{len(missing)} tensors of the model weren't written, such as {missing[0]}")
        for shard in self._shards:
            shard.finish()
        if len(self._shards) > 1:
            total = sum(shard.nbytes for shard in self._shards)
            places = {name: shard.path.name for name, shard in self._shard_of.items()}
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
            (self._directory / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


class ShardFile:
    """One safetensors file. Its header is written last, into reserved space: a header may end with spaces.

    `planned` are the names of its tensors, which may come in any order, and `metadata` further texts of the header.
    """

    def __init__(self, path: Path, planned: list[str], metadata: Mapping[str, str] | None = None) -> None:
        self.path = path
        self.planned = planned
        self.nbytes = 0
        self._metadata = {"format": "pt", **(metadata or {})}
        self._room = header_room([*planned, json.dumps(metadata)] if metadata else planned) - 8
        self._entries: dict[str, dict[str, object]] = {}
        self._late: list[tuple[str, Tensor]] = []
        path.write_bytes(bytes(8 + self._room))

    def write(self, name: str, tensor: Tensor) -> None:
        """Write a contiguous tensor of the host."""
        if tensor.nbytes % _ALIGNMENT:
            # After it the next tensor might not be aligned. Such tensors are small, so they are moved to the end.
            self._late.append((name, tensor.clone()))
        else:
            self._append(name, tensor)

    def finish(self) -> None:
        """Write the tensors that were moved to the end, and the header."""
        for name, tensor in sorted(self._late, key=lambda each: -each[1].element_size()):
            self._append(name, tensor)
        header = json.dumps({"__metadata__": self._metadata, **self._entries}, separators=(",", ":")).encode()
        if len(header) > self._room:
            raise ValueError(f"{self.path.name}: its header takes {len(header)} bytes, {self._room} were left for it")
        with self.path.open("r+b") as stream:
            stream.write(self._room.to_bytes(8, "little") + header.ljust(self._room))

    def _append(self, name: str, tensor: Tensor) -> None:
        with self.path.open("ab") as stream:
            stream.write(_bytes(tensor))
        where = [self.nbytes, self.nbytes + tensor.nbytes]
        self.nbytes += tensor.nbytes
        self._entries[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": where}


def torch_dtype(stored: StoredTensor) -> torch.dtype:
    """Return a stored tensor's dtype. Raises a `UserError` if torch doesn't have it."""
    if stored.dtype not in _DTYPES:
        raise UserError(f"{stored.file}: tensor {stored.name} has dtype {stored.dtype}, which can't be read")
    return _DTYPES[stored.dtype]


def finite(values: Tensor, name: str, file: Path) -> Tensor:
    """Return the values that were read of a tensor. Raises a `UserError` if they aren't finite."""
    # Summing is much faster than looking at every number, and only an overflow sends sound ones on to that.
    computed = values.dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    if computed and values.device.type != "meta" and not values.sum().isfinite() and not values.isfinite().all():
        wrong = int(values.numel() - values.isfinite().sum())
        raise UserError(
            f"{file}: tensor {name} has {wrong} of {values.numel()} numbers that aren't finite (NaN or infinite); "
            "fetch the file again, or use a checkpoint that was saved before training diverged"
        )
    return values


def read_tensor(stored: StoredTensor) -> Tensor:
    """Map a tensor of a file into memory. Raises a `UserError` if torch doesn't have its dtype."""
    dtype = torch_dtype(stored)
    if not stored.nbytes:
        return torch.empty(stored.shape, dtype=dtype)
    # Copy-on-write, because torch warns of arrays that it can't write to.
    mapped = np.memmap(stored.file, np.uint8, "c", stored.start, (stored.nbytes,))
    return torch.from_numpy(mapped).view(dtype).reshape(stored.shape)
