"""ToMoE as a method: how its routers are read when a model is observed, and how its edits are exported.

With one expert of the same width in every layer, an export is a narrower model of its family. Otherwise it is a stock
Mixtral if that computes the same, else a checkpoint with its own modelling code, which stores every neuron once,
however many experts share it. In a Mixtral experts share no neurons, so shared ones are repeated.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from moevolve.kernels.neuron_mask import choose_expert, top_dimensions
from moevolve.workers.checkpoints.mixtral_form import empty_mixtral, mixtral_obstacle
from moevolve.workers.checkpoints.native import native_config
from moevolve.workers.checkpoints.state import empty_model, layer_state, layers_prefix, unedited_parameters
from moevolve.workers.contract.card import CheckpointForm, ExportSummary
from moevolve.workers.contract.edits import Edit
from moevolve.workers.contract.methods import Blueprint, Method, Resident, host_tensor
from moevolve.workers.families.base import EXPERT_ALIGNMENT
from moevolve.workers.families.layers import DenseLayer
from moevolve.workers.methods.shared.dense import (
    idle_in_network,
    inner_tensors,
    native_family,
    network_tensors,
    write_native_dense,
)
from moevolve.workers.methods.tomoe.apply import MaskedNetwork, ToMoeApplicator, fold
from moevolve.workers.methods.tomoe.calibrate import calibrate_tomoe
from moevolve.workers.methods.tomoe.edit import HeadMasks, ToMoeEdit, ToMoeMeasurement

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def _read_routing(network: MaskedNetwork, args: tuple[Tensor, ...], output: object) -> tuple[Tensor, Tensor]:
    logits, chosen = choose_expert(args[0].reshape(-1, args[0].shape[-1]), network.router)
    return nn.functional.one_hot(chosen, logits.shape[-1]), torch.softmax(logits, dim=-1)


class ToMoeExporter:
    """Exports models with masked networks and heads."""

    def obstacle(self, resident: Resident, edit: Edit) -> str | None:
        assert isinstance(edit, ToMoeEdit)
        if _narrows(edit):
            return None
        heads = edit.heads
        if heads is not None and not (heads.pairs.all() and (heads.active == heads.head_dim).all()):
            return "dimensions of its heads are masked, and a Mixtral's aren't"
        if np.ptp(edit.widths):
            return f"its experts have {edit.widths.min()} to {edit.widths.max()} neurons, and a Mixtral's one number"
        if edit.widths[0] % EXPERT_ALIGNMENT:
            return f"its experts have {edit.widths[0]} neurons, and a Mixtral's a multiple of {EXPERT_ALIGNMENT}"
        if _ties(edit):
            return "where experts tie a token falls to the first of them, which a Mixtral doesn't promise"
        return mixtral_obstacle(resident)

    def summary(self, resident: Resident, edit: Edit, form: CheckpointForm) -> ExportSummary:
        assert isinstance(edit, ToMoeEdit)
        title, widths = resident.dense_layers[0].family.title, edit.widths
        if _narrows(edit) and form == "stock":
            return ExportSummary(
                experts=1,
                active=1,
                parameters_before=unedited_parameters(resident),
                lead=f"{title} whose feed-forward networks have {widths[0]} of {edit.width} neurons",
                method="masks of neurons",
                tag="structured-pruning",
                form_note=f"A stock {title} checkpoint, no custom code.",
            )
        rows = [("neurons per expert", f"{widths.min()} to {widths.max()} of {edit.width}")]
        if edit.heads is not None:
            heads = edit.heads
            pairs = 2 * heads.pairs.sum(axis=1)
            rows.append(("query and key dimensions", f"{pairs.min()} to {pairs.max()} of {heads.head_dim}"))
            rows.append(
                ("value dimensions per token", f"{heads.active.min()} to {heads.active.max()} of {heads.head_dim}")
            )
        return ExportSummary(
            experts=edit.experts,
            active=1,
            parameters_before=unedited_parameters(resident),
            lead=(
                f"{title} whose feed-forward networks run the neurons of one of {edit.experts} overlapping experts per "
                "token"
            ),
            method="ToMoE's masks (arXiv 2501.15316)",
            tag="dynamic-pruning",
            form_note=(
                "The modelling code beside this card routes every token to its neurons; it needs `transformers` only."
                if form == "native"
                else "A stock Mixtral checkpoint, no custom code; neurons that several experts share are repeated."
            ),
            rows=tuple(rows),
        )

    def build(self, resident: Resident, edit: Edit, form: CheckpointForm, directory: Path) -> Blueprint:
        assert isinstance(edit, ToMoeEdit)
        if form == "native":
            model, masked = _native(resident, edit, directory), _native_layer
        elif _narrows(edit):
            config = copy.deepcopy(resident.model.config)
            setattr(config, resident.dense_layers[0].family.width_field, int(edit.widths[0]))
            model, masked = empty_model(type(resident.model), config, resident.model.dtype), _narrower_layer
        else:
            model, masked = empty_mixtral(resident, edit.experts, int(edit.widths[0])), _stock_layer
        expected, prefix = set(model.state_dict()), layers_prefix(model)

        def layer(index: int) -> Iterator[tuple[str, Tensor]]:
            dense, made = resident.dense_layers[index], set()
            for name, tensor in masked(dense, edit, index):
                made.add(name)
                yield name, tensor
            # A replacement doesn't hold the network's own tensors.
            place = "" if dense.family.inline else "mlp."
            network = {f"{place}{name}": tensor for name, tensor in network_tensors(dense).items()}
            for name, tensor in (layer_state(resident, index) | network).items():
                if name not in made and f"{prefix}{index}.{name}" in expected:
                    yield name, tensor

        return Blueprint(model, layer)


def _narrows(edit: ToMoeEdit) -> bool:
    """Return whether the edited model is a narrower one of its family."""
    return edit.experts == 1 and edit.heads is None and np.ptp(edit.widths) == 0


def _narrower_layer(layer: DenseLayer, edit: ToMoeEdit, i: int) -> Iterator[tuple[str, Tensor]]:
    """Return the tensors of a network's kept neurons."""
    place, kept = "" if layer.family.inline else "mlp.", host_tensor(edit.kept[i, 0]).to(layer.up.weight.device)
    yield f"{place}{layer.family.down}.weight", layer.down.weight.data[:, kept]
    rows = {name: tensor[kept] for name, tensor in inner_tensors(layer).items()}
    if layer.family.fused is not None:
        gate, up = (rows[f"{name}.weight"] for name in (layer.family.gate, layer.family.up))
        rows = {f"{layer.family.fused}.weight": torch.cat((gate, up))}
    for name, tensor in rows.items():
        yield f"{place}{name}", tensor


