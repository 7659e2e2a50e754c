"""What edits of dense feed-forward networks share on a resident model."""

from __future__ import annotations

from typing import Protocol

from moevolve.evaluators.errors import UserError
from moevolve.kernels.expert_ffn import NetworkWeights
from moevolve.workers.families.layers import DenseLayer
from moevolve.workers.methods.applicator import ModelParts


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
