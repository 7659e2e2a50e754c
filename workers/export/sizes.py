"""Sizes of pruned checkpoints by the number of kept experts, from the headers or the config of the source alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from moevolve.workers.checkpoints.formats.gguf import gguf_parts
from moevolve.workers.checkpoints.headers import StoredTensor, stored_tensors
from moevolve.workers.checkpoints.loading import checkpoint_folder, gguf_file, load_config
from moevolve.workers.checkpoints.pruning import KeptTensor, Pruning
from moevolve.workers.checkpoints.shards import MAX_SHARD_BYTES, header_room
from moevolve.workers.checkpoints.state import SavedNames
from moevolve.workers.contract.facts import ModelFacts
from moevolve.workers.contract.methods import ExpertSelection
from moevolve.workers.contract.settings import ModelConfig
from moevolve.workers.export.gguf import kept_gguf
from moevolve.workers.families.base import ExpertFamily
from moevolve.workers.families.registry import FAMILIES
from moevolve.workers.model.describe import describe_config, meta_model

_GGUF_PADDING = 64
"""Upper bound on the bytes before a tensor of a GGUF file, which begins at a multiple of 32 or 64."""


@dataclass(frozen=True, slots=True)
class FileSizes:
    """Size of the weight files of a pruned checkpoint.

    Which experts are kept makes a difference of a few bytes in the headers of files, which count at their largest.

    Attributes:
        fixed: Bytes of what isn't experts'.
        expert: Bytes that one expert of every MoE layer takes, with its router rows.
    """

    fixed: int
    expert: int

    def total(self, experts: int) -> int:
        """Bytes of the weight files with so many kept experts per MoE layer."""
        return self.fixed + experts * self.expert


def file_sizes(model: ModelConfig, form: Literal["source", "stock"]) -> FileSizes:
    """Find out how large pruned checkpoints of a mixture of experts are. No weights are read.

    Args:
        model: The source.
        form: `source` for its own format, `stock` for plain numbers of the model's dtype.

    Raises:
        UserError: The checkpoint can't be read, or has no experts that can be told apart.
    """
    facts = describe_config(meta_model(model), model)
    read = _kept_gguf if gguf_file(model) is not None and form == "source" else _kept
    one, every = (read(model, facts, count, form) for count in (1, facts.experts))
    if facts.experts == 1:
        return FileSizes(0, every)
    # All experts of a layer are equally large, so the size is linear in their number.
    expert = -(-(every - one) // (facts.experts - 1))
    return FileSizes(every - facts.experts * expert, expert)


def _selection(facts: ModelFacts, experts: int) -> ExpertSelection:
    kept = (tuple(range(experts)),) * len(facts.moe_layers)
    return ExpertSelection(kept, kept, min(facts.active, experts))


def _kept(model: ModelConfig, facts: ModelFacts, experts: int, form: Literal["source", "stock"]) -> int:
    family = FAMILIES[facts.family]
    assert isinstance(family, ExpertFamily)
    layers = int(load_config(model).num_hidden_layers)
    tensors = stored_tensors(checkpoint_folder(model)) if form == "source" else _saved(model)
    selection = _selection(facts, experts)
    kept = Pruning(tensors, family, facts.moe_layers, facts.experts, layers, selection).kept()
    files = len({tensor.file for tensor in tensors.values()}) + _bytes(kept) // MAX_SHARD_BYTES
    return _bytes(kept) + header_room(tensor.name for tensor in kept) + files * header_room(())


def _kept_gguf(model: ModelConfig, facts: ModelFacts, experts: int, _: str) -> int:
    file, layers = gguf_file(model), int(load_config(model).num_hidden_layers)
    assert file is not None
    kept, _changes = kept_gguf(file, facts, _selection(facts, experts), layers, "drop")
    whole, _changes = kept_gguf(file, facts, _selection(facts, facts.experts), layers, "drop")
    headers = sum(part.stat().st_size for part in gguf_parts(file)) - _bytes(whole)
    return headers + _bytes(kept) + _GGUF_PADDING * len(kept)


def _bytes(kept: list[KeptTensor]) -> int:
    return sum(tensor.nbytes for tensor in kept)


def _saved(model: ModelConfig) -> dict[str, StoredTensor]:
    """The tensors of the model as `transformers` saves it, by name; they are in no file."""
    names = SavedNames(meta_model(model))
    return {
        name: StoredTensor(name, Path(), str(tensor.dtype), tuple(tensor.shape), 0, tensor.nbytes)
        for saved in names.tensors.values()
        for name, tensor in saved.items()
    }
