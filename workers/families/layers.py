"""Finds the parts of a model that edits change: MoE layers, dense feed-forward networks and linear layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from moevolve.evaluators.errors import UserError
from moevolve.kernels.routing_rule import RoutingRule
from moevolve.workers.families.base import DenseFamily, ExpertFamily
from moevolve.workers.families.decoder import decoder_of
from moevolve.workers.families.registry import dense_family, expert_family, family_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


# Names of a block's shared expert in `transformers`. Granite's is no part of the block, and left as it is.
_SHARED_EXPERTS = ("shared_expert", "shared_experts", "shared_mlp")


@dataclass(frozen=True, slots=True)
class MoELayer:
    """Handle of one MoE block.

    Attributes:
        index: Index of the decoder layer.
        block: Module that holds the router and the experts.
        experts: Module of the fused experts; see `ExpertFamily.tensors`.
        output_scale: Factor on the routed experts' sum before it is added to the residual stream.
        unrepairable: Why candidates can't be repaired, as a sentence's end; None if they can.
    """

    index: int
    block: nn.Module
    router: nn.Module
    experts: nn.Module
    rule: RoutingRule
    family: ExpertFamily
    output_scale: float = 1.0
    unrepairable: str | None = None

    @property
    def gate(self) -> nn.Module:
        """The module in the router's place: the router itself, or the wrapper of an edit."""
        gate = getattr(self.block, self.family.router)
        assert isinstance(gate, nn.Module)
        return gate

    @property
    def router_weight(self) -> Tensor:
        """Weight [n, hidden] of the router."""
        return self.router.get_parameter(self.family.weight)

    @property
    def router_bias(self) -> Tensor | None:
        """Bias [n] that the router adds to its logits; None if it has none."""
        return getattr(self.router, "bias", None)

    @property
    def correction_bias(self) -> Tensor | None:
        """Bias that the router adds to its scores for choosing only, [n]; None if it has none."""
        bias = self._correction
        return None if bias is None else bias.reshape(-1)

    @property
    def _correction(self) -> Tensor | None:
        holder = self.block if self.family.correction_in_block else self.router
        path, _, name = self.family.correction.rpartition(".")
        return getattr(holder.get_submodule(path), name, None)

    @property
    def shared_name(self) -> str | None:
        """Name in the block of the expert that every token uses; None without one."""
        return next((name for name in _SHARED_EXPERTS if getattr(self.block, name, None) is not None), None)

    @property
    def shared_expert(self) -> nn.Module | None:
        """Expert of the block that every token uses, which ends with the linear layer `down_proj`; None without one."""
        return None if self.shared_name is None else self.block.get_submodule(self.shared_name)

    @property
    def shared_expert_gate(self) -> nn.Module | None:
        """Linear layer whose sigmoid is a factor on the shared expert's output, [..., hidden] to [..., 1], if any."""
        return getattr(self.block, "shared_expert_gate", None)

    @property
    def factors(self) -> Tensor | None:
        """Factors of the experts' routing weights, [n]; None if the router has none."""
        return None if self.family.factors is None else getattr(self.router, self.family.factors)

    @property
    def table(self) -> Tensor | None:
        """Experts of every token id, int64 [vocabulary, k]; None if the router chooses by scores."""
        return None if self.family.table is None else getattr(self.router, self.family.table, None)

    @property
    def router_parameters(self) -> int:
        """Number of the router's parameters per expert."""
        others = sum(isinstance(each, nn.Parameter) for each in (self.router_bias, self.factors))
        return int(self.router_weight.shape[1]) + others + self.correction_parameters

    @property
    def correction_parameters(self) -> int:
        """Number of the correction bias's parameters per expert; in most families it is a buffer."""
        return int(isinstance(self._correction, nn.Parameter))

    @property
    def renormalise(self) -> bool:
        """True if the top-k routing weights are rescaled to sum to 1."""
        return self.rule.renormalise

    @property
    def count(self) -> int:
        """Number n of experts of the original layer."""
        return int(self.router_weight.shape[0])

    def route(self, hidden: Tensor) -> tuple[Tensor, ...]:
        """Run the original router on hidden states [tokens, hidden], all of token id 0; returns what it returns."""
        more: tuple[Tensor | None, ...] = (self.correction_bias,) if self.family.correction_in_block else ()
        if self.table is not None:
            more = (torch.zeros(len(hidden), dtype=torch.int64, device=hidden.device),)
        return self.router(hidden[None] if self.family.takes_sequences else hidden, *more)

    def experts_input(self, hidden: Tensor) -> Tensor:
        """Make the experts' inputs [tokens, width] of the router's inputs [tokens, hidden]."""
        for name in self.family.experts_input:
            make = getattr(self.block, name, None)
            hidden = hidden if make is None else make(hidden)
        return hidden

    def expert_tensors(self) -> dict[str, Tensor]:
        """Return the fused expert parameters that the model currently runs on, by name."""
        return {name: getattr(self.experts, name) for name in self.family.tensors}


