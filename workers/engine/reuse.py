"""Reuse of activations: a candidate starts at its first layer that no candidate before it had behind the same layers.

What goes into decoder layer l of a batch depends on the batch and on the layers before l only. A child that changes
some layers of its parent has the parent's hidden states up to the first of them, bit for bit: they needn't be computed
again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from moevolve.workers.engine.layer_states import LayerStates
from moevolve.workers.families.decoder import decoder_layers, skipped

if TYPE_CHECKING:
    from transformers import PreTrainedModel


LayerKeys = Callable[[], "tuple[str, ...] | None"]
"""Tells what every decoder layer of the model is now: equal keys, equal functions, bit for bit; None if unknown."""


class LayerReuse:
    """Keeps hidden states of passes, and lets later passes over the same tokens start from them.

    States are kept where a layer's key differs from the one before it: within a group of layers that are edited alike,
    candidates don't part. Models whose decoder isn't a plain list of layers run as ever.

    Attributes:
        work: columns x layers of the passes so far, as if nothing were reused.
        spared: of these, those that weren't run.
    """

    def __init__(self, model: PreTrainedModel, keys: LayerKeys, limit: int) -> None:
        """Start with nothing kept.

        Args:
            model: a `transformers` causal LM.
            keys: of the model as it is at that moment.
            limit: bytes of host memory for hidden states.
        """
        self._layers = decoder_layers(model)
        self._keys = keys
        self._states = LayerStates(limit)
        self._now: tuple[str, ...] | None = None
        self._borders: dict[int, str] = {}
        self.work = self.spared = 0

    @contextmanager
    def over(self, ids: Tensor, mask: Tensor | None, positions: Tensor) -> Iterator[None]:
        """For the length of a `with` block that runs the model once over these columns, without cached ones before.

        Layers that are left out cache nothing (see `moevolve.workers.engine.forward.Forward.complete`).

        Args:
            ids, mask, positions: the columns of a pass. They tell packed sequences and their attention, too: with a
                tree's tokens in depth-first order, its depths say what it is.
        """
        keys = self._keys()
        if keys is None or len(keys) != len(self._layers) or len(keys) < 2:
            yield
            return
        self._meet(keys)
        place = _place(ids, positions, *(() if mask is None else (mask,)))
        first, state = self._longest(place, ids.device)
        self.work += ids.numel() * len(self._layers)
        self.spared += ids.numel() * first
        with ExitStack() as stack:
            stack.enter_context(skipped(self._layers[:first], state))
            for layer, name in self._borders.items():
                if layer > first:
                    stack.enter_context(self._keeping(layer, name, place))
            yield

    def _longest(self, place: bytes, device: torch.device) -> tuple[int, Tensor | None]:
        """How many layers may be left out, and what goes into the next; 0 and nothing if none may."""
        for layer in sorted(self._borders, reverse=True):
            state = self._states.get(self._borders[layer], place, device)
            if state is not None:
                return layer, state
        return 0, None

    def _meet(self, keys: tuple[str, ...]) -> None:
        """Take note of the model's keys, if they aren't those of the pass before."""
        if keys == self._now:
            return
        self._now, self._borders = keys, {}
        beginning = hashlib.sha256()
        for layer, key in enumerate(keys[:-1], start=1):
            beginning.update(f"{key} ".encode())
            if key != keys[layer]:
                self._borders[layer] = beginning.hexdigest()
        self._states.meet({name: layer for layer, name in self._borders.items()})

    @contextmanager
    def _keeping(self, layer: int, name: str, place: bytes) -> Iterator[None]:
        """Keep what goes into a layer.

        Args:
            layer: its index.
            name: the beginning that ends before it.
            place: which pass it is.
        """

        def keep(module: nn.Module, args: tuple[Any, ...]) -> None:
            if args and isinstance(args[0], Tensor):
                self._states.put(name, place, args[0])

        handle = self._layers[layer].register_forward_pre_hook(keep)
        try:
            yield
        finally:
            handle.remove()


def _place(*columns: Tensor) -> bytes:
    """What a pass runs over, in short."""
    digest = hashlib.blake2b(repr([part.shape for part in columns]).encode(), digest_size=16)
    for part in columns:
        digest.update(part.cpu().numpy().tobytes())
    return digest.digest()
