"""The experts of one layer: the resident originals, and the buffer that merged experts are written into."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from moevolve.evaluators.errors import UserError
from moevolve.kernels.expert_merge import merge_experts
from moevolve.workers.families.layers import MoELayer
from moevolve.workers.methods.eep.neurons import ExpertNeurons
from moevolve.workers.methods.eep.room import Content, ExpertRoom, Fill


class LayerExperts:
    """Swaps a layer's expert parameters between the originals and a buffer.

    Originals on the device are shown where they are. Originals on the host, or what is selected and merged of them, are
    copied into device memory that the layers share (`ExpertRoom`): at once where the layer has a part of its own,
    otherwise whenever a pass comes to it. Until then its parameters have the right shapes and no data (device meta).

    Attributes:
        ordinal: number of the layer among the MoE layers.
        originals: the fused tensors of all n experts, by name, on the device or on the host.
        on_host: whether the originals are kept off the device (or, on a CPU, merely apart from what the model runs on).
    """

    def __init__(self, layer: MoELayer, ordinal: int, device: torch.device, room: ExpertRoom | None = None) -> None:
        """Take over a layer's experts.

        Args:
            layer: the layer, with its original parameters.
            ordinal: its number among the MoE layers.
            device: where the model runs this layer.
            room: move the originals to host memory (pinned when `device` is CUDA), and share this room on the device
                with the other layers.
        """
        self._module = layer.experts
        self._device = device
        self._index = layer.index
        self.ordinal = ordinal
        self.on_host = on_host = room is not None
        self._room = room
        self.count = layer.count
        parameters: dict[str, nn.Parameter] = {name: getattr(layer.experts, name) for name in layer.family.tensors}
        self.originals: dict[str, Tensor] = {
            name: _to_host(parameter.data, pin=device.type == "cuda") if on_host else parameter.data
            for name, parameter in parameters.items()
        }
        self._full = None if on_host else parameters
        self._neurons = ExpertNeurons(layer.experts, self.originals)
        self._buffers: dict[str, Tensor] = {}
        self._views: dict[int, dict[str, nn.Parameter]] = {}
        self._width = 0
        self._shows_originals = not on_host
        self._aside = False
        shapes = {name: tuple(tensor.shape) for name, tensor in self.originals.items()}
        self._dtype = self.originals["down_proj"].dtype
        self._original = Content(shapes, self._dtype, partial(self._copy, list(range(self.count))))
        self._content = self._original
        if on_host:
            empty = {name: tensor.new_empty((0, *tensor.shape[1:])) for name, tensor in self.originals.items()}
            self._install(_parameters(empty), 0)

    def ready(self, unedited: bool) -> None:
        """Let what the layer is to run on be there, right before it runs.

        Args:
            unedited: whether that is all originals, whatever was shown before.

        Raises:
            UserError: the device has no room for one layer's experts.
        """
        if unedited:
            self.show_originals()
        self.materialise()

    def materialise(self) -> None:
        """Have what is shown on the device, if it isn't: passes do so by themselves, whoever reads weights asks for it.

        It stays there until another layer that has no memory of its own is shown.

        Raises:
            UserError: the device has no room for one layer's experts.
        """
        room, content = self._room, self._content
        if room is not None and not room.shown(self, content):
            self._take(room.lend if self._aside else room.place)

    def settle(self) -> None:
        """Have what is shown in memory of the layer's own, since it is about to be changed there.

        Raises:
            UserError: the device has no room for it.
        """
        if self._room is not None:
            self._take(self._room.settle)

    def vacate(self) -> None:
        """See `Tenant`; the next pass brings back what is shown."""
        self._install(_parameters(self._content.on(torch.device("meta"))), self._content.count)

    def show_originals(self) -> None:
        """Let this layer run on all n originals. Free on the device."""
        if self._full is None:
            if self._content is not self._original:
                self._show(self._original)
        elif not self._shows_originals:
            self._install(self._full, self.count)
            self._shows_originals = True

    def stand_by(self) -> None:
        """Give up what is shown, at no cost: the unedited model needs `ready` before it runs."""
        if self._room is not None:
            self._room.unsettle(self)
        if self._full is not None:
            self._install(self._full, self.count)
            self._shows_originals = True

    def show_selected(self, kept: list[int]) -> None:
        """Let the model run on copies of some originals.

        Args:
            kept: original index of each new expert, [n'].
        """
        self._show_made(len(kept), partial(self._copy, kept))

    def show_merged(self, coefficients: Tensor) -> None:
        """Let the model run on merged experts, written into the buffer.

        Args:
            coefficients: `W_EM`, float32 [n', n], on the host.
        """
        self._show_made(coefficients.shape[0], partial(self._merge, coefficients))

    def show_room(self, count: int, width: int) -> None:
        """Let the model run on the buffer, for experts of any width, with the output biases that are shown now.

        Neurons are as they were there, or anything at all: whoever asks for the room fills it.

        Args:
            count: experts, as many as are shown.
            width: neurons of each.
        """
        biases = {name: getattr(self._module, name).data.clone() for name in self._neurons.output_biases}
        if self._room is None:
            views = self._buffer(count, width)
            self._install(views, count)
            self._shows_originals = False
        else:
            self._content = Content(self._neurons.shapes(count, width), self._dtype, None)
            self.settle()
        for name, bias in biases.items():
            getattr(self._module, name).data.copy_(bias)

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Whatever else is shown in a `with` block, what is shown now comes back."""
        shown = {name: getattr(self._module, name) for name in self.originals}
        count, originals, content = self._module.num_experts, self._shows_originals, self._content
        self._aside = True
        try:
            yield
        finally:
            self._aside = False
            if self._room is not None:
                self._room.leave(self)
            self._install(shown, int(count))  # type: ignore[arg-type]
            self._shows_originals, self._content = originals, content

    def _show_made(self, count: int, fill: Fill) -> None:
        if self._room is not None:
            shapes = {name: (count, *tensor.shape[1:]) for name, tensor in self.originals.items()}
            self._show(Content(shapes, self._dtype, fill))
            return
        views = self._buffer(count)
        fill({name: view.data for name, view in views.items()})
        self._install(views, count)
        self._shows_originals = False

    def _show(self, content: Content) -> None:
        """Have something else to run on: at once in memory of the layer's own, or else when a pass comes."""
        assert self._room is not None
        self._content = content
        if not self._aside and self._room.keeps(self, content):
            self.materialise()
        else:
            self.vacate()

    def _copy(self, kept: list[int], tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            if kept == list(range(self.count)):
                tensor.copy_(self.originals[name], non_blocking=True)
                continue
            for new, old in enumerate(kept):
                tensor[new].copy_(self.originals[name][old], non_blocking=True)

    def _merge(self, coefficients: Tensor, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            merge_experts(coefficients, self.originals[name], tensor)

    def _take(self, take: Callable[[LayerExperts, Content], dict[str, Tensor]]) -> None:
        try:
            tensors = take(self, self._content)
        except torch.OutOfMemoryError as error:
            raise self._no_room(self._content.count) from error
        self._install(_parameters(tensors), self._content.count)

    def _install(self, parameters: Mapping[str, nn.Parameter], count: int) -> None:
        for name, parameter in parameters.items():
            setattr(self._module, name, parameter)
        self._module.num_experts = count  # type: ignore[assignment]

    @torch.inference_mode(False)  # a buffer made while the model runs must be writable by the next edit
    def _buffer(self, retained: int, width: int | None = None) -> dict[str, nn.Parameter]:
        """Parameters of n' experts over the buffer, which grows to the largest n' asked for and is then reused.

        Args:
            retained: n'.
            width: neurons of each; None for as many as the originals have. It begins anew with another width.
        """
        width = self._neurons.width if width is None else width
        if width == self._width and retained in self._views:
            return self._views[retained]
        if not self._buffers or width != self._width or next(iter(self._buffers.values())).shape[0] < retained:
            self._grow(retained, width)
        views = {name: nn.Parameter(buffer[:retained], requires_grad=False) for name, buffer in self._buffers.items()}
        self._views[retained] = views
        return views

    def _grow(self, retained: int, width: int) -> None:
        self._buffers.clear()
        self._views.clear()
        self._width = width
        try:
            self._buffers = {
                name: torch.empty(shape, dtype=self.originals[name].dtype, device=self._device)
                for name, shape in self._neurons.shapes(retained, width).items()
            }
        except torch.OutOfMemoryError as error:
            raise self._no_room(retained) from error

    def _no_room(self, experts: int) -> UserError:
        return UserError(
            f"no room on {self._device} for {experts} experts of layer {self._index}; retain fewer experts, "
            "keep the originals on the host (model.originals: host), or spread the model (model.device_map)"
        )


def _parameters(tensors: Mapping[str, Tensor]) -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(tensor, requires_grad=False) for name, tensor in tensors.items()}


def _to_host(tensor: Tensor, pin: bool) -> Tensor:
    host = tensor.to("cpu").contiguous()
    return host.pin_memory() if pin else host
