"""A plain checkpoint with its matrices rounded to fewer bits, in the format of compressed-tensors or as a GGUF file.

Numbers are rounded to the nearest, with scales from the largest of each row or group, without any calibration.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from moevolve.evaluators.errors import UserError
from moevolve.workers.checkpoints.files import read_json
from moevolve.workers.checkpoints.formats.base import Codec, blocks_largest
from moevolve.workers.checkpoints.formats.registry import packed_format
from moevolve.workers.checkpoints.headers import StoredTensor, stored_tensors
from moevolve.workers.checkpoints.shards import ShardWriter, read_tensor
from moevolve.workers.export.config_files import copy_files, write_json
from moevolve.workers.export.folder import VerificationError, check_room, new_checkpoint
from moevolve.workers.export.quantise_gguf import write_gguf_of

Quantisation = Literal["fp8", "int4", "gguf-q8_0"]

GGUF_FILE = "model.gguf"
_MATRIX = re.compile(r".+\.layers\.\d+\..+(_proj|_mqa|\.w[123]|\.fc[12])\.weight")
"""Matrices of attention, networks and experts. Routers, embeddings and the output head stay as they are."""
_LARGEST = {"fp8": 448.0, "int4": 7.0}
"""Largest number of E4M3, and of symmetric integers of four bits."""
_GROUP = 32
"""Columns that share a scale of int4. Servers have kernels for 128, too, but without calibration that rounds worse:
the demo's matrices change by up to 16 % instead of up to 12 %."""
_FAR = 0.9
"""Relative difference that no rounding makes, but codes in a wrong order do."""
_FORMAT = "in the format of compressed-tensors"
_NAMES = {
    "fp8": f"FP8 (E4M3, a scale per row, activations per token), {_FORMAT}",
    "int4": f"int4 (symmetric, a scale per {_GROUP} columns), {_FORMAT}",
    "gguf-q8_0": "8 bits (a scale per 32 numbers of a row), in a GGUF file of type Q8_0",
}


@dataclass(frozen=True, slots=True)
class Quantised:
    """What was quantised.

    Attributes:
        matrices: Number of quantised matrices.
        difference: Largest difference between one and what it was, relative to the latter, both as the root of the sum
            of squares.
    """

    matrices: int
    difference: float


def quantise(source: Path, target: Path, kind: Quantisation) -> Quantised:
    """Write a stock checkpoint once more, quantised, one tensor after the other, and read it back.

    Args:
        source: Folder of the checkpoint.
        target: New folder; see `new_checkpoint`.
        kind: `fp8` for FP8 weights and activations; `int4` for weights of four bits alone; `gguf-q8_0` for a GGUF file,
            `model.gguf`, of eight bits.

    Raises:
        UserError: The library for the format isn't installed, it has no place for something of this checkpoint, or the
            folder is taken or the disk full.
        ExportError: A matrix that was read back has little to do with what it was.
    """
    with new_checkpoint(target, f"{source.name} in {kind}") as part:
        copy_files(source, part)
        if kind == "gguf-q8_0":
            shutil.copyfile(source / "config.json", part / "config.json")
            matrices, difference = write_gguf_of(source, part / GGUF_FILE)
        else:
            matrices, difference = _write_compressed(source, part, kind)
        (part / "README.md").write_text(_card(source, kind, matrices, difference), encoding="utf-8")
    return Quantised(matrices, difference)


def _write_compressed(source: Path, part: Path, kind: Quantisation) -> tuple[int, float]:
    """Write the weights and the config; returns the number of matrices and the largest difference."""
    stored = stored_tensors(source)
    chosen = {name for name, tensor in stored.items() if _MATRIX.fullmatch(name) and len(tensor.shape) == 2}
    if any(len(tensor.shape) == 3 and ".experts." in name for name, tensor in stored.items()) or not chosen:
        raise UserError(
            f"--quantise {kind}: this family's checkpoints have a layer's experts in one tensor; leave it out"
        )
    settings = _settings(kind, chosen, stored)
    packed = packed_format("compressed-tensors", settings, str(source))
    config = read_json(source / "config.json")
    write_json(part / "config.json", config | {"quantization_config": settings})
    check_room(part, sum(tensor.nbytes for tensor in stored.values()))
    writer = _write(stored, chosen, part, kind, settings)
    written = stored_tensors(part)
    found = 0.0
    matrices = list(packed.matrices(written.keys()))
    for matrix in matrices:
        parts = {last: read_tensor(written[name]) for last, name in matrix.parts.items()}
        found = max(found, _difference(matrix.codec, parts, read_tensor(stored[matrix.name]), matrix.name))
    changed = [name for name, tensor in written.items() if tensor.checksum() != writer.checksums[name]]
    if changed or {matrix.name for matrix in matrices} != chosen:
        raise VerificationError(f"tensor {min(changed or chosen)} isn't what was written")
    return len(chosen), found


