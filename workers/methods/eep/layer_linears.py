"""Weights of linear layers outside of experts and routers, of which the device needs those of the layer at work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class LayerLinears:
    """Linear layers whose weights wait on the host, by the decoder layers that they belong to.

    A decoder layer's weights are copied to the device when a pass reaches the first of its linear layers. They stay
    there, or with `one_layer` until another decoder layer's are copied. While they aren't on the device, the linear
    layers have those on the host.

    Args:
        model: Model on the host, all else of which is moved to the device.
        linears: The linear layers of every decoder layer; empty to do nothing.
        device: Device with memory of its own.
        pins: Copy the weights to pinned memory, from where they are copied several times as fast.

    Attributes:
        one_layer: True if a decoder layer's weights take the place of another's.
    """

    def __init__(
        self, model: PreTrainedModel, linears: Sequence[Sequence[nn.Linear]], device: torch.device, pins: bool
    ) -> None:
        self._device, self.one_layer = device, False
        self._loaded: set[int] = set()
        self._hosted: dict[int, list[tuple[nn.Linear, nn.Parameter]]] = {}
        for index, group in enumerate(linears):
            self._hosted[index] = []
            for linear in group:
                weight = linear.weight.data
                self._hosted[index].append((linear, _parameter(weight.pin_memory() if pins else weight)))
                linear.weight = _parameter(torch.empty(0))  # which is moved in its place
                # Not of the decoder layer, whose hooks are called even if it is skipped.
                linear.register_forward_pre_hook(lambda *_, index=index: self.load(index))
        if linears:
            model.to(device)
        self._loaded.update(self._hosted)
        self.drop()

    @property
    def waiting(self) -> int:
        """Bytes of the weights that aren't on the device."""
        layers = (layer for index, layer in self._hosted.items() if index not in self._loaded)
        return sum(weight.nbytes for layer in layers for _, weight in layer)

    @torch.inference_mode(False)  # an edit's copy of what was loaded during a forward pass must stay writable
    def load(self, index: int) -> None:
        """Have a decoder layer's weights on the device."""
        if index in self._loaded:
            return
        if self.one_layer:
            self.drop()
        for linear, weight in self._hosted.get(index, ()):
            linear.weight = _parameter(weight.data.to(self._device, non_blocking=True))
        self._loaded.add(index)

    def drop(self) -> None:
        """Free the device memory of all these weights, none of which may be replaced by an edit's."""
        while self._loaded:
            for linear, weight in self._hosted.get(self._loaded.pop(), ()):
                linear.weight = weight


def _parameter(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)
