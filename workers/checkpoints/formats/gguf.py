"""GGUF, the files of llama.cpp: finds their tensors, and unpacks them under the names of a Hugging Face checkpoint.

A file has the experts of a layer fused, [experts, rows, columns], and quantises along columns, so an expert's bytes are
contiguous. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Its types are unpacked by the gguf
library, and packed where it can.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from types import EllipsisType
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from moevolve.evaluators.errors import UserError
from moevolve.workers.checkpoints.formats.base import Codec
from moevolve.workers.checkpoints.formats.gguf_metadata import (
    ARCHITECTURES,
    GGUF_SETTINGS,
    check_factors,
    check_metadata,
    is_dense_file,
    metadata,
    open_parts,
    predicted_layers,
)
from moevolve.workers.checkpoints.headers import EXPERT, StoredTensor, refuse_layers
from moevolve.workers.checkpoints.settings import check_settings
from moevolve.workers.checkpoints.shards import finite
from moevolve.workers.checkpoints.state import SavedNames, empty_model
from moevolve.workers.families.registry import dense_family

if TYPE_CHECKING:
    from gguf import GGUFReader
    from gguf.gguf_reader import ReaderTensor
    from transformers import PretrainedConfig

# Experts of GPT-OSS, the only supported family whose checkpoints have them fused.
_FUSED = re.compile(r"model\.layers\.(?P<layer>\d+)\.mlp\.experts\.(?P<matrix>gate_up|down)_proj(?P<bias>_bias)?")

_ROTARY = re.compile(r".+\.self_attn\.(?P<heads>[qk])_proj\.(weight|bias)")

# Computes a tensor, or an expert of a fused one, from the float32 values of its sources.
Arrange = Callable[[list[Tensor]], Tensor]


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor of a model in Hugging Face form, which is read and unpacked on `tensor[...]`.

    Of fused experts, `tensor[first:last]` reads some.

    Attributes:
        shape: Shape in an unquantised Hugging Face checkpoint.
        sources: Tensors of the file that it is computed from.
        experts: Experts to read from fused sources, in order; None for whole sources.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    file: Path
    sources: Sequence[ReaderTensor] = field(repr=False)
    experts: range | None
    arrange: Arrange = field(repr=False)

    def __getitem__(self, which: EllipsisType | slice) -> Tensor:
        if self.experts is None:
            return self._unpacked(...).reshape(self.shape)
        experts = self.experts if which is ... else self.experts[which]
        # One expert at a time, because unpacking goes through float32.
        shape = self.shape if len(self.experts) == 1 else self.shape[1:]
        found = torch.empty((len(experts), *shape), dtype=self.dtype)
        for slot, expert in enumerate(experts):
            found[slot] = self._unpacked(expert)
        return found.reshape(self.shape) if which is ... else found

    def empty(self) -> Tensor:
        """Return a tensor of the same shape and dtype on the meta device; nothing is read."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")

    def _unpacked(self, which: int | EllipsisType) -> Tensor:
        from gguf import dequantize

        values = [dequantize(np.ascontiguousarray(each.data[which]), each.tensor_type) for each in self.sources]
        found = self.arrange([torch.from_numpy(np.array(value, np.float32)) for value in values]).to(self.dtype)
        return finite(found, self.sources[0].name, self.file)


def stored_gguf(readers: Mapping[Path, GGUFReader]) -> dict[str, StoredTensor]:
    """Return the tensors of a model as they are stored, by llama.cpp's names; dtypes are those of GGUF."""
    found = {}
    for part, reader in readers.items():
        for each in reader.tensors:
            kind, shape = each.tensor_type.name, tuple(each.shape.tolist()[::-1])
            found[each.name] = StoredTensor(each.name, part, kind, shape, each.data_offset, each.n_bytes)
    return found


