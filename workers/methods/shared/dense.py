"""Helpers for edits of dense feed-forward networks: checking them, exporting them, and counting their cost."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from moevolve.evaluators.errors import UserError
from moevolve.kernels.expert_ffn import NetworkWeights
from moevolve.workers.checkpoints.native import NATIVE_PREFIX, write_native
from moevolve.workers.contract.methods import ModelParts, Resident
from moevolve.workers.families.base import DenseFamily
from moevolve.workers.families.layers import DenseLayer
from moevolve.workers.families.registry import dense_family

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def dense_layers_for(kind: str, parts: ModelParts) -> tuple[DenseLayer, ...]:
    """Return the model's dense feed-forward networks, which edits of a kind need."""
    if not parts.dense_layers:
        raise UserError(f"{kind} edits need dense feed-forward networks of a family where they are known")
    return parts.dense_layers


def check_shape(networks: int, width: int, hidden: int, layers: tuple[DenseLayer, ...]) -> None:
    """Refuse an edit whose shapes aren't those of the model's networks."""
    found = (len(layers), layers[0].width, layers[0].hidden)
    if (networks, width, hidden) != found:
        raise UserError(
            f"the edit is for {networks} networks of {width} neurons on {hidden} inputs, the model "
            f"has {found[0]} of {found[1]} on {found[2]}; use the model it was searched on"
        )


def weights_of(layer: DenseLayer) -> NetworkWeights:
    """Return the tensors that a layer's network currently runs on."""
    gate = layer.gate
    return NetworkWeights(
        up=layer.up.weight,
        gate=None if gate is None else gate.weight,
        down=layer.down.weight,
        up_bias=layer.up.bias,
        gate_bias=None if gate is None else gate.bias,
        down_bias=layer.down.bias,
        activation=layer.activation,
    )


def network_tensors(layer: DenseLayer) -> dict[str, Tensor]:
    """Return a network's tensors with neurons in their current order, by the family's names."""
    return inner_tensors(layer) | {
        f"{layer.family.down}.{kind}": tensor for kind, tensor in layer.down.state_dict().items()
    }


def inner_tensors(layer: DenseLayer) -> dict[str, Tensor]:
    """Return the tensors of a network's up projection and of its gate, if it has one, as `network_tensors` does."""
    tensors: dict[str, Tensor] = {}
    for name, part in ((layer.family.up, layer.up), (layer.family.gate, layer.gate)):
        if part is not None:
            tensors[f"{name}.weight"] = part.weight.data
            if part.bias is not None:
                tensors[f"{name}.bias"] = part.bias.data
    return tensors


def write_native_dense(resident: Resident, directory: Path, template: str, **settings: object) -> type[PreTrainedModel]:
    """Write modelling code for a dense family and import its model class; see `write_native`.

    `settings` are variables of the template in addition to those of the family.
    """
    family = resident.dense_layers[0].family
    return write_native(
        resident.model,
        directory,
        template,
        family.title,
        up=family.up,
        gate=repr(family.gate),
        fused=family.fused,
        down=family.down,
        activation=family.activation,
        inline=family.inline,
        **settings,
    )


def native_family(config: PretrainedConfig) -> DenseFamily:
    """Return the family that a native checkpoint's modelling code extends."""
    family = dense_family(config.model_type.removeprefix(NATIVE_PREFIX))
    assert family is not None
    return family


def idle_in_network(module: Any, config: PretrainedConfig, active: int, of: int) -> int:
    """Return the idle parameters of a network in which a token runs `active` of `of` equal parts.

    A part is rows of the gate and up projections and columns of the down projection, whose bias is always added.
    """
    family = native_family(config)
    inner = [getattr(module, part) for part in (family.up, family.gate) if part is not None]
    matrices = sum(part.weight.numel() for part in (*inner, getattr(module, family.down)))
    biases = sum(part.bias.numel() for part in inner if part.bias is not None)
    return (matrices + biases) * (of - active) // of
