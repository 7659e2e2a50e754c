"""The experts of one layer: the resident originals, and the buffer that merged experts are written into."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moevolve.evaluators.errors import UserError
from moevolve.kernels.expert_merge import merge_experts
from moevolve.workers.edits.alignment import Alignment, in_place, step
from moevolve.workers.edits.rearrange import rearrange
from moevolve.workers.layout import MoELayer


class OneLayer:
    """Device memory for all n experts of one layer; layers whose originals are on the host take turns in it.

    So the unedited model runs where only the retained experts of all layers fit, at the price of copying every layer's
    experts in every pass.

    Attributes:
        holder: the layer whose experts are there now.
    """

    def __init__(self) -> None:
        self.holder: LayerExperts | None = None
        self._memory: dict[str, Tensor] = {}

    @torch.inference_mode(False)  # memory taken while the model runs must be writable later
    def room_for(self, holder: LayerExperts, like: dict[str, Tensor], device: torch.device) -> dict[str, nn.Parameter]:
        """The memory, which is `holder`'s from now on."""
        self.holder = holder
        if {name: there.shape for name, there in self._memory.items()} != {name: t.shape for name, t in like.items()}:
            self._memory.clear()
            self._memory = {name: torch.empty_like(tensor, device=device) for name, tensor in like.items()}
        # Parameters of their own, or a model would count those of all its layers as one layer's.
        return {name: nn.Parameter(memory, requires_grad=False) for name, memory in self._memory.items()}


