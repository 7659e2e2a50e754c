"""The experts that one MoE layer runs on: its originals, copies of some of them, or merged ones in a buffer.

A shared expert, which every token uses beside the routed ones, has its own or changed output weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from moevolve.evaluators.errors import UserError
from moevolve.kernels.expert_merge import merge_experts
from moevolve.workers.checkpoints.stored_experts import StoredLayer
from moevolve.workers.contract.methods import ExpertFiles
from moevolve.workers.families.layers import MoELayer
from moevolve.workers.methods.eep.expert_memory import ExpertMemory, ExpertSpec, Fill, MemoryUser
from moevolve.workers.methods.eep.neurons import ExpertNeurons
from moevolve.workers.methods.shared.dense_outputs import CopyOnWriteWeights

# Number of tokens whose activations of a shared expert are computed at once.
_ROWS = 1024


class LayerExperts:
    """Switches a layer's expert parameters between the originals and a buffer.

    Originals on the device are used in place. Originals on the host or in files, and experts selected or merged from
    them, are copied to device memory that all layers share (`ExpertMemory`): at once if the layer has memory of its
    own, otherwise whenever a forward pass reaches the layer. Until then its parameters are on the meta device, with
    the right shapes.

    Methods that load experts raise `UserError` if the device can't hold one layer's.

    Attributes:
        ordinal: Index of the layer among the MoE layers.
        originals: Fused tensors of all n experts, by name, on the device or on the host, where those in files are read
            to on access.
        on_host: True if the originals are kept in host memory or in files, separate from the tensors that the model
            runs on.
    """

    def __init__(
        self,
        layer: MoELayer,
        ordinal: int,
        device: torch.device,
        memory: ExpertMemory | None = None,
        stored: ExpertFiles | None = None,
    ) -> None:
        """Take over the original experts of a layer that the model runs on a device.

        If they aren't to stay there, `memory` is what the layers share. They are then moved to host memory, pinned for
        CUDA, unless they stay in files, `stored`.
        """
        self._module, self._index, self._count = layer.experts, layer.index, layer.count
        self._device, self._memory = device, memory
        self.ordinal, self.on_host = ordinal, memory is not None
        parameters: dict[str, nn.Parameter] = {name: getattr(layer.experts, name) for name in layer.family.tensors}
        self.originals: Mapping[str, Tensor] = {name: parameter.data for name, parameter in parameters.items()}
        if stored is not None:
            self.originals = stored.layer(layer.index, parameters)
        elif self.on_host:
            hosted = {name: each.to("cpu").contiguous() for name, each in self.originals.items()}
            pins = device.type == "cuda"
            self.originals = {name: each.pin_memory() if pins else each for name, each in hosted.items()}
        self._full = None if self.on_host else parameters
        self._shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
        # Reading neurons takes shapes only, for which tensors on the meta device do.
        self._neurons = ExpertNeurons(layer.experts, self.originals if stored is None else parameters)
        self._buffers: dict[str, Tensor] = {}
        self._dtype = parameters["down_proj"].dtype
        self._original_spec = ExpertSpec(self._shapes, self._dtype, partial(self._copy, list(range(self._count))))
        self._spec = self._original_spec
        if self.on_host:
            empty = {name: torch.empty((0, *shape[1:]), dtype=self._dtype) for name, shape in self._shapes.items()}
            self._install(_parameters(empty), 0)

    def load_for_pass(self, unedited: bool) -> None:
        """Load the experts in use, or all originals if `unedited`, for a forward pass about to reach this layer.

        They stay on the device until a layer without memory of its own is loaded.
        """
        if unedited:
            self.use_originals()
        memory, spec = self._memory, self._spec
        if memory is not None and not memory.holds(self, spec):
            self._load_with(memory.load)

    def make_writable(self) -> None:
        """Have the experts in use in memory of the layer's own, because the caller will change them there."""
        if self._memory is not None:
            self._load_with(self._memory.load_writable)

    def evict(self) -> None:
        """Drop the device tensors, whose memory is about to be reused; the next pass loads the experts in use again."""
        self._install(_parameters(self._spec.allocate(torch.device("meta"))), self._spec.count)

    def use_originals(self) -> None:
        """Run this layer on all n originals, which costs nothing if they are on the device."""
        if self._full is not None:
            self._install(self._full, self._count)
        elif self._spec is not self._original_spec:
            self._use(self._original_spec)

    def reset(self) -> None:
        """Give up the experts in use without copying any: before the unedited model runs, call `load_for_pass`."""
        if self._memory is not None:
            self._memory.discard_changes(self)
        if self._full is not None:
            self._install(self._full, self._count)

    def release(self) -> None:
        """Give up the experts in use, and free the memory that isn't shared with other layers or kept for others."""
        if self._memory is not None:
            self._memory.release(self)

    def use_selected(self, kept: list[int]) -> None:
        """Run this layer on copies of some originals, whose indices are `kept`, [n']."""
        self._use_new(len(kept), partial(self._copy, kept))

    def use_merged(self, coefficients: Tensor) -> None:
        """Run this layer on merged experts, written into the buffer, by `W_EM`, float32 [n', n], on the host."""
        self._use_new(coefficients.shape[0], partial(self._merge, coefficients))

    def use_buffer(self, count: int, width: int) -> None:
        """Run this layer on the buffer, which the caller fills with as many experts as are in use, of another width.

        Output biases are those in use before.
        """
        biases = {name: getattr(self._module, name).data.clone() for name in self._neurons.output_biases}
        if self._memory is None:
            self._install(self._buffer(count, width), count)
        else:
            self._spec = ExpertSpec(self._neurons.shapes(count, width), self._dtype, None)
            self.make_writable()
        for name, bias in biases.items():
            getattr(self._module, name).data.copy_(bias)

    def _use_new(self, count: int, fill: Fill) -> None:
        if self._memory is not None:
            shapes = {name: (count, *shape[1:]) for name, shape in self._shapes.items()}
            self._use(ExpertSpec(shapes, self._dtype, fill))
            return
        views = self._buffer(count, self._neurons.width)
        fill({name: view.data for name, view in views.items()})
        self._install(views, count)

    def _use(self, spec: ExpertSpec) -> None:
        """Use other experts: loaded at once into memory of the layer's own, or else when a pass reaches the layer."""
        assert self._memory is not None
        self._spec = spec
        if self._memory.keeps(self, spec):
            self.load_for_pass(unedited=False)
        else:
            self.evict()

    def _copy(self, kept: list[int], tensors: Mapping[str, Tensor]) -> None:
        # If edits take turns on the layer, it pays to read all its experts once.
        turns = self._memory is not None and self._memory.by_layer > 1
        if isinstance(self.originals, StoredLayer) and not turns:
            self.originals.read(kept, tensors)
            return
        for name, tensor in tensors.items():
            if kept == list(range(self._count)):
                tensor.copy_(self.originals[name], non_blocking=True)
                continue
            for new, old in enumerate(kept):
                tensor[new].copy_(self.originals[name][old], non_blocking=True)

    def _merge(self, coefficients: Tensor, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            merge_experts(coefficients, self.originals[name], tensor)

    def _load_with(self, load: Callable[[MemoryUser, ExpertSpec], dict[str, Tensor]]) -> None:
        try:
            tensors = load(self, self._spec)
        except torch.OutOfMemoryError as error:
            raise self._out_of_memory(self._spec.count) from error
        self._install(_parameters(tensors), self._spec.count)

    def _install(self, parameters: Mapping[str, nn.Parameter], count: int) -> None:
        for name, parameter in parameters.items():
            setattr(self._module, name, parameter)
        self._module.num_experts = count  # type: ignore[assignment]

    @torch.inference_mode(False)  # a buffer allocated during a forward pass must stay writable for the next edit
    def _buffer(self, count: int, width: int) -> dict[str, nn.Parameter]:
        """Parameters of n' experts over the buffer, which grows to the largest n' and has one width at a time."""
        shapes = self._neurons.shapes(count, width)
        if not self._buffers or any(self._buffers[name][:count].shape != shape for name, shape in shapes.items()):
            self._buffers.clear()
            try:
                self._buffers = ExpertSpec(shapes, self._dtype, None).allocate(self._device)
            except torch.OutOfMemoryError as error:
                raise self._out_of_memory(count) from error
        return _parameters({name: buffer[:count] for name, buffer in self._buffers.items()})

    def _out_of_memory(self, experts: int) -> UserError:
        return UserError(
            f"no room on {self._device} for {experts} experts of layer {self._index}; retain fewer experts, "
            "keep the originals on the host (model.expert_offload: host), or spread the model (model.device_map)"
        )


class SharedExpert:
    """The output projection of a layer's shared expert, which it must have; a repair changes a copy of its weights."""

    def __init__(self, layer: MoELayer, load: Callable[[], None]) -> None:
        """Take over a layer's; `load` brings its weights to the device."""
        module, gate = layer.shared_expert, layer.shared_expert_gate
        assert module is not None
        down = module.down_proj
        assert isinstance(down, nn.Linear)
        self._module, self._gate, self._down, self.load = module, gate, down, load
        self.weights = CopyOnWriteWeights(down)

    @property
    def width(self) -> int:
        """Number of neurons."""
        return int(self._down.weight.shape[1])

    def activations(self, hidden: Tensor, columns: slice) -> Tensor:
        """Inputs of the output projection, times the gate that the family puts on the expert's output, if any.

        For inputs of the expert [tokens, hidden] and some neurons: [tokens, columns] in the same dtype.
        """
        found: list[Tensor] = []
        handle = self._down.register_forward_pre_hook(lambda _, args: found.append(args[0][:, columns].clone()))
        try:
            for rows in hidden.split(_ROWS):
                self._module(rows)
        finally:
            handle.remove()
        values = torch.cat(found)
        return values if self._gate is None else (values * torch.sigmoid(self._gate(hidden).float())).to(values.dtype)


def _parameters(tensors: Mapping[str, Tensor]) -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(tensor, requires_grad=False) for name, tensor in tensors.items()}
