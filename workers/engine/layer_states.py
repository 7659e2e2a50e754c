"""Hidden states kept for candidates to come, within a bound of bytes: what is least likely to spare work gives way."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

_HALF_LIFE = 32
"""Candidates after which having been met counts half; on stored searches 8 to 128 spared much the same."""

_REMEMBERED = 1 << 15
"""Beginnings whose weights are remembered; of more, the lighter half is forgotten."""


class LayerStates:
    """A store of hidden states by beginning (what the first l layers of a candidate are) and place (which batch).

    A state's value is how often candidates have begun like that, older ones counting less and less, times the layers it
    spares. A new state displaces only states of less value: the batches of one candidate never displace each other, and
    where there is room for some of them only, those that are there stay.

    States lie in host memory, pinned where they come from a GPU. On a CPU they are kept without a copy, and must not be
    written to.
    """

    def __init__(self, limit: int) -> None:
        """Start empty.

        Args:
            limit: bytes that states may take.
        """
        self._limit = limit
        self._nbytes = 0
        self._candidates = 0
        self._states: dict[str, dict[bytes, Tensor]] = {}
        self._layers: dict[str, int] = {}
        self._weights: dict[str, float] = {}

    @property
    def nbytes(self) -> int:
        """Bytes that states take now."""
        return self._nbytes

    def meet(self, beginnings: Mapping[str, int]) -> None:
        """Count a candidate.

        Args:
            beginnings: its beginnings, by name, with the layers that each holds, at least 1.
        """
        # Weights grow by a constant factor per candidate instead of shrinking all at once; their logarithms stay small.
        now = self._candidates / _HALF_LIFE
        self._candidates += 1
        for name, layers in beginnings.items():
            before = self._weights.get(name)
            self._weights[name] = now if before is None else now + math.log2(1 + 2 ** (before - now))
            self._layers[name] = layers
        if len(self._weights) > _REMEMBERED:
            self._forget()

    def get(self, name: str, place: bytes, device: torch.device) -> Tensor | None:
        """A kept state, on `device`; None if there is none."""
        state = self._states.get(name, {}).get(place)
        return None if state is None else state.to(device, non_blocking=True)

    def put(self, name: str, place: bytes, state: Tensor) -> None:
        """Keep a state, if it is worth more than what must go for it.

        Args:
            name: a beginning that was met.
            place: which batch; states of one name and place are the same.
            state: hidden states that nobody writes to any more.
        """
        if place in self._states.get(name, {}) or not self._make_room(state.nbytes, self._value(name)):
            return
        self._states.setdefault(name, {})[place] = _on_host(state)
        self._nbytes += state.nbytes

    def _value(self, name: str) -> float:
        """Logarithm of a beginning's value; only differences mean something."""
        return self._weights[name] + math.log2(self._layers[name])

    def _make_room(self, size: int, value: float) -> bool:
        """Whether `size` bytes are free, once states of less value are gone."""
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
    # Copied in the order of the device's work, as is the way back: nobody has to wait for it.
    return torch.empty(part.shape, dtype=part.dtype, pin_memory=True).copy_(part, non_blocking=True)
