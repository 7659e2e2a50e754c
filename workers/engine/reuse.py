"""Reuse of hidden states between candidates whose first layers are equal.

The input of decoder layer l for a batch depends only on the batch and on the layers before l. A child that changes some
layers of its parent has the parent's hidden states up to the first of them, bit for bit, so its passes start there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from moevolve.workers.engine.layer_states import LayerStates
from moevolve.workers.families.decoder import decoder_layers, needs_carried, skipped

if TYPE_CHECKING:
    from transformers import PreTrainedModel


LayerKeys = Callable[[], "tuple[str, ...] | None"]
"""Returns a key per decoder layer of the current model, where equal keys mean equal functions, bit for bit; None if
unknown."""


class LayerReuse:
    """Caches hidden states of passes, and lets later passes over the same tokens start from them.

    States are cached only where a layer's key differs from the previous one, because candidates that edit groups of
    layers alike don't differ within a group, and only before layers that need nothing else of earlier ones. Models
    whose decoder isn't a plain list of layers run unchanged.

    Args:
        model: Causal language model.
        keys: Returns the keys of the model's current layers.
        limit: Maximum size of the cached states in host memory, in bytes.

    Attributes:
        work: Columns times layers of all passes, as if nothing were reused.
        saved: The part of `work` that wasn't run.
    """

    def __init__(self, model: PreTrainedModel, keys: LayerKeys, limit: int) -> None:
        self._layers = decoder_layers(model)
        self._keys = keys
        self._states = LayerStates(limit)
        self._current: tuple[str, ...] | None = None
        self._prefixes: dict[int, str] = {}
        self.work = self.saved = 0

    @contextmanager
    def over(self, ids: Tensor, mask: Tensor | None, positions: Tensor) -> Iterator[None]:
        """Context manager for one pass over these columns, with an empty KV cache.

        Skipped layers add nothing to the cache (see `moevolve.workers.engine.forward.Forward.complete`).

        Args:
            ids, mask, positions: Inputs of the pass. They also identify packed sequences and their attention, because
                the depths of a prefix tree's tokens in depth-first order determine the tree.
        """
        keys = self._keys()
        if keys is None or len(keys) != len(self._layers) or len(keys) < 2:
            yield
            return
        self._count(keys)
        batch = _digest(ids, positions, *(() if mask is None else (mask,)))
        first, state = self._longest_prefix(batch, ids.device)
        self.work += ids.numel() * len(self._layers)
        self.saved += ids.numel() * first
        with ExitStack() as stack:
            stack.enter_context(skipped(self._layers[:first], state))
            for layer, name in self._prefixes.items():
                if layer > first:
                    stack.enter_context(self._caching(layer, name, batch))
            yield

    def _longest_prefix(self, batch: bytes, device: torch.device) -> tuple[int, Tensor | None]:
        """Number of layers that can be skipped and the input of the next one; (0, None) if none can."""
        for layer in sorted(self._prefixes, reverse=True):
            state = self._states.get(self._prefixes[layer], batch, device)
            if state is not None:
                return layer, state
        return 0, None

    def _count(self, keys: tuple[str, ...]) -> None:
        """Count the candidate with these keys, if it isn't that of the previous pass."""
        if keys == self._current:
            return
        self._current, self._prefixes = keys, {}
        prefix = hashlib.sha256()
        for layer, key in enumerate(keys[:-1], start=1):
            prefix.update(f"{key} ".encode())
            if key != keys[layer] and not needs_carried(self._layers[layer]):
                self._prefixes[layer] = prefix.hexdigest()
        self._states.count({name: layer for layer, name in self._prefixes.items()})

    @contextmanager
    def _caching(self, layer: int, name: str, batch: bytes) -> Iterator[None]:
        """Cache the input of a layer, which follows the prefix `name`."""

        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            if args and isinstance(args[0], Tensor):
                self._states.put(name, batch, args[0])

        handle = self._layers[layer].register_forward_pre_hook(hook)
        try:
            yield
        finally:
            handle.remove()


def _digest(*columns: Tensor) -> bytes:
    digest = hashlib.blake2b(repr([part.shape for part in columns]).encode(), digest_size=16)
    for part in columns:
        digest.update(part.cpu().numpy().tobytes())
    return digest.digest()
