"""Token sequences on their way through a decoder, layer by layer: what the residual stream is behind each."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from moevolve.workers.contract.edits import Tokens
from moevolve.workers.families.decoder import decoder_layers, skipped
from moevolve.workers.methods.shared.padding import PaddedBatch, padded_batches

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Seen = tuple[Tensor, ...]
"""What a watcher saw of a pass, each [columns of all rows, ...]; of all sequences, each [tokens, ...]."""


class Streams:
    """Runs sequences through a decoder one layer at a time; tokens are those of all sequences, one after the other.

    Attributes:
        tokens: how many.
        layers: of the decoder.
    """

    def __init__(self, model: PreTrainedModel, sequences: Sequence[Tokens]) -> None:
        """Plan the passes.

        Args:
            model: in eval mode; edits made to it later are seen.
            sequences: token ids.
        """
        self._decoder = model.get_decoder()
        self._layers = decoder_layers(model)
        device = next(model.get_input_embeddings().parameters()).device
        self._batches = tuple(padded_batches(sequences, device))
        self.tokens = sum(map(len, sequences))
        self.layers = len(self._layers)

    def embedded(self) -> Tensor:
        """What goes into the first layer, [tokens, hidden]."""
        found = _Collected(self.tokens)
        for batch in self._batches:
            found.take(batch, (self._run(batch, self.layers, self._layers[-1]),))
        return found.seen[0]

    def through(
        self, layer: int, state: Tensor, watched: list[Seen] | None = None, part: nn.Module | None = None
    ) -> tuple[Tensor, Seen]:
        """The residual stream behind a layer, or within it.

        Args:
            layer: its index.
            state: the stream before it, [tokens, hidden].
            watched: where a watcher of the layer leaves what it saw of a pass.
            part: of the layer, to which the stream goes that is asked for; None for that behind the layer.

        Returns:
            [tokens, hidden], and what was seen, by token.
        """
        found = _Collected(self.tokens)
        for batch in self._batches:
            hidden = torch.zeros(batch.ids.numel(), state.shape[1], dtype=state.dtype, device=batch.ids.device)
            hidden[batch.real] = state[batch.places.to(state.device)].to(hidden.device)
            out = self._run(batch, layer, part or self._layers[layer], hidden.view(*batch.ids.shape, -1), part is None)
            found.take(batch, (out, *(() if watched is None else watched.pop())))
        return found.seen[0], found.seen[1:]

    def _run(
        self, batch: PaddedBatch, layer: int, read: nn.Module, hidden: Tensor | None = None, behind: bool = True
    ) -> Tensor:
        """What `read` hands on, or is given, where `layer` alone runs, on `hidden`: [columns of all rows, hidden]."""
        found: list[Tensor] = []

        def keep(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
            found.append(output if behind else args[0])

        first = self._layers[:layer]
        with ExitStack() as stack:
            stack.callback(read.register_forward_hook(keep).remove)
            stack.enter_context(skipped(first, hidden))
            stack.enter_context(skipped(self._layers[layer + 1 :]))
            if hidden is not None and not first:
                stack.callback(self._layers[0].register_forward_pre_hook(_given(hidden)).remove)
            self._decoder(input_ids=batch.ids, use_cache=False)
        return found[0].flatten(0, 1)


class _Collected:
    """What passes give for their tokens, put in the sequences' order."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self.seen: Seen = ()

    def take(self, batch: PaddedBatch, seen: Seen) -> None:
        """Take in one pass."""
        if not self.seen:
            self.seen = tuple(each.new_empty((self._tokens, *each.shape[1:])) for each in seen)
        for whole, part in zip(self.seen, seen, strict=True):
            whole[batch.places.to(part.device)] = part[batch.real.to(part.device)]


def _given(hidden: Tensor) -> Any:
    def replace(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (hidden, *args[1:])

    return replace
