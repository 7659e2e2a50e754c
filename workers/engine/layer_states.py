"""A bounded cache of hidden states that later candidates may reuse; the least useful states are evicted."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

_HALF_LIFE = 32
"""Number of candidates after which an occurrence counts half. On stored searches 8 to 128 saved about the same work."""

_MAX_PREFIXES = 1 << 15
"""Number of prefixes whose weights are kept; when there are more, the lighter half is dropped."""


class LayerStates:
    """A cache of hidden states by prefix (the edits of a candidate's first l layers) and batch.

    A state's value is the number of candidates with its prefix, older ones counting less and less, times the number of
    layers that it saves. A new state evicts only states of lower value, so the batches of one candidate never evict
    each other: if there is memory for some of them only, the earlier ones stay.

    States lie in host memory, pinned if they come from a GPU. On a CPU they are kept without a copy and must not be
    modified.

    Args:
        limit: Maximum size of the states in bytes.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._nbytes = 0
        self._candidates = 0
        self._states: dict[str, dict[bytes, Tensor]] = {}
        self._layers: dict[str, int] = {}
        self._weights: dict[str, float] = {}

    @property
    def nbytes(self) -> int:
        """Current size of the states in bytes."""
        return self._nbytes

    def count(self, prefixes: Mapping[str, int]) -> None:
        """Count a new candidate.

        Args:
            prefixes: Number of layers, at least 1, by name of each of the candidate's prefixes.
        """
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
        """Return a cached state on `device`; None if there is none."""
        state = self._states.get(name, {}).get(batch)
        return None if state is None else state.to(device, non_blocking=True)

    def put(self, name: str, batch: bytes, state: Tensor) -> None:
        """Cache a state, unless it would have to evict states of at least its value.

        Args:
            name: Name of a counted prefix.
            batch: Identifier of the batch. States with equal name and batch are equal.
            state: Hidden states, which must not be modified any more.
        """
        if batch in self._states.get(name, {}) or not self._make_room(state.nbytes, self._value(name)):
            return
        self._states.setdefault(name, {})[batch] = _on_host(state)
        self._nbytes += state.nbytes

    def _value(self, name: str) -> float:
        """Logarithm of a prefix's value, up to a constant."""
        return self._weights[name] + math.log2(self._layers[name])

    def _make_room(self, size: int, value: float) -> bool:
        """Evict states of lower value until `size` bytes are free; False if that isn't possible."""
        if size > self._limit:
            return False
        while self._nbytes + size > self._limit:
            least = min(self._states, key=self._value)
            if self._value(least) >= value:
                return False
            states = self._states[least]
            self._nbytes -= states.popitem()[1].nbytes
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
