"""Writes a checkpoint as published: sharded safetensors with an index, config, tokenizer and chat template.

Numbers that matter are random and cheap: one block of random bytes, written again and again, beginning elsewhere in
every tensor. Weights are scaled to keep the size of what goes through them; only experts' outputs differ in theirs, so
that a few matter more than others. Where values don't matter files have holes, which take no room on the disk and read
as zeros.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import IO

import numpy as np
import torch

from real_size.published import Spec, Stored, stored_tensors
from real_size.tokenizers import write_tokenizer

_VALUES = 1_048_573  # a prime: rows of no width begin alike
_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "F8_E4M3": 1, "U8": 1, "I8": 1, "F8_E8M0": 1, "I64": 8}
_TORCH = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F8_E4M3": torch.float8_e4m3fn}
_FP8_STD = 32.0
SHARD = 4 << 30


def write_checkpoint(
    spec: Spec, directory: Path, holes: Callable[[str], bool] = lambda name: False, shard: int = SHARD
) -> Path:
    """Write a model of the lab.

    Args:
        spec: which.
        directory: made if it isn't there.
        holes: whether the tensor of a name is a hole.
        shard: most bytes of a file.
    """
    directory.mkdir(parents=True, exist_ok=True)
    config = spec.config
    (directory / "config.json").write_text(json.dumps(config | _code(config), indent=2))
    write_tokenizer(spec.name, config, directory)
    write_tensors(list(stored_tensors(config)), directory, holes, shard)
    return directory


def _code(config: dict[str, object]) -> dict[str, object]:
    """Published DeepSeeks name code of their own, for versions of `transformers` that didn't know them."""
    names = {"deepseek_v2": "DeepseekV2", "deepseek_v3": "DeepseekV3"}
    kind = names.get(str(config["model_type"]))
    if kind is None:
        return {}
    return {
        "auto_map": {
            "AutoConfig": f"configuration_deepseek.{kind}Config",
            "AutoModel": f"modeling_deepseek.{kind}Model",
            "AutoModelForCausalLM": f"modeling_deepseek.{kind}ForCausalLM",
        }
    }


def write_tensors(tensors: Sequence[Stored], directory: Path, holes: Callable[[str], bool], shard: int = SHARD) -> None:
    """Write tensors into as many files as they take, and the index."""
    files: list[list[Stored]] = [[]]
    taken = 0
    for tensor in tensors:
        size = stored_bytes(tensor)
        if files[-1] and taken + size > shard:
            files.append([])
            taken = 0
        files[-1].append(tensor)
        taken += size
    names = [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    for name, each in zip(names, files, strict=True):
        _write_file(directory / name, each, holes)
    where = {tensor.name: name for name, each in zip(names, files, strict=True) for tensor in each}
    index = {"metadata": {"total_size": sum(map(stored_bytes, tensors))}, "weight_map": where}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def stored_bytes(tensor: Stored) -> int:
    """Bytes of a tensor in its file."""
    return int(np.prod(tensor.shape, dtype=np.int64)) * _BYTES[tensor.dtype]


def _write_file(path: Path, tensors: Sequence[Stored], holes: Callable[[str], bool]) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        offsets = [end, end := end + stored_bytes(tensor)]
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": offsets}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            if holes(tensor.name):
                file.seek(stored_bytes(tensor), os.SEEK_CUR)
            else:
                _write_values(file, tensor)
        file.truncate(8 + len(text) + end)


def _write_values(file: IO[bytes], tensor: Stored) -> None:
    if tensor.kind == "given":
        file.write(np.array(tensor.values, np.int64).tobytes())
        return
    for part, size in enumerate(tensor.sizes):
        block = _value_bytes(tensor.dtype, tensor.kind, tensor.inputs, size)
        place = zlib.crc32(f"{tensor.name} {part}".encode()) % _VALUES * _BYTES[tensor.dtype]
        left = stored_bytes(tensor) // len(tensor.sizes)
        while left:
            piece = block[place : place + left]
            file.write(piece)
            left -= len(piece)
            place = 0


# Few, because every expert's output projection has a size of its own.
@lru_cache(16)
def _value_bytes(dtype: str, kind: str, inputs: int, size: float) -> memoryview:
    """Some million numbers of a kind, times `size`, as bytes."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{dtype} {kind}".encode()))
    normal, scale = torch.randn(_VALUES, generator=generator), size * inputs**-0.5
    values = {
        "weight": lambda: normal * (_FP8_STD if dtype == "F8_E4M3" else scale),
        "scales": lambda: (1 + 0.2 * normal.clamp(-3, 3)) * scale / _FP8_STD,
        "ones": lambda: 1 + 0.05 * normal,
        "small": lambda: 0.02 * normal,
        # Exponents for FP8 numbers of a deviation of 32.
        "eighths": lambda: torch.full((_VALUES,), 127 + round(np.log2(scale / _FP8_STD))),
        "packed": lambda: torch.randint(0, 256, (_VALUES * _BYTES[dtype],), generator=generator),
        # Values of 4 bits are 2.9 in the mean square: these exponents of two bring them to a weight's size.
        "exponents": lambda: 127 + round(np.log2(scale / 2.93)) + torch.randint(0, 2, (_VALUES,), generator=generator),
    }[kind]()
    made = values.to(torch.uint8 if dtype in ("U8", "I8", "F8_E8M0") else _TORCH[dtype])
    return memoryview(made.contiguous().view(torch.uint8).numpy()).cast("B")
