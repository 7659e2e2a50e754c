"""Reuse of hidden states between candidates whose first layers are equal.

The input of decoder layer l for a batch depends only on the batch and on the layers before l. A child that changes some
layers of its parent has the parent's hidden states up to the first of them, bit for bit, so its passes start there.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from moevolve.workers.families.decoder import can_start, decoder_layers, skipped

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Number of candidates after which an occurrence counts half. On stored searches 8 to 128 saved about the same work.
_HALF_LIFE = 32

# Number of prefixes whose weights are kept; when there are more, the lighter half is dropped.
_MAX_PREFIXES = 1 << 15


class LayerStates:
    """A cache of hidden states by prefix (the edits of a candidate's first l layers) and batch.

    A state's value is the number of candidates with its prefix, older ones counting less and less, times the number of
    layers that it saves. A new state evicts only states of lower value, so the batches of one candidate never evict
    each other: if there is memory for some of them only, the earlier ones stay.

    States lie in host memory, pinned if they come from a GPU. On a CPU they are kept without a copy and must not be
    modified.

    Args:
        limit: Maximum size of the states in bytes.

    Attributes:
        nbytes: Their current size.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.nbytes = 0
        self._candidates = 0
        self._states: dict[str, dict[bytes, Tensor]] = {}
        self._layers: dict[str, int] = {}
        self._weights: dict[str, float] = {}

    def count(self, prefixes: Mapping[str, int]) -> None:
        """Count a new candidate with this number of layers, at least 1, by name of each of its prefixes."""
        # New occurrences count for more and more, which equals decay of the old ones. Weights are stored as logarithms.
        now = self._candidates / _HALF_LIFE
        self._candidates += 1
        for name, layers in prefixes.items():
            before = self._weights.get(name)
            self._weights[name] = now if before is None else now + math.log2(1 + 2 ** (before - now))
            self._layers[name] = layers
        if len(self._weights) > _MAX_PREFIXES:
            self._forget()

    def get(self, name: str, batch: bytes, device: torch.device) -> Tensor | None:
        """Return a cached state on `device`."""
        state = self._states.get(name, {}).get(batch)
        return None if state is None else state.to(device, non_blocking=True)

    def put(self, name: str, batch: bytes, state: Tensor) -> None:
        """Cache a state of a counted prefix, unless it would have to evict states of at least its value.

        States with equal name and batch are equal.
        """
        if batch in self._states.get(name, {}) or not self._make_room(state.nbytes, self._value(name)):
            return
        self._states.setdefault(name, {})[batch] = _on_host(state)
        self.nbytes += state.nbytes

    def _value(self, name: str) -> float:
        """Logarithm of a prefix's value, up to a constant."""
        return self._weights[name] + math.log2(self._layers[name])

    def _make_room(self, size: int, value: float) -> bool:
        """Evict states of lower value until `size` bytes are free; False if that isn't possible."""
        if size > self._limit:
            return False
        while self.nbytes + size > self._limit:
            least = min(self._states, key=self._value)
            if self._value(least) >= value:
                return False
            states = self._states[least]
            self.nbytes -= states.popitem()[1].nbytes
            if not states:
                del self._states[least]
        return True

    def _forget(self) -> None:
        ordered = sorted(self._weights, key=self._weights.__getitem__)
        for name in ordered[: len(ordered) // 2]:
            if name not in self._states:
                del self._weights[name], self._layers[name]


def _on_host(part: Tensor) -> Tensor:
    if part.device.type == "cpu":
        return part
    # Both copies are queued on the device's stream, so the host needn't wait for them.
    return torch.empty(part.shape, dtype=part.dtype, pin_memory=True).copy_(part, non_blocking=True)


LayerKeys = Callable[[], "tuple[str, ...] | None"]
"""Returns a key per decoder layer of the current model, where equal keys mean equal functions, bit for bit; None if
unknown."""


class LayerReuse:
    """Caches hidden states of passes, and lets later passes over the same tokens start from them.

    States are cached only where a layer's key differs from the previous one, because candidates that edit groups of
    layers alike don't differ within a group, and only before layers that need nothing else of earlier ones. Models
    whose decoder isn't a plain list of layers run unchanged. For `limit` see `LayerStates`.

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
    def over(self, ids: Tensor, mask: Tensor | None, positions: Tensor, later: int) -> Iterator[None]:
        """Context manager for one pass over these columns, with an empty KV cache.

        Skipped layers add nothing to the cache (see `moevolve.workers.engine.forward.Forward.complete`).

        Args:
            ids, mask, positions: Inputs of the pass. They also identify packed sequences and their attention, because
                the depths of a prefix tree's tokens in depth-first order determine the tree.
            later: See `Columns`; with other blocks last digits differ.
        """
        keys = self._keys()
        if keys is None or len(keys) != len(self._layers) or len(keys) < 2:
            yield
            return
        self._count(keys)
        batch = _digest(ids, positions, *(() if mask is None else (mask,))) + later.to_bytes(4)
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
            if key != keys[layer] and can_start(self._layers, layer):
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
