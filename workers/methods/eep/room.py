"""Device memory for experts whose originals are on the host: some layers keep theirs there, the others take turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from moevolve.workers.contract.capacity import experts_room

Fill = Callable[[Mapping[str, Tensor]], None]


@dataclass(frozen=True, slots=True, eq=False)
class Content:
    """What a layer runs on, wherever that is put.

    Attributes:
        shapes: of its tensors by name, experts first.
        dtype: of all of them.
        fill: writes it into tensors of these shapes; None where whoever asked for the room fills it.
    """

    shapes: Mapping[str, tuple[int, ...]]
    dtype: torch.dtype
    fill: Fill | None = field(repr=False)

    @property
    def count(self) -> int:
        """Experts."""
        return self.shapes["down_proj"][0]

    @property
    def nbytes(self) -> int:
        return sum(map(prod, self.shapes.values())) * self.dtype.itemsize

    @torch.inference_mode(False)  # memory taken while the model runs must be writable later
    def on(self, device: torch.device) -> dict[str, Tensor]:
        """Tensors for it, with anything in them."""
        return {name: torch.empty(shape, dtype=self.dtype, device=device) for name, shape in self.shapes.items()}


class Tenant(Protocol):
    """A layer that needs room.

    Attributes:
        ordinal: its number among the MoE layers.
    """

    ordinal: int

    def vacate(self) -> None:
        """Its room is given to another layer."""
        ...


@dataclass(slots=True, eq=False)
class _Place:
    """Memory for one layer's experts.

    Attributes:
        tenant: whose it is.
        content: what it was taken for.
        tensors: with `content` in them, once it is filled.
        settled: whether they may have been changed since, so that nothing but they has what the layer runs on.
    """

    tenant: Tenant
    content: Content
    tensors: dict[str, Tensor]
    settled: bool = False


class ExpertRoom:
    """Memory on one device for what all MoE layers of a model run on.

    Passes go through the layers from the first to the last, again and again. Of layers that don't all fit, the first
    ones keep their experts and the others are brought over one after the other, in every pass: whatever is dropped is
    needed again before what is kept, so no cache that changes does better. How many keep theirs follows from what one
    layer runs on and from how much memory there is, and changes no result.

    Args:
        device: where the model runs.
        layers: how many MoE layers it has.
        beside: bytes that passes need, if that is known; experts may take the rest of what is free when the first of
            them are brought over (`moevolve.workers.contract.capacity.experts_room`).
    """

    def __init__(self, device: torch.device, layers: int, beside: int | None = None) -> None:
        self._device, self._layers, self._beside = device, layers, beside
        self._limit: int | None = None
        self._own: dict[int, _Place] = {}
        self._shared: _Place | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that are taken now."""
        places = (*self._own.values(), *(() if self._shared is None else (self._shared,)))
        return sum(place.content.nbytes for place in places)

    def keeps(self, tenant: Tenant, content: Content) -> bool:
        """Whether a layer is to have memory of its own, where all layers run on as much as it does."""
        return tenant.ordinal < kept_layers(self._layers, content.nbytes, self._allowed)

    def shown(self, tenant: Tenant, content: Content) -> bool:
        """Whether what a layer runs on is there."""
        own = self._own.get(tenant.ordinal)
        return any(place is not None and place.content is content for place in (own, self._shared))

    def place(self, tenant: Tenant, content: Content) -> dict[str, Tensor]:
        """Bring over what a layer runs on, to memory of its own or to that which is shared.

        Raises:
            torch.OutOfMemoryError: there is no room even for one layer's.
        """
        if not self.keeps(tenant, content):
            self._give_up(tenant.ordinal)
            return self.lend(tenant, content)
        try:
            return self._owned(tenant, content).tensors
        except torch.OutOfMemoryError:
            # Something else has the memory that was free. Layers that have theirs stay, this one takes turns.
            self._give_up(tenant.ordinal)
            self._limit = self.nbytes
            return self.lend(tenant, content)

    def settle(self, tenant: Tenant, content: Content) -> dict[str, Tensor]:
        """Bring over what a layer runs on to memory of its own, where it stays: it is going to be changed there.

        Raises:
            torch.OutOfMemoryError: there is no room for it.
        """
        place = self._own.get(tenant.ordinal)
        if place is None or place.content is not content:
            place = self._owned(tenant, content)
        place.settled = True
        return place.tensors

    def lend(self, tenant: Tenant, content: Content) -> dict[str, Tensor]:
        """Bring over what a layer runs on to memory that is another layer's next.

        Raises:
            torch.OutOfMemoryError: there is no room for it.
        """
        before, self._shared = self._shared, None
        if before is not None and before.tenant is not tenant:
            before.tenant.vacate()
        fits = before is not None and (before.content.shapes, before.content.dtype) == (content.shapes, content.dtype)
        if before is not None and fits:
            tensors = before.tensors
        else:
            del before
            self._make_room(content.nbytes, tenant.ordinal)
            tensors = content.on(self._device)
        if content.fill is not None:
            content.fill(tensors)
        self._shared = _Place(tenant, content, tensors)
        return tensors

    def leave(self, tenant: Tenant) -> None:
        """A layer no longer runs on what it was lent."""
        if self._shared is not None and self._shared.tenant is tenant:
            self._shared = None

    def unsettle(self, tenant: Tenant) -> None:
        """What was changed in a layer's memory isn't wanted any more."""
        place = self._own.get(tenant.ordinal)
        if place is not None:
            place.settled = False

    @property
    def _allowed(self) -> int:
        if self._limit is None:
            self._limit = experts_room(self._device, self._beside)
        return self._limit

    def _owned(self, tenant: Tenant, content: Content) -> _Place:
        if self._shared is not None and self._shared.tenant is tenant:
            self._shared = None
            tenant.vacate()  # or the layer keeps what it was lent while it gets memory of its own
        before = self._own.pop(tenant.ordinal, None)
        fits = before is not None and (before.content.shapes, before.content.dtype) == (content.shapes, content.dtype)
        if before is not None and fits:
            tensors = before.tensors
        else:
            if before is not None:
                tenant.vacate()  # or the layer keeps what it had while it gets something else
            del before
            self._make_room(content.nbytes, tenant.ordinal)
            tensors = content.on(self._device)
        if content.fill is not None:
            content.fill(tensors)
        place = self._own[tenant.ordinal] = _Place(tenant, content, tensors)
        return place

    def _make_room(self, size: int, ordinal: int) -> None:
        """Give up what is out of date, as far as it is in the way: what layers have that are farthest behind."""
        if self.nbytes + size > self._allowed and self._shared is not None:
            self._shared.tenant.vacate()
            self._shared = None
        for other in sorted(self._own, reverse=True):
            if self.nbytes + size <= self._allowed:
                return
            if other != ordinal and not self._own[other].settled:
                self._give_up(other)

    def _give_up(self, ordinal: int) -> None:
        place = self._own.pop(ordinal, None)
        if place is not None:
            place.tenant.vacate()


def kept_layers(layers: int, size: int, allowed: int) -> int:
    """How many layers keep their experts on the device.

    Args:
        layers: how many there are.
        size: bytes of what one of them runs on.
        allowed: bytes that experts may take.

    Returns:
        All of them if they fit; else as many as fit beside the memory that the others take turns in.
    """
    fitting = allowed // max(size, 1)
    return layers if fitting >= layers else max(fitting - 1, 0)
