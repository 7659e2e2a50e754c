"""Handles of a model's parts, and finding them: MoE layers, dense feed-forward networks, linear layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from moevolve.evaluators.errors import UserError
from moevolve.kernels.routing_rule import RoutingRule
from moevolve.workers.families.base import CORRECTION_BIAS, DenseFamily, ExpertFamily
from moevolve.workers.families.registry import dense_family, family_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class MoELayer:
    """Handle of one MoE block.

    Attributes:
        index: index of the decoder layer.
        block: the module that holds the router and `experts`.
        router: the family's own router; `weight` is [n, hidden].
        experts: the family's fused experts; see `ExpertFamily.tensors`.
        rule: how the router chooses and weighs.
        family: the family.
    """

    index: int
    block: nn.Module
    router: nn.Module
    experts: nn.Module
    rule: RoutingRule
    family: ExpertFamily

    @property
    def gate(self) -> nn.Module:
        """What stands where the router stood: itself, or the wrapper that edits put around it."""
        gate = getattr(self.block, self.family.router)
        assert isinstance(gate, nn.Module)
        return gate

    @property
    def router_weight(self) -> Tensor:
        weight = self.router.weight
        assert isinstance(weight, Tensor)
        return weight

    @property
    def router_bias(self) -> Tensor | None:
        """What the router adds to its logits, [n]."""
        return getattr(self.router, "bias", None)

    @property
    def correction_bias(self) -> Tensor | None:
        """What the router adds to its scores for choosing only, float32 [n]."""
        return getattr(self.router, CORRECTION_BIAS, None)

    @property
    def renormalise(self) -> bool:
        """Whether the top-k routing weights are rescaled to sum 1."""
        return self.rule.renormalise

    @property
    def count(self) -> int:
        """Experts n of the original layer."""
        return int(self.router_weight.shape[0])

    def expert_tensors(self) -> dict[str, Tensor]:
        """The fused expert parameters that the model runs on now, by name."""
        return {name: getattr(self.experts, name) for name in self.family.tensors}


@dataclass(frozen=True, slots=True)
class DenseLayer:
    """Handle of one dense feed-forward network, `down(act(gate(x)) * up(x))` or `down(act(up(x)))`.

    Attributes:
        index: index of the decoder layer.
        decoder_layer: the layer.
        up: [width, hidden].
        gate: [width, hidden]; None for a plain network.
        down: [hidden, width].
        activation: elementwise.
        family: how the parts are named.
    """

    index: int
    decoder_layer: nn.Module
    up: nn.Linear
    gate: nn.Linear | None
    down: nn.Linear
    activation: Callable[[Tensor], Tensor]
    family: DenseFamily

    @property
    def width(self) -> int:
        """Neurons d_h of the network."""
        return int(self.up.weight.shape[0])

    @property
    def hidden(self) -> int:
        """Size d of the residual stream."""
        return int(self.up.weight.shape[1])

    @property
    def attention(self) -> nn.Module:
        """The layer's attention module."""
        module = self.decoder_layer.self_attn
        assert isinstance(module, nn.Module)
        return module


class Replacement:
    """Puts a module in the place of a layer's feed-forward network, and takes it away again.

    The stand-in maps hidden states [..., hidden] to hidden states of the same shape.
    """

    def __init__(self, layer: DenseLayer) -> None:
        self._holder = layer.decoder_layer
        family = layer.family
        names = (family.up, family.activation, family.down) if family.inline else ("mlp",)
        self._originals = {name: getattr(self._holder, name) for name in names}

    def show(self, module: nn.Module) -> None:
        """Run `module` instead of the network."""
        # An inlined network is run part by part: the first does all of it.
        stand_ins = [module, *(nn.Identity() for _ in range(len(self._originals) - 1))]
        for name, stand_in in zip(self._originals, stand_ins, strict=True):
            setattr(self._holder, name, stand_in)

    def restore(self) -> None:
        """Bring the network back."""
        for name, original in self._originals.items():
            setattr(self._holder, name, original)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """For the length of a `with` block, run the network, and then again what ran before."""
        shown = {name: getattr(self._holder, name) for name in self._originals}
        self.restore()
        try:
            yield
        finally:
            for name, module in shown.items():
                setattr(self._holder, name, module)


def find_moe_layers(model: PreTrainedModel, name: str) -> tuple[MoELayer, ...]:
    """Handles of the MoE blocks of a loaded or meta-device model, in order of depth; dense layers are passed over.

    Empty for a dense family.

    Args:
        model: a causal language model of a supported family, not yet edited.
        name: the model as the user named it, for messages.

    Raises:
        UserError: the family is not supported, or it is one of experts and no layer holds any.
    """
    family = family_of(model.config, name)
    if not isinstance(family, ExpertFamily):
        return ()
    layers = []
    for index, decoder_layer in enumerate(model.model.layers):
        block = decoder_layer.mlp
        if not (hasattr(block, family.router) and hasattr(block, "experts")):
            continue
        router = getattr(block, family.router)
        if not all(hasattr(block.experts, tensor) for tensor in family.tensors):
            raise UserError(
                f"model {name}: the experts of layer {index} are packed ({type(block.experts).__name__}), and only "
                "plain numbers can be pruned and merged; load it dequantised"
            )
        layers.append(MoELayer(index, block, router, block.experts, family.rule(router, model.config), family))
    if not layers:
        raise UserError(
            f"model {name}: none of its {len(model.model.layers)} layers (model type {family.model_type}) holds "
            "experts, so there is nothing to prune; use a mixture-of-experts checkpoint"
        )
    return tuple(layers)


@torch.inference_mode()
def check_router(layer: MoELayer, name: str) -> None:
    """Check that a layer's router answers as routers that are edited do: logits, routing weights and experts.

    Args:
        layer: with its weights.
        name: the model as the user named it, for the message.

    Raises:
        UserError: it gives something else, as those of some versions of `transformers` do (logits alone).
    """
    weight = layer.router_weight
    routed = layer.router(weight.new_zeros(1, weight.shape[1]))
    if not (isinstance(routed, tuple) and len(routed) == 3 and routed[1].shape == routed[2].shape):
        found = f"{len(routed)} values" if isinstance(routed, tuple) else f"a {type(routed).__name__}"
        raise UserError(
            f"model {name}: the router of layer {layer.index} gives {found}, where logits, routing weights and experts "
            "are expected: moevolve wasn't tried with this version of transformers; `pip check` says which to use"
        )


def find_dense_layers(model: PreTrainedModel) -> tuple[DenseLayer, ...]:
    """Handles of the dense feed-forward networks of a loaded or meta-device model, not yet edited, in order of depth.

    Empty for a family that isn't a dense one.
    """
    family = dense_family(model.config.model_type)
    if family is None:
        return ()
    layers = []
    for index, decoder_layer in enumerate(model.get_decoder().layers):
        holder = decoder_layer if family.inline else decoder_layer.mlp
        layers.append(
            DenseLayer(
                index=index,
                decoder_layer=decoder_layer,
                up=getattr(holder, family.up),
                gate=None if family.gate is None else getattr(holder, family.gate),
                down=getattr(holder, family.down),
                activation=getattr(holder, family.activation),
                family=family,
            )
        )
    return tuple(layers)


def find_linears(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """The linear layers within the decoder layers, by name (`layers.0.self_attn.q_proj` ...), in order of depth."""
    decoder = model.get_decoder()
    return {
        f"layers.{index}.{name}": module
        for index, layer in enumerate(decoder.layers)
        for name, module in layer.named_modules()
        if isinstance(module, nn.Linear)
    }