def gguf_tensors(file: Path, settings: PretrainedConfig, dtype: torch.dtype) -> dict[str, GgufTensor]:
    """Return a model's tensors, unpacked to `dtype`, by their names in an unquantised Hugging Face checkpoint.

    Raises:
        UserError: The file's architecture isn't the config's or isn't supported, or a tensor is missing, unexpected
            or of another size than the config says.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    readers = list(open_parts(file).values())
    stored = {tensor.name: tensor for reader in readers for tensor in reader.tensors}
    architecture = metadata(readers[0], "general.architecture")
    if ARCHITECTURES.get(settings.model_type) != architecture:
        raise UserError(
            f"{file}: its architecture is {architecture!r}, and its config's model type is {settings.model_type!r}; "
            f"supported are {', '.join(f'{arch!r} with {kind!r}' for kind, arch in ARCHITECTURES.items())}"
        )
    is_dense = is_dense_file(readers[0], architecture)
    if is_dense != (dense_family(settings.model_type) is not None):
        has = "no experts" if is_dense else "experts"
        raise UserError(
            f"{file}: it has {has}, and its config's model type is {settings.model_type!r}; replace the config.json "
            "next to it by that of the model that it was made from"
        )
    refuse_layers(settings.num_hidden_layers, len(stored), file)
    check_settings({key: metadata(readers[0], key) for key in GGUF_SETTINGS}, GGUF_SETTINGS, str(file))
    check_metadata(readers[0], architecture, settings, file)
    names = GgufNames(architecture, settings.num_hidden_layers)
    model = empty_model(MODEL_FOR_CAUSAL_LM_MAPPING[type(settings)], settings, dtype)
    wanted = {name: tensor for saved in SavedNames(model).tensors.values() for name, tensor in saved.items()}
    tensors, sources_of = {}, {name: names.sources(name) for name in wanted}
    layers = settings.num_hidden_layers
    predicting = range(layers, layers + predicted_layers(readers[0], architecture))
    ignored = tuple(f"blk.{layer}." for layer in predicting)
    used = {source for found in sources_of.values() for source in found}
    unused = [name for name in stored if name not in used and not name.startswith(ignored)]
    for name, tensor in wanted.items():
        found = sources_of[name]
        missing = [source for source in found if source not in stored]
        if missing:
            raise UserError(f"{file}: tensor {missing[0]}, from which {name} is made, is missing{_instead(unused)}")
        experts = _experts(name, tensor)
        sources = [stored[source] for source in found]
        arrange = _arrangement(name, architecture, settings)
        tensors[name] = GgufTensor(tuple(tensor.shape), dtype, file, sources, experts, arrange)
        sizes = [math.prod(each.shape.tolist()[: None if experts is None else -1]) for each in sources]
        if sum(sizes) * (1 if experts is None else len(experts)) != tensor.numel():
            shapes = ", ".join(str(each.shape.tolist()[::-1]) for each in sources)
            raise UserError(
                f"{file}: tensor {found[0]} has shape {shapes}, and by the config {name} has shape "
                f"{list(tensor.shape)}; give the config.json of this model"
            )
    for name in unused:
        if name.startswith("rope_f"):
            check_factors(stored[name], settings, file)
        elif name == "output.weight":
            raise UserError(
                f"{file}: it has tensor {name}, and by its config the output projection is the embedding; set "
                "tie_word_embeddings: false in config.json"
            )
        else:
            raise UserError(f"{file}: tensor {name} isn't part of a {settings.model_type} model with this config")
    return tensors


def _instead(unused: Sequence[str]) -> str:
    """Say what to do about a missing tensor, and which tensor that isn't read the file has in its place."""
    other = next((each for each in unused if not each.startswith("rope_f")), None)
    if other is None:
        return "; fetch it again"
    return f", and it has {other}, which isn't read; convert it again with llama.cpp's defaults"