def _settings(kind: Quantisation, chosen: set[str], stored: Mapping[str, StoredTensor]) -> dict[str, Any]:
    """The `quantization_config`, by the specification of compressed-tensors."""
    weights: dict[str, Any] = {"symmetric": True, "dynamic": False}
    activations = None
    if kind == "fp8":
        weights |= {"num_bits": 8, "type": "float", "strategy": "channel"}
        activations = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}
    else:
        odd = next((name for name in sorted(chosen) if stored[name].shape[1] % _GROUP), None)
        if odd is not None:
            raise UserError(f"--quantise int4: the columns of {odd} can't be divided into groups of {_GROUP}; use fp8")
        weights |= {"num_bits": 4, "type": "int", "strategy": "group", "group_size": _GROUP}
    layout = "float-quantized" if kind == "fp8" else "pack-quantized"
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "format": layout}
    others = [name for name, tensor in stored.items() if name not in chosen and len(tensor.shape) == 2]
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": layout,
        "config_groups": {"group_0": scheme},
        "ignore": sorted(name.removesuffix(".weight") for name in others),
    }


def _write(
    stored: Mapping[str, StoredTensor], chosen: set[str], part: Path, kind: Quantisation, settings: dict[str, Any]
) -> ShardWriter:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    scheme = QuantizationScheme.model_validate(settings["config_groups"]["group_0"])
    compressor = BaseCompressor.get_value_from_registry(scheme.format)
    last_names = [name for name in compressor.compression_param_names(scheme) if "zero_point" not in name]
    planned: dict[str, int] = {}
    for name, tensor in stored.items():
        names = [f"{name.removesuffix('weight')}{last}" for last in last_names] if name in chosen else [name]
        planned |= dict.fromkeys(names, tensor.nbytes // (2 * len(names)) if name in chosen else tensor.nbytes)
    writer = ShardWriter(part, planned)
    for name, tensor in stored.items():
        values = read_tensor(tensor)
        if name not in chosen:
            writer.write(name, values)
            continue
        block = (1, values.shape[1] if kind == "fp8" else _GROUP)
        largest = blocks_largest(values.float(), block) / _LARGEST[kind]
        scales = torch.where(largest > 0, largest, 1.0).to(torch.float32 if kind == "fp8" else values.dtype)
        # In float32, since a quotient rounded to 16 bits isn't always next to the nearest number.
        parts = compressor.compress({"weight": values.float(), "weight_scale": scales}, scheme)
        for last in last_names:
            writer.write(f"{name.removesuffix('weight')}{last}", parts[last])
    writer.finish()
    return writer


def _difference(codec: Codec, parts: dict[str, Tensor], meant: Tensor, name: str) -> float:
    exact = meant.float()
    found = float((codec.unpack(parts, torch.float32) - exact).norm() / exact.norm().clamp_min(1e-30))
    if not found < _FAR:
        raise VerificationError(f"tensor {name}, read back, differs by {found:.0%} from what was quantised")
    return found


def _card(source: Path, kind: Quantisation, matrices: int, difference: float) -> str:
    """The source's model card with a section more."""
    text = (source / "README.md").read_text(encoding="utf-8") if (source / "README.md").is_file() else ""
    return (
        f"{text.rstrip()}\n\n## Quantised\n\n{matrices} matrices were rounded to {_NAMES[kind]}, to the nearest number "
        f"and without calibration. They differ by up to {difference:.1%} from what they were. The scores above were "
        "measured before.\n"
    )
