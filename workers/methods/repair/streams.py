"""The residual stream of token sequences in a decoder, computed one layer at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from moevolve.workers.contract.capacity import release_freed_memory
from moevolve.workers.contract.edits import Tokens
from moevolve.workers.families.decoder import decoder_layers, decoder_of, only_layer
from moevolve.workers.methods.shared.outputs import Recorded
from moevolve.workers.methods.shared.passes import PaddedBatch, padded_batches

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class ResidualStreams:
    """Runs sequences through a decoder in eval mode one layer at a time, with the edit that it has at that time.

    Tokens are those of all sequences, one after the other.

    Attributes:
        device: Device of the batches.
        tokens: Number of tokens.
        layers: Number of decoder layers.
    """

    def __init__(self, model: PreTrainedModel, sequences: Sequence[Tokens]) -> None:
        self._model = model
        self._decoder = decoder_of(model)
        self._layers = decoder_layers(model)
        self.device = next(model.get_input_embeddings().parameters()).device
        self._batches = tuple(padded_batches(sequences, self.device))
        self.tokens = sum(map(len, sequences))
        self.layers = len(self._layers)

    def embeddings(self) -> Tensor:
        """Input of the first layer, [tokens, hidden]."""
        found = _InTokenOrder(self.tokens)
        for batch in self._batches:
            found.add(batch, (self._run(batch, self.layers),))
        return found.tensors[0]

    def run_layer(
        self, layer: int, state: Tensor, records: list[Recorded] | None = None, part: nn.Module | None = None
    ) -> tuple[Tensor, Recorded]:
        """Compute the residual stream after a layer, or before a part of it, from that before the layer.

        Residual streams are [tokens, hidden]. `records` is the list to which `LayerOutput.recording` appends in every
        pass; the recorded tensors, each [tokens, ...], are returned as well.
        """
        found = _InTokenOrder(self.tokens)
        for batch in self._batches:
            hidden = torch.zeros(batch.ids.numel(), state.shape[1], dtype=state.dtype, device=batch.ids.device)
            hidden[batch.real] = state[batch.places.to(state.device)].to(hidden.device)
            out = self._run(batch, layer, hidden.view(*batch.ids.shape, -1), part)
            found.add(batch, (out, *(() if records is None else records.pop())))
        release_freed_memory()  # otherwise a fit needs memory on top of the layer's activations
        return found.tensors[0], found.tensors[1:]

    def _run(
        self, batch: PaddedBatch, layer: int, hidden: Tensor | None = None, part: nn.Module | None = None
    ) -> Tensor:
        """Run one layer of the decoder as `only_layer` does, [rows * columns, hidden]."""
        with only_layer(self._layers, layer, hidden, part) as found:
            self._decoder(input_ids=batch.ids, use_cache=False)
        return found[0].flatten(0, 1)


class _InTokenOrder:
    """Collects tensors of padded batches, without padding and in the order of the sequences' tokens."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self.tensors: Recorded = ()

    def add(self, batch: PaddedBatch, tensors: Recorded) -> None:
        """Add one batch's tensors, each [rows * columns, ...]."""
        if not self.tensors:
            self.tensors = tuple(each.new_empty((self._tokens, *each.shape[1:])) for each in tensors)
        for whole, part in zip(self.tensors, tensors, strict=True):
            whole[batch.places.to(part.device)] = part[batch.real.to(part.device)]