@dataclass(frozen=True, slots=True)
class FusedRows:
    """Some rows of a linear layer that computes the gate and up projections together, in the form of one of them."""

    linear: nn.Linear
    rows: slice

    @property
    def weight(self) -> Tensor:
        """A view of the weight that the linear layer has now."""
        return self.linear.weight[self.rows]

    @property
    def bias(self) -> Tensor | None:
        return None if self.linear.bias is None else self.linear.bias[self.rows]


@dataclass(frozen=True, slots=True)
class DenseLayer:
    """Handle of one dense feed-forward network, `down(act(gate(x)) * up(x))` or `down(act(up(x)))`.

    Attributes:
        up, gate: Projections with weights [width, hidden]; `gate` is None for a network without a gate.
        down: Linear layer with weight [hidden, width].
        inner: The linear layers that the model has for `gate`, if there is one, and `up`: these, or a fused one.
        output_scale: Factor on the network's output before it is added to the residual stream.
        output_norm: Norm between the network and the residual stream; None without one.
    """

    index: int
    decoder_layer: nn.Module
    up: nn.Linear | FusedRows
    gate: nn.Linear | FusedRows | None
    down: nn.Linear
    inner: tuple[nn.Linear, ...]
    activation: Callable[[Tensor], Tensor]
    family: DenseFamily
    output_scale: float = 1.0
    output_norm: nn.Module | None = None

    @property
    def width(self) -> int:
        """Number of neurons d_h of the network."""
        return int(self.up.weight.shape[0])

    @property
    def hidden(self) -> int:
        """Size d of the residual stream."""
        return int(self.up.weight.shape[1])

    @property
    def gains(self) -> Tensor:
        """Factors on the network's outputs that are the same for all tokens before these are added, [hidden]."""
        ones = torch.ones_like(self.down.weight[:, 0])
        # The mean square of ones is 1, so that only the norm's own weights are left.
        return self.output_scale * (ones if self.output_norm is None else self.output_norm(ones))

    @property
    def attention(self) -> nn.Module:
        module = self.decoder_layer.self_attn
        assert isinstance(module, nn.Module)
        return module


class Replacement:
    """Replaces a layer's feed-forward network by another module, which maps [..., hidden] to the same shape."""

    def __init__(self, layer: DenseLayer) -> None:
        self._holder = layer.decoder_layer
        family = layer.family
        names = (family.up, family.activation, family.down) if family.inline else ("mlp",)
        self._originals = {name: getattr(self._holder, name) for name in names}

    def show(self, module: nn.Module) -> None:
        """Run `module` instead of the network."""
        # The decoder layer runs an inlined network part by part: the first part does all the work.
        stand_ins = [module, *(nn.Identity() for _ in range(len(self._originals) - 1))]
        self._set(dict(zip(self._originals, stand_ins, strict=True)))

    def restore(self) -> None:
        """Run the original network again."""
        self._set(self._originals)

    @contextmanager
    def removed(self) -> Iterator[None]:
        """Run the original network within a `with` block."""
        shown = {name: getattr(self._holder, name) for name in self._originals}
        self.restore()
        try:
            yield
        finally:
            self._set(shown)

    def _set(self, modules: Mapping[str, nn.Module]) -> None:
        for name, module in modules.items():
            setattr(self._holder, name, module)


def adapt_blocks(model: PreTrainedModel) -> None:
    """Replace the MoE blocks of a family whose blocks have another interface than others'."""
    family = expert_family(model.config.model_type)
    if family is not None and family.adapted:
        from moevolve.workers.families.adapted import adapt  # loads modelling code that few models need

        for layer in model.model.layers:
            adapt(layer)


