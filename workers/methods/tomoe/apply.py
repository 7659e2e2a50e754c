"""Applying ToMoE edits to a resident model: feed-forward networks are replaced, attention projections get hooks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from moevolve.evaluators.errors import CandidateError, UserError
from moevolve.kernels.neuron_mask import ExpertMasks, choose_expert, masked_network, top_dimensions
from moevolve.kernels.products import linear
from moevolve.workers.contract.edits import Edit
from moevolve.workers.contract.methods import ModelParts, host_tensor
from moevolve.workers.families.layers import DenseLayer, Replacement
from moevolve.workers.methods.shared.dense import check_shape, dense_layers_for, weights_of
from moevolve.workers.methods.shared.dense_outputs import (
    ActiveMask,
    AttentionOutput,
    CopyOnWriteWeights,
    MaskingNetwork,
    NetworkCopies,
    check_additive,
    network_output,
)
from moevolve.workers.methods.shared.outputs import LayerOutput, Repairable
from moevolve.workers.methods.tomoe.edit import HeadMasks, ToMoeEdit


class MaskedNetwork(MaskingNetwork):
    """Replaces a feed-forward network, and runs each token on the neurons of its expert."""

    router: Tensor

    def __init__(self, layer: DenseLayer) -> None:
        super().__init__()
        # In a tuple, so that the network's parameters aren't registered as this module's too.
        self._source = (layer,)
        self._masks: ExpertMasks | None = None
        self.register_buffer("router", torch.empty(0), persistent=False)

    def set(self, kept: Tensor, router: Tensor) -> None:
        """Set masks, bool [N, width], and a router, float32 [N, hidden], on the network's device."""
        self._masks, self.router = ExpertMasks.of(kept), router

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Map hidden states [..., hidden] to outputs of the same shape."""
        assert self._masks is not None
        flat = hidden_states.reshape(-1, hidden_states.shape[-1])
        _, chosen = choose_expert(flat, self.router)
        return masked_network(flat, chosen, self._masks, weights_of(self._source[0])).view(hidden_states.shape)

    def active_mask(self, hidden: Tensor) -> ActiveMask:
        assert self._masks is not None
        kept = self._masks.kept
        _, chosen = choose_expert(hidden, self.router)
        return ActiveMask(nn.functional.one_hot(chosen, len(kept)).bool(), kept, kept.shape[1])


class _MaskedHeads:
    """Hooks on one attention's projections (ToMoE, Eq. 4).

    Query dimensions that aren't kept are zeroed before rotary embedding, which removes them from every product of query
    and key. A token's mask zeroes its values before they are cached, and its output before the output projection.
    """

    def __init__(self, attention: nn.Module, heads: HeadMasks, layer: int, device: torch.device) -> None:
        pairs = host_tensor(heads.pairs[layer])
        self._query = torch.cat((pairs, pairs)).to(device)
        self._bias = host_tensor(heads.value_bias[layer]).to(device)
        self._router = host_tensor(heads.value_router[layer]).to(device)
        self._directions = host_tensor(heads.directions[layer]).to(device)
        self._active = int(heads.active[layer])
        self._kept: Tensor | None = None
        self._masking = True
        self._handles: list[RemovableHandle] = []
        projections: dict[str, nn.Module] = {name: getattr(attention, f"{name}_proj") for name in "qvo"}
        if not pairs.all():
            self._handles.append(projections["q"].register_forward_hook(self._mask_query))
        if self._active < heads.head_dim:
            self._handles.append(projections["v"].register_forward_hook(self._mask_value))
            self._handles.append(projections["o"].register_forward_pre_hook(self._mask_output))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    @contextmanager
    def without_masks(self) -> Iterator[None]:
        """Mask nothing within a `with` block."""
        self._masking = False
        try:
            yield
        finally:
            self._masking = True

    def _mask_query(self, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return _times(output, self._query) if self._masking else output

    def _mask_value(self, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        if not self._masking:
            return output
        products = linear(args[0].float(), self._directions)
        scores = linear(products, self._router, self._bias)
        self._kept = top_dimensions(scores, self._active).unsqueeze(-2)
        return _times(output, self._kept)

    def _mask_output(self, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if not self._masking:
            return args
        assert self._kept is not None, "an attention ran its output projection before its values"
        kept, self._kept = self._kept, None
        return (_times(args[0], kept), *args[1:])


class ToMoeApplicator(Repairable):
    """Masked networks and heads (ToMoE, arXiv 2501.15316, Eq. 2 to 5) on a resident model, whose weights stay."""

    def __init__(self, parts: ModelParts) -> None:
        self._layers = layers = dense_layers_for("ToMoE", parts)
        self._replacements = tuple(Replacement(layer) for layer in layers)
        self.networks = tuple(MaskedNetwork(layer).eval() for layer in layers)
        self._heads: list[_MaskedHeads] = []
        self._edit: ToMoeEdit | None = None
        self._weights = tuple(map(NetworkCopies.of, layers))
        self._projections: dict[nn.Module, CopyOnWriteWeights] = {}

    def apply(self, edit: Edit) -> None:
        """A network whose experts keep all neurons isn't replaced."""
        assert isinstance(edit, ToMoeEdit)
        self._check(edit)
        self.revert()
        for i, (layer, network) in enumerate(zip(self._layers, self.networks, strict=True)):
            device = layer.up.weight.device
            if edit.widths[i] < layer.width:
                router = fold(edit.router[i], edit.directions[i])
                network.set(host_tensor(edit.kept[i]).to(device), router.to(device))
                self._replacements[i].show(network)
            if edit.heads is not None:
                self._heads.append(_MaskedHeads(layer.attention, edit.heads, i, device))
        self._edit = edit

    def outputs(self) -> tuple[LayerOutput, ...]:
        """Where heads are masked, every layer's attention and then its network."""
        assert self._edit is not None, "no edit is applied to the model"
        check_additive(self._layers[0])
        found: list[LayerOutput] = []
        for i, (layer, weights, network) in enumerate(zip(self._layers, self._weights, self.networks, strict=True)):
            if self._edit.heads is not None:
                projection: Any = layer.attention.o_proj
                weight = self._projections.setdefault(projection, CopyOnWriteWeights(projection))
                found.append(AttentionOutput(layer, weight, self._heads[i].without_masks))
            masked = network if self._edit.widths[i] < layer.width else None
            found.append(network_output(layer, weights, self._replacements[i], masked))
        return tuple(found)

    def revert(self) -> None:
        for replacement in self._replacements:
            replacement.restore()
        for heads in self._heads:
            heads.remove()
        self._heads = []
        for weights in self._weights:
            weights.restore()
        for projection in self._projections.values():
            projection.restore()

    def _check(self, edit: ToMoeEdit) -> None:
        check_shape(edit.layers, edit.width, edit.hidden, self._layers)
        if not edit.finite:
            raise CandidateError("an entry of a router or of a head's scores is not finite")
        heads, first = edit.heads, self._layers[0]
        if heads is None:
            return
        if not first.family.masks_heads:
            raise UserError(
                f"heads of model type {first.family.model_type!r} can't be masked; set genome.attention: false"
            )
        head_dim = getattr(first.attention, "head_dim", None)
        if (heads.head_dim, heads.directions.shape[2]) != (head_dim, first.hidden):
            raise UserError(
                f"the edit's masks are for heads of {heads.head_dim} dimensions, the model's have {head_dim}; use the "
                "model it was searched on"
            )


def fold(coordinates: NDArray[np.float32], directions: NDArray[np.float32]) -> Tensor:
    """Router weights [outputs, hidden] from their coordinates [outputs, components] along directions."""
    return host_tensor(coordinates) @ host_tensor(directions)


def _times(values: Tensor, kept: Tensor) -> Tensor:
    """Multiply `values` [..., heads * head_dim] by masks that broadcast to [..., heads, head_dim]."""
    return (values.unflatten(-1, (-1, kept.shape[-1])) * kept).flatten(-2)
