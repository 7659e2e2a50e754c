"""What edits of dense feed-forward networks share: on a resident model, in checkpoints, and in what these cost."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from moevolve.evaluators.errors import UserError
from moevolve.kernels.expert_ffn import NetworkWeights
from moevolve.workers.checkpoints.native import NATIVE_PREFIX, write_native
from moevolve.workers.contract.methods import ModelParts, ModuleUse, Resident
from moevolve.workers.families.base import DenseFamily
from moevolve.workers.families.layers import DenseLayer
from moevolve.workers.families.registry import dense_family

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


class NetworkEdit(Protocol):
    """An edit of all feed-forward networks of a dense model."""

    @property
    def layers(self) -> int:
        """Networks."""
        ...

    @property
    def width(self) -> int:
        """Neurons of a network."""
        ...

    @property
    def hidden(self) -> int:
        """Inputs of a network."""
        ...


def dense_layers_for(kind: str, parts: ModelParts) -> tuple[DenseLayer, ...]:
    """The networks that edits of a kind are made on.

    Raises:
        UserError: the model has no dense feed-forward networks.
    """
    if not parts.dense_layers:
        raise UserError(f"{kind} edits need dense feed-forward networks of a family where they are known")
    return parts.dense_layers


def check_shape(edit: NetworkEdit, layers: tuple[DenseLayer, ...]) -> None:
    """Refuse an edit that was made for another model.

    Raises:
        UserError: it has other shapes than the model's networks.
    """
    found = (len(layers), layers[0].width, layers[0].hidden)
    if (edit.layers, edit.width, edit.hidden) != found:
        raise UserError(
            f"the edit is for {edit.layers} networks of {edit.width} neurons on {edit.hidden} inputs, the model "
            f"has {found[0]} of {found[1]} on {found[2]}; use the model it was searched on"
        )


def weights_of(layer: DenseLayer) -> NetworkWeights:
    """The tensors that a layer's network runs on now."""
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


def write_native_dense(resident: Resident, directory: Path, template: str, **settings: object) -> type[PreTrainedModel]:
    """Write modelling code for a dense family and import its model class.

    Args:
        resident: a model of the family.
        directory: the checkpoint's folder.
        template: of the code, as `moevolve.workers.checkpoints.native.render` takes it.
        settings: what the template needs to know besides the family.
    """
    family = resident.dense_layers[0].family
    return write_native(
        resident.model,
        directory,
        template,
        family.title,
        up=family.up,
        gate=repr(family.gate),
        down=family.down,
        activation=family.activation,
        inline=family.inline,
        **settings,
    )


def native_family(config: PretrainedConfig) -> DenseFamily:
    """The family that the modelling code of a native checkpoint builds on."""
    family = dense_family(config.model_type.removeprefix(NATIVE_PREFIX))
    assert family is not None
    return family


def network_use(module: Any, config: PretrainedConfig, working: int, of: int) -> ModuleUse:
    """A network of which a token runs `working` of `of` equal parts, chosen by a router.

    A part is rows of the layers in, and columns of the layer out, whose bias is always added.
    """
    family = native_family(config)
    into = [getattr(module, part) for part in (family.up, family.gate) if part is not None]
    matrices = sum(part.weight.numel() for part in (*into, getattr(module, family.down)))
    biases = sum(part.bias.numel() for part in into if part.bias is not None)
    idle = (matrices + biases) * (of - working) // of
    return ModuleUse(idle, matrices * working // of + module.router_weight.numel())