def find_moe_layers(model: PreTrainedModel, name: str) -> tuple[MoELayer, ...]:
    """Find the MoE blocks of an unedited model, in order of depth; none in a dense model. Messages call it `name`.

    Raises:
        UserError: The family isn't supported, or a mixture of experts has no layer with experts.
    """
    family = family_of(model.config, name)
    if not isinstance(family, ExpertFamily):
        return ()
    layers, scale = [], 1.0 if family.output_scale is None else family.output_scale(model.config)
    obstacle = None if family.unrepairable is None else family.unrepairable(model.config)
    for index, decoder_layer in enumerate(model.model.layers):
        block: Any = getattr(decoder_layer, family.block, None) if family.block else decoder_layer
        if not (hasattr(block, family.router) and hasattr(block, "experts")):
            continue
        if family.transposed:
            block.experts.is_transposed = True
        router = getattr(block, family.router)
        rule = family.rule(router, model.config)
        layers.append(MoELayer(index, block, router, block.experts, rule, family, scale, obstacle))
    if not layers:
        raise UserError(
            f"model {name}: none of its {len(model.model.layers)} layers (model type {family.model_type}) holds "
            "experts to prune; use a mixture-of-experts checkpoint"
        )
    return tuple(layers)


@torch.inference_mode()
def check_router(layer: MoELayer, name: str) -> None:
    """Check that a loaded layer's router returns logits, routing weights and experts, as edits need it.

    Raises:
        UserError: The router returns something else; in some versions of `transformers` it is only the logits.
    """
    weight = layer.router_weight
    routed = layer.route(weight.new_zeros(1, weight.shape[1]))
    if not (isinstance(routed, tuple) and len(routed) == 3 and routed[1].shape == routed[2].shape):
        found = f"{len(routed)} values" if isinstance(routed, tuple) else f"a {type(routed).__name__}"
        raise UserError(
            f"model {name}: the router of layer {layer.index} gives {found}, where logits, routing weights and experts "
            "are expected: moevolve wasn't tried with this version of transformers; `pip check` says which to use"
        )


def find_dense_layers(model: PreTrainedModel) -> tuple[DenseLayer, ...]:
    """Find the dense feed-forward networks of an unedited model, in order of depth; none in a mixture of experts."""
    family = dense_family(model.config.model_type)
    if family is None:
        return ()
    layers, scale = [], 1.0 if family.output_scale is None else family.output_scale(model.config)
    for index, decoder_layer in enumerate(decoder_of(model).layers):
        holder = decoder_layer if family.inline else decoder_layer.mlp
        down, activation = getattr(holder, family.down), getattr(holder, family.activation)
        if family.fused is None:
            inner = tuple(getattr(holder, name) for name in (family.gate, family.up) if name is not None)
            parts: tuple[Any, ...] = inner
        else:
            inner = (getattr(holder, family.fused),)
            width = down.in_features
            parts = tuple(FusedRows(inner[0], slice(start, start + width)) for start in (0, width))
        *gates, up = parts
        gate = gates[0] if gates else None
        norm = None if family.output_norm is None else getattr(decoder_layer, family.output_norm)
        layers.append(DenseLayer(index, decoder_layer, up, gate, down, inner, activation, family, scale, norm))
    return tuple(layers)


def linears_outside(model: PreTrainedModel, mixtures: Sequence[MoELayer]) -> tuple[tuple[nn.Linear, ...], ...]:
    """Return, for every decoder layer, its linear layers that belong neither to routed experts nor to a router."""
    inside = {each for layer in mixtures for part in (layer.router, layer.experts) for each in part.modules()}
    return tuple(
        tuple(each for each in layer.modules() if isinstance(each, nn.Linear) and each not in inside)
        for layer in decoder_of(model).layers
    )


def find_linears(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """Return the linear layers within decoder layers by name (`layers.0.self_attn.q_proj` ...), in order of depth."""
    decoder = decoder_of(model)
    return {
        f"layers.{index}.{name}": module
        for index, layer in enumerate(decoder.layers)
        for name, module in layer.named_modules()
        if isinstance(module, nn.Linear)
    }
