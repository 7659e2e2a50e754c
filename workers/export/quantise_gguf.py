"""A plain checkpoint as one GGUF file of Q8_0: 32 numbers of a row share a scale and are rounded to 8 bits."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import torch

from moevolve.workers.checkpoints.files import local_directory
from moevolve.workers.checkpoints.formats.gguf import (
    GgufNames,
    as_stored,
    changed_settings,
    gguf_config,
    gguf_metadata,
    gguf_tensors,
)
from moevolve.workers.checkpoints.headers import EXPERT, StoredTensor, stored_tensors
from moevolve.workers.checkpoints.loading import load_config
from moevolve.workers.checkpoints.shards import read_tensor
from moevolve.workers.contract.settings import ModelConfig
from moevolve.workers.export.folder import VerificationError, check_room
from moevolve.workers.export.gguf_tokenizer import add_tokenizer, gguf_vocabulary

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_EXACT = re.compile(r".+(norm|ffn_gate_inp|ffn_gate_inp_shexp)\.weight|.+\.bias")
"""What stays in F32: routers, norms and biases, as llama.cpp's converter writes them."""
_BLOCK = 32
_FAR = 0.03
"""Relative difference above what rounding makes: half a step, 1/254 of a block's largest number, for each of 32."""
_AT_ONCE = 1 << 24
"""Numbers that are packed at once, in float32."""


def check_gguf(model: ModelConfig) -> None:
    """Refuse a checkpoint that can't become a GGUF file, by its config and its tokenizer.

    Raises:
        UserError: Its family or its tokenizer isn't supported, or metadata of GGUF don't describe it.
    """
    from transformers.utils import cached_file

    settings = load_config(model)
    gguf_metadata(settings)
    folder = local_directory(model)
    file = None if folder is not None else cached_file(model.path, "tokenizer.json", revision=model.revision)
    gguf_vocabulary(Path(file or f"{folder}/tokenizer.json"), settings.vocab_size)


def write_gguf_of(source: Path, target: Path) -> tuple[int, float]:
    """Write a checkpoint as a GGUF file, and compare what is read from it with the checkpoint.

    Args:
        source: Folder of the checkpoint, of plain numbers.
        target: New file.

    Returns:
        Number of tensors that were rounded, and the largest difference of one from what it was, relative to the latter,
        both as the root of the sum of squares.

    Raises:
        UserError: See `check_gguf`; or the disk is full.
        VerificationError: What was read isn't what was written.
    """
    settings = load_config(ModelConfig(str(source)))
    stored = stored_tensors(source)
    tensors = list(_planned(stored, settings))
    check_room(target, sum(each.nbytes for each in tensors))
    _write(tensors, settings, source, target)
    changed = changed_settings(settings, gguf_config(target))
    if changed:
        raise VerificationError(f"{target.name} tells another {changed[0].split()[0]} than was written")
    found = 0.0
    read = gguf_tensors(target, settings, torch.float32)
    for name, tensor in read.items():
        exact = read_tensor(stored[name]).float()
        difference = float((tensor[...] - exact).norm() / exact.norm().clamp_min(1e-30))
        if not difference < _FAR:
            raise VerificationError(f"tensor {name}, read back, differs by {difference:.0%} from what was quantised")
        found = max(found, difference)
    if read.keys() != stored.keys():
        raise VerificationError(f"tensor {min(read.keys() ^ stored.keys())} isn't in both checkpoints")
    return sum(each.kind == "Q8_0" for each in tensors), found


class _Packed:
    """A tensor of the file, which is packed while it is written; the library's writer takes it for an array.

    Attributes:
        shape: Shape of its numbers, the experts of a layer first.
        kind: Its type in GGUF.
        nbytes: Size of what is written.
    """

    def __init__(self, name: str, sources: Sequence[StoredTensor], settings: PretrainedConfig) -> None:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        self.name, self._sources, self._settings = name, sources, settings
        shape = as_stored(sources[0].name, torch.empty(sources[0].shape, device="meta"), settings).shape
        self.shape = (len(sources), *shape) if EXPERT.fullmatch(sources[0].name) else tuple(shape)
        self.kind = "F32" if _EXACT.fullmatch(name) else "F16" if shape[-1] % _BLOCK else "Q8_0"
        self.type = GGMLQuantizationType[self.kind]
        numbers, size = GGML_QUANT_SIZES[self.type]
        self.nbytes = int(np.prod(self.shape)) // numbers * size

    def tofile(self, stream: IO[bytes]) -> None:
        """Write the packed bytes."""
        from gguf import quantize

        for source in self._sources:
            values = as_stored(source.name, read_tensor(source), self._settings)
            for rows in values.split(max(1, _AT_ONCE // values[0].numel())):
                stream.write(quantize(np.ascontiguousarray(rows.float().numpy()), self.type).tobytes())


def _planned(stored: dict[str, StoredTensor], settings: PretrainedConfig) -> Iterator[_Packed]:
    """The tensors of the file, with the experts of a layer in one."""
    names = GgufNames(gguf_metadata(settings)["general.architecture"], settings.num_hidden_layers)
    sources: dict[str, list[StoredTensor]] = {}
    for name in sorted(stored, key=_expert):
        sources.setdefault(names.sources(name)[0], []).append(stored[name])
    for name, parts in sources.items():
        yield _Packed(name, parts, settings)


def _expert(name: str) -> int:
    match = EXPERT.fullmatch(name)
    return int(match["expert"]) if match else -1


def _write(tensors: Sequence[_Packed], settings: PretrainedConfig, source: Path, target: Path) -> None:
    from gguf import GGUFWriter, LlamaFileType

    described = gguf_metadata(settings)
    writer = GGUFWriter(target, described.pop("general.architecture"))
    writer.add_name(source.name)
    writer.add_file_type(LlamaFileType.MOSTLY_Q8_0)
    writer.add_quantization_version(2)
    for key, value in described.items():
        (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(key, value)
    add_tokenizer(writer, source, settings.vocab_size)
    for tensor in tensors:
        # With a type given, the dtype only says that the shape is one of numbers, not of bytes.
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), tensor.nbytes, tensor.type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in tensors:
        packed: Any = tensor
        writer.write_tensor_data(packed)
    writer.close()
