"""Sizes of pruned checkpoints by the number of kept experts, from the headers or the config of the source alone."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from moevolve.workers.checkpoints.files import gguf_parts
from moevolve.workers.checkpoints.headers import StoredTensor, stored_tensors
from moevolve.workers.checkpoints.shards import MAX_SHARD_BYTES, header_room
from moevolve.workers.checkpoints.state import SavedNames
from moevolve.workers.contract.facts import FileSizes
from moevolve.workers.contract.methods import ExpertSelection
from moevolve.workers.contract.settings import ModelConfig
from moevolve.workers.export.gguf import kept_gguf
from moevolve.workers.export.source import SourceCheckpoint
from moevolve.workers.model.describe import meta_model

# Upper bound on the bytes before a tensor of a GGUF file, which begins at a multiple of 32 or 64.
_GGUF_PADDING = 64


def file_sizes(model: ModelConfig, form: Literal["source", "stock"]) -> FileSizes:
    """Find out how large pruned checkpoints of a mixture of experts are: in its format, or as numbers of its dtype.

    No weights are read.

    Raises:
        UserError: The checkpoint can't be read, or its experts can't be told apart.
    """
    source = SourceCheckpoint(model)
    facts, file = source.facts, source.gguf if form == "source" else None
    stored = {} if file else stored_tensors(source.folder) if form == "source" else _saved(model)
    sizes: list[int] = []
    headers = 0
    for count in (facts.experts, 1):
        rows = (tuple(range(count)),) * len(facts.moe_layers)
        selection = ExpertSelection(rows, rows, min(facts.active, count))
        if file is None:
            kept = source.pruning(stored, selection).kept()
            size = sum(tensor.nbytes for tensor in kept)
            files = len({tensor.file for tensor in stored.values()}) + size // MAX_SHARD_BYTES
            sizes.append(size + header_room(tensor.name for tensor in kept) + files * header_room(()))
        else:
            kept = kept_gguf(file, facts, selection, source.layers, "drop")[0]
            size = sum(tensor.nbytes for tensor in kept)
            # Of the source, whose experts are all kept first: a pruned file has the same metadata.
            headers = headers or sum(part.stat().st_size for part in gguf_parts(file)) - size
            sizes.append(headers + size + _GGUF_PADDING * len(kept))
    every, one = sizes
    neurons = len(facts.moe_layers) * facts.expert_neurons * facts.neuron_parameters * facts.dtype_bytes
    if facts.experts == 1:
        return FileSizes(0, every, neurons)
    # All experts of a layer are equally large, so the size is linear in their number.
    expert = -(-(every - one) // (facts.experts - 1))
    return FileSizes(every - facts.experts * expert, expert, neurons)


def _saved(model: ModelConfig) -> dict[str, StoredTensor]:
    """Return the tensors of the model as `transformers` saves it, by name; they are in no file."""
    names = SavedNames(meta_model(model))
    return {
        name: StoredTensor(name, Path(), str(tensor.dtype), tuple(tensor.shape), 0, tensor.nbytes)
        for saved in names.tensors.values()
        for name, tensor in saved.items()
    }