def _ties(edit: ToMoeEdit) -> bool:
    """Return whether experts with different neurons tie: a Mixtral's top-k doesn't promise to choose the first."""
    for router, kept in zip(edit.router, edit.kept, strict=True):
        both = np.concatenate([router, kept], axis=1)
        if len(np.unique(router, axis=0)) < len(np.unique(both, axis=0)):
            return True
    return False


def _stock_layer(layer: DenseLayer, edit: ToMoeEdit, i: int) -> Iterator[tuple[str, Tensor]]:
    """Return the tensors of a Mixtral's experts and router."""
    assert layer.gate is not None
    yield "mlp.gate.weight", fold(edit.router[i], edit.directions[i])
    neurons = host_tensor(edit.kept[i]).to(layer.up.weight.device).nonzero()[:, 1].view(edit.experts, -1)
    yield "mlp.experts.gate_up_proj", torch.cat([part.weight.data[neurons] for part in (layer.gate, layer.up)], dim=1)
    yield "mlp.experts.down_proj", layer.down.weight.data[:, neurons].transpose(0, 1)


def _native(resident: Resident, edit: ToMoeEdit, directory: Path) -> PreTrainedModel:
    """Write the native model's code, and build the model on the meta device."""
    source = resident.model
    model_class = write_native_dense(
        resident,
        directory,
        "methods/tomoe/native.py.jinja",
        experts=edit.experts,
        components=0 if edit.heads is None else edit.heads.value_router.shape[2],
        heads=edit.heads is not None,
    )
    config = native_config(source, model_class)
    config.tomoe_experts = edit.experts
    config.tomoe_neurons = edit.kept.any(axis=1).sum(axis=1).tolist()
    config.tomoe_width = [width if width < edit.width else None for width in edit.widths.tolist()]
    if edit.heads is not None:
        heads = edit.heads
        config.tomoe_components = heads.value_router.shape[2]
        config.tomoe_dimensions = (2 * heads.pairs.sum(axis=1)).tolist()
        config.tomoe_values = [active if active < heads.head_dim else None for active in heads.active.tolist()]
        config.tomoe_static = heads.static.tolist()
    return empty_model(model_class, config, source.dtype)


