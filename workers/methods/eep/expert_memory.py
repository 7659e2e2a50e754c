"""Device memory for experts whose originals are on the host: some layers keep theirs, the others share the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Protocol

import torch
from torch import Tensor

# Writes experts into tensors, given by name.
Fill = Callable[[Mapping[str, Tensor]], None]


@dataclass(frozen=True, slots=True, eq=False)
class ExpertSpec:
    """The experts that a layer is to run on, independent of where they are stored.

    Attributes:
        shapes: Tensor shapes by name; the first dimension counts experts.
        fill: Writes the experts into tensors of these shapes. None if the caller writes them after allocation.
    """

    shapes: Mapping[str, tuple[int, ...]]
    dtype: torch.dtype
    fill: Fill | None = field(repr=False)

    @property
    def count(self) -> int:
        """Number of experts."""
        return self.shapes["down_proj"][0]

    @property
    def nbytes(self) -> int:
        return sum(map(prod, self.shapes.values())) * self.dtype.itemsize

    @torch.inference_mode(False)  # memory allocated during a forward pass must stay writable for later edits
    def allocate(self, device: torch.device) -> dict[str, Tensor]:
        """Uninitialised tensors of these shapes, by name."""
        return {name: torch.empty(shape, dtype=self.dtype, device=device) for name, shape in self.shapes.items()}


class MemoryUser(Protocol):
    """A layer whose experts are in the memory. `ordinal` is its index among the MoE layers."""

    ordinal: int

    def evict(self) -> None:
        """Drop the tensors, whose memory is about to be reused."""


@dataclass(slots=True, eq=False)
class _Allocation:
    """Device tensors of one layer's experts.

    Attributes:
        modified: True if the tensors may have changed after `spec` filled them, so that they can't be rebuilt.
    """

    user: MemoryUser
    spec: ExpertSpec
    tensors: dict[str, Tensor]
    modified: bool = False


class ExpertMemory:
    """Memory on one device for the experts of all MoE layers of a model.

    Forward passes visit the layers in order, again and again. If the experts of all layers don't fit, the first layers
    keep theirs on the device and the others are copied into one shared allocation in every pass. In such a cyclic
    access pattern no eviction policy does better, because whatever it evicts is needed before what it keeps. The number
    of layers that keep their experts follows from their size and the available memory, and doesn't affect results.

    All methods that load experts raise `torch.OutOfMemoryError` if the device can't hold even one layer's.

    Args:
        device: Device that the model runs on.
        layers: Number of MoE layers of the model.
        room: Returns the bytes that experts may take; called when the first of them are loaded.

    Attributes:
        by_layer: Number of edits that are applied one layer at a time now; several take turns on every layer.
    """

    def __init__(self, device: torch.device, layers: int, room: Callable[[], int]) -> None:
        self._device, self._layers, self._room = device, layers, room
        self._limit: int | None = None
        self.by_layer = 0
        # By ordinal of the layer; the shared allocation comes last.
        self._allocations: dict[int, _Allocation] = {}
        self._shared = layers

    @property
    def nbytes(self) -> int:
        """Bytes allocated now."""
        return sum(allocation.spec.nbytes for allocation in self._allocations.values())

    def keeps(self, user: MemoryUser, spec: ExpertSpec) -> bool:
        """Return whether a layer gets memory of its own, assuming that every layer's experts are as large as `spec`."""
        return user.ordinal < kept_layers(self._layers, spec.nbytes, self._allowed)

    def holds(self, user: MemoryUser, spec: ExpertSpec) -> bool:
        """Return whether a layer's experts are on the device."""
        found = (self._allocations.get(place) for place in (user.ordinal, self._shared))
        return any(allocation is not None and allocation.spec is spec for allocation in found)

    def load(self, user: MemoryUser, spec: ExpertSpec) -> dict[str, Tensor]:
        """Copy a layer's experts to memory of its own or to the shared allocation."""
        if self.keeps(user, spec):
            try:
                return self._load_own(user, spec).tensors
            except torch.OutOfMemoryError:
                # Something else took the memory that was free. Layers that have their own keep it, this one shares.
                self._limit = self.nbytes
        self._evict(user.ordinal)
        return self._load(self._shared, user, spec).tensors

    def load_writable(self, user: MemoryUser, spec: ExpertSpec) -> dict[str, Tensor]:
        """Copy a layer's experts to memory of its own and keep them there, because the caller will change them."""
        allocation = self._allocations.get(user.ordinal)
        if allocation is None or allocation.spec is not spec:
            allocation = self._load_own(user, spec)
        allocation.modified = True
        return allocation.tensors

    def discard_changes(self, user: MemoryUser) -> None:
        """Allow a layer's changed experts to be overwritten."""
        if user.ordinal in self._allocations:
            self._allocations[user.ordinal].modified = False

    def release(self, user: MemoryUser) -> None:
        """Free a layer's experts, changed or not."""
        self._evict(user.ordinal)
        if self._shares(user):
            self._evict(self._shared)

    @contextmanager
    def one_layer(self) -> Iterator[None]:
        """Context manager in which no layer keeps its experts unless it changes them; before it frees all.

        Several edits that take turns on every layer enter it one after the other.
        """
        self.by_layer += 1
        for place in [*self._allocations]:
            self._evict(place)
        try:
            yield
        finally:
            self.by_layer -= 1

    @property
    def _allowed(self) -> int:
        if self.by_layer:
            return 0
        if self._limit is None:
            self._limit = self._room()
        return self._limit

    def _shares(self, user: MemoryUser) -> bool:
        return self._shared in self._allocations and self._allocations[self._shared].user is user

    def _load_own(self, user: MemoryUser, spec: ExpertSpec) -> _Allocation:
        if self._shares(user):
            self._evict(self._shared)
        return self._load(user.ordinal, user, spec)

    def _load(self, place: int, user: MemoryUser, spec: ExpertSpec) -> _Allocation:
        """Fill the allocation at a place, or a new one if the experts have other shapes."""
        before = self._allocations.pop(place, None)
        fits = before is not None and (before.spec.shapes, before.spec.dtype) == (spec.shapes, spec.dtype)
        if before is not None and not (fits and before.user is user):
            before.user.evict()  # or a layer would hold the old tensors while they are overwritten or replaced
        if before is not None and fits:
            tensors = before.tensors
        else:
            del before
            self._free_space(spec.nbytes, user.ordinal)
            tensors = spec.allocate(self._device)
        if spec.fill is not None:
            spec.fill(tensors)
        allocation = self._allocations[place] = _Allocation(user, spec, tensors)
        return allocation

    def _free_space(self, size: int, ordinal: int) -> None:
        """Evict other layers' experts, deepest first and modified ones never, until `size` bytes are allowed."""
        for other in sorted(self._allocations, reverse=True):
            if self.nbytes + size <= self._allowed:
                return
            if other != ordinal and not self._allocations[other].modified:
                self._evict(other)

    def _evict(self, place: int) -> None:
        allocation = self._allocations.pop(place, None)
        if allocation is not None:
            allocation.user.evict()


def kept_layers(layers: int, size: int, allowed: int) -> int:
    """Number of layers that keep their experts on the device, of `size` bytes each and `allowed` bytes together.

    All do if they fit. Otherwise as many as fit besides one allocation that the others share.
    """
    fitting = allowed // max(size, 1)
    return layers if fitting >= layers else max(fitting - 1, 0)