class LayerExperts:
    """Swaps a layer's expert parameters between the originals and a preallocated buffer.

    What the originals are never changes, but in which order their neurons lie does: they are rearranged in place when
    another alignment is asked for than the last time (none counting as one), and put back bit for bit. That costs as
    much as copying them about five times, and no memory; as long as the alignment stays the same it costs nothing.

    Attributes:
        originals: the fused tensors of all n experts, by name, on the device or on the host.
        on_host: whether the originals are kept off the device (or, on a CPU, merely apart from what the model runs on).
    """

    def __init__(self, layer: MoELayer, ordinal: int, device: torch.device, lent: OneLayer | None = None) -> None:
        """Take over a layer's experts.

        Args:
            layer: the layer, with its original parameters.
            ordinal: its number among the MoE layers.
            device: where the model runs this layer.
            lent: move the originals to host memory (pinned when `device` is CUDA); what all layers' originals are then
                shown in, one after the other.
        """
        self._module = layer.experts
        self._device = device
        self._index = layer.index
        self._ordinal = ordinal
        self._alignment: Alignment | None = None
        self.on_host = on_host = lent is not None
        self._lent = lent
        self.count = layer.count
        parameters: dict[str, nn.Parameter] = {name: getattr(layer.experts, name) for name in layer.family.tensors}
        self.originals: dict[str, Tensor] = {
            name: _to_host(parameter.data, pin=device.type == "cuda") if on_host else parameter.data
            for name, parameter in parameters.items()
        }
        self._full = None if on_host else parameters
        self._buffers: dict[str, Tensor] = {}
        self._views: dict[int, dict[str, nn.Parameter]] = {}
        self._shows_originals = not on_host
        if on_host:
            self.release()

    @property
    def device(self) -> torch.device:
        """Where the model runs this layer."""
        return self._device

    def arrange(self, alignment: Alignment | None) -> bool:
        """Let the originals' neurons lie as an alignment has it, or as they were loaded.

        Returns:
            Whether anything had to be moved.
        """
        before = self._alignment
        if (before and before.fingerprint) == (alignment and alignment.fingerprint):
            return False
        gate_up, down = self.originals.values()
        loaded = in_place(self.count, down.shape[2])
        now, then = (each.codes[self._ordinal] if each else loaded for each in (before, alignment))
        if down.device != self._device and self._device.type == "cuda":
            # Copies to the device may still be reading the host's memory.
            torch.cuda.synchronize(self._device)
        rearrange({"gate_up_proj": gate_up, "down_proj": down}, step(now, then))
        self._alignment = alignment
        return True

    def show_originals(self, alignment: Alignment | None = None) -> None:
        """Let this layer run on all n originals. Free on the device; from the host they are copied every time, unless
        this is the only layer.

        Args:
            alignment: how their neurons are to lie; None as they were loaded.

        Raises:
            UserError: the device has no room for all experts.
        """
        moved = self.arrange(alignment)
        if self._full is not None:
            if not self._shows_originals or moved:
                self._install(self._full, self.count)
            self._shows_originals = True
            return
        assert self._lent is not None
        there = self._lent.holder is self and not moved
        try:
            views = self._lent.room_for(self, self.originals, self._device)
        except torch.cuda.OutOfMemoryError as error:
            raise self._no_room(self.count) from error
        if not there:
            for name, view in views.items():
                view.data.copy_(self.originals[name], non_blocking=True)
        self._install(views, self.count)

    def stand_by(self) -> None:
        """Give up what is shown, at no cost: the unedited model needs `show_originals` before it runs."""
        if self._full is not None:
            self._install(self._full, self.count)
            self._shows_originals = True

    def show_selected(self, kept: list[int], alignment: Alignment | None = None) -> None:
        """Let the model run on copies of some originals (host-resident originals only).

        Args:
            kept: original index of each new expert, [n'].
            alignment: how their neurons are to lie; None as they were loaded.
        """
        self.arrange(alignment)
        views = self._buffer(len(kept))
        for name, view in views.items():
            for new, old in enumerate(kept):
                view.data[new].copy_(self.originals[name][old], non_blocking=True)
        self._install(views, len(kept))
        self._shows_originals = False

    def show_merged(self, coefficients: Tensor, alignment: Alignment | None = None) -> None:
        """Let the model run on merged experts, written into the preallocated buffer.

        Args:
            coefficients: `W_EM`, float32 [n', n], on the host.
            alignment: how the originals' neurons are to lie; None as they were loaded.
        """
        self.arrange(alignment)
        views = self._buffer(coefficients.shape[0])
        for name, view in views.items():
            merge_experts(coefficients, self.originals[name], view.data)
        self._install(views, coefficients.shape[0])
        self._shows_originals = False

    def release(self) -> None:
        """Give the device memory of host-resident experts back until they are next shown."""
        self._buffers.clear()
        self._views.clear()
        empty = {
            name: nn.Parameter(tensor.new_empty((0, *tensor.shape[1:]), device=self._device), requires_grad=False)
            for name, tensor in self.originals.items()
        }
        self._install(empty, 0)
        self._shows_originals = False

    def _install(self, parameters: dict[str, nn.Parameter], count: int) -> None:
        for name, parameter in parameters.items():
            setattr(self._module, name, parameter)
        self._module.num_experts = count  # type: ignore[assignment]

    @torch.inference_mode(False)  # a buffer made while the model runs must be writable by the next edit
    def _buffer(self, retained: int) -> dict[str, nn.Parameter]:
        """Parameters of n' experts over the buffer, which grows to the largest n' asked for and is then reused."""
        if retained in self._views:
            return self._views[retained]
        if not self._buffers or next(iter(self._buffers.values())).shape[0] < retained:
            self._grow(retained)
        views = {name: nn.Parameter(buffer[:retained], requires_grad=False) for name, buffer in self._buffers.items()}
        self._views[retained] = views
        return views

    def _grow(self, retained: int) -> None:
        if self.on_host:
            self.release()
        self._buffers.clear()
        self._views.clear()
        try:
            self._buffers = {
                name: torch.empty((retained, *tensor.shape[1:]), dtype=tensor.dtype, device=self._device)
                for name, tensor in self.originals.items()
            }
        except torch.cuda.OutOfMemoryError as error:
            raise self._no_room(retained) from error

    def _no_room(self, experts: int) -> UserError:
        return UserError(
            f"no room on {self._device} for {experts} experts of layer {self._index}; retain fewer experts, "
            "keep the originals on the host (model.originals: host), or spread the model (model.device_map)"
        )


def _to_host(tensor: Tensor, pin: bool) -> Tensor:
    host = tensor.to("cpu").contiguous()
    return host.pin_memory() if pin else host