class GgufNames:
    """Where a GGUF file of an architecture and a number of decoder layers has a Hugging Face checkpoint's tensors."""

    def __init__(self, architecture: str, layers: int) -> None:
        from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, get_tensor_name_map

        found = next(arch for arch in MODEL_ARCH if MODEL_ARCH_NAMES[arch] == architecture)
        self._map = get_tensor_name_map(found, layers)

    def sources(self, name: str) -> list[str]:
        """Return the names of a tensor's sources; the tensor's own name if the library knows none."""
        fused = _FUSED.fullmatch(name)
        if fused is not None:
            matrices = ("gate", "up") if fused["matrix"] == "gate_up" else ("down",)
            kind = "bias" if fused["bias"] else "weight"
            return [f"blk.{fused['layer']}.ffn_{matrix}_exps.{kind}" for matrix in matrices]
        match = EXPERT.fullmatch(name)
        name = f"{match['block']}{match['rest']}" if match else name
        module, _, last = name.rpartition(".")
        # Parameters that aren't a module's weight or bias, as attention sinks, are stored as if they were a weight.
        ends = ("weight", "bias")
        found = self._map.get_name(module) if last in ends else self._map.get_name(name)
        return [name if found is None else f"{found}.{last if last in ends else 'weight'}"]

    def stored(self, name: str, values: Tensor) -> Iterator[tuple[str, int | None, Tensor]]:
        """Divide a tensor of experts or of a router as the file has it; the inverse of reading it.

        Yields:
            Name in the file, index of the expert or None for a whole tensor, and values.
        """
        sources, fused = self.sources(name), _FUSED.fullmatch(name)
        if fused is None:
            match = EXPERT.fullmatch(name)
            yield sources[0], int(match["expert"]) if match else None, values
            return
        rows = values if fused["bias"] else values.mT
        for place, source in enumerate(sources):
            for expert, each in enumerate(rows):
                yield source, expert, each[place :: len(sources)]


def _experts(name: str, tensor: Tensor) -> range | None:
    if _FUSED.fullmatch(name):
        return range(tensor.shape[0])
    match = EXPERT.fullmatch(name)
    return range(int(match["expert"]), int(match["expert"]) + 1) if match else None


def _arrangement(name: str, architecture: str, settings: PretrainedConfig) -> Arrange:
    fused, rotary = _FUSED.fullmatch(name), _ROTARY.fullmatch(name)
    if fused is not None and fused["matrix"] == "gate_up":  # GPT-OSS has gate and up rows in alternation
        return lambda values: _transposed(torch.stack(values, 1).flatten(0, 1))
    if fused is not None:
        return lambda values: _transposed(values[0])
    if rotary is not None and architecture == "llama":
        heads = settings.num_attention_heads if rotary["heads"] == "q" else settings.num_key_value_heads
        # llama.cpp orders a head's rows so that rotary pairs are neighbours instead of half a head apart.
        return lambda values: values[0].unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
    if architecture in ("gemma2", "gemma3") and name.endswith("norm.weight"):  # llama.cpp has what multiplies
        return lambda values: values[0] - 1
    return itemgetter(0)


def _transposed(values: Tensor) -> Tensor:
    """Turn a matrix as GPT-OSS multiplies, from the right; biases stay."""
    return values.T if values.dim() == 2 else values


# Type of changed tensors whose own type the library only unpacks. Its blocks of 32 divide the rows of all others.
INSTEAD = "Q8_0"

# Quantised types that the library can pack.
_PACKED = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "MXFP4")


class GgufType(Codec):
    """A type such as `Q4_K`. A tensor has one part, its bytes: uint8 [..., bytes of a row].

    Attributes:
        packs: Whether the library can pack the type.
    """

    def __init__(self, kind: str) -> None:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        self.kind = kind
        self._type = GGMLQuantizationType[kind]
        self._bytes = GGML_QUANT_SIZES[self._type][1]
        self.plain = kind in ("F32", "F16", "BF16")
        self.packs = self.plain or kind in _PACKED

    def unpack(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        from gguf import dequantize

        (data,) = parts.values()
        return torch.from_numpy(np.array(dequantize(data.contiguous().numpy(), self._type), np.float32)).to(dtype)

    def pack(self, values: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        from gguf import quantize

        if not self.packs:
            raise UserError(f"GGUF tensors of type {self.kind} can't be written anew; write them as {INSTEAD}")
        exact = values.float()
        if self.plain:
            # Numbers that are the same in the dtype of `values` keep their bits.
            before = self.unpack(like, torch.float32)
            exact = torch.where(before.to(values.dtype) == values, before, exact)
        packed = quantize(exact.contiguous().numpy(), self._type)
        return {"": torch.from_numpy(np.ascontiguousarray(packed).view(np.uint8))}