def _native_layer(layer: DenseLayer, edit: ToMoeEdit, i: int) -> Iterator[tuple[str, Tensor]]:
    """Return the tensors of a layer's masked network and attention."""
    if edit.widths[i] < edit.width:
        place = layer.family.up if layer.family.inline else "mlp"
        for name, tensor in _network(layer, edit, i).items():
            yield f"{place}.{name}", tensor
    if edit.heads is not None:
        for name, tensor in _attention(layer, edit.heads, i).items():
            yield f"self_attn.{name}", tensor


def _network(layer: DenseLayer, edit: ToMoeEdit, i: int) -> dict[str, Tensor]:
    """Tensors of a masked network: the neurons that any expert keeps, and the indices of each expert's among them."""
    device, family = layer.up.weight.device, layer.family
    kept = host_tensor(edit.kept[i]).to(device)
    union = kept.any(dim=0)
    state = {
        "router_weight": fold(edit.router[i], edit.directions[i]).to(device),
        "neurons": kept[:, union].nonzero()[:, 1].view(edit.experts, -1),
        # A row per neuron: gathering columns made the native form slower than the dense network.
        f"{family.down}.weight": layer.down.weight.data[:, union].t().contiguous(),
    }
    if layer.down.bias is not None:
        state[f"{family.down}.bias"] = layer.down.bias.data
    return state | {name: tensor[union] for name, tensor in inner_tensors(layer).items()}


def _attention(layer: DenseLayer, heads: HeadMasks, i: int) -> dict[str, Tensor]:
    """Return the tensors of an attention's masked projections."""
    attention: Any = layer.attention
    device = attention.q_proj.weight.device
    state: dict[str, Tensor] = {}
    pairs = host_tensor(heads.pairs[i]).to(device)
    if not pairs.all():
        dimensions = torch.cat((pairs, pairs)).nonzero().squeeze(1)
        for name in ("q_proj", "k_proj"):
            state |= _narrow(attention, name, heads.head_dim, dimensions)
    if heads.active[i] < heads.head_dim and heads.static[i]:
        kept = top_dimensions(host_tensor(heads.value_bias[i]).to(device), int(heads.active[i]))
        for name in ("v_proj", "o_proj"):
            state |= _narrow(attention, name, heads.head_dim, kept.nonzero().squeeze(1))
    elif heads.active[i] < heads.head_dim:
        for name in ("v_proj", "o_proj"):
            state |= {f"{name}.whole.{kind}": t for kind, t in getattr(attention, name).state_dict().items()}
        for name, array in (
            ("bias", heads.value_bias),
            ("router", heads.value_router),
            ("directions", heads.directions),
        ):
            state[f"v_proj.value_{name}"] = host_tensor(array[i]).to(device)
    return state


def _narrow(attention: nn.Module, name: str, head_dim: int, dimensions: Tensor) -> dict[str, Tensor]:
    """Return the tensors of a projection with only some dimensions of each head."""
    state = {f"{name}.dimensions": dimensions.clone()}
    for kind, tensor in getattr(attention, name).state_dict().items():
        inputs = name == "o_proj"
        if inputs and kind == "bias":
            state[f"{name}.narrow.{kind}"] = tensor
            continue
        by_head = tensor.unflatten(int(inputs), (-1, head_dim))
        kept = by_head.index_select(1 + inputs, dimensions)
        state[f"{name}.narrow.{kind}"] = kept.flatten(int(inputs), 1 + inputs)
    return state


TOMOE = Method(
    edit=ToMoeEdit,
    applicator=ToMoeApplicator,
    exporter=ToMoeExporter(),
    calibrators={ToMoeMeasurement: calibrate_tomoe},
    routing={MaskedNetwork: _read_routing},
    idle={
        # The native network holds the neurons that any expert keeps; a token uses one expert's.
        "MaskedNetwork": lambda module, config: idle_in_network(
            module, config, active=module.neurons.shape[1], of=getattr(module, native_family(config).up).out_features
        ),
    },
)
