"""Where the dense feed-forward networks and linear layers of a model are, and how to put something in their place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class DenseFamily:
    """How one `transformers` model type of dense feed-forward networks names their parts.

    Attributes:
        model_type: `model_type` of its config.
        title: what people call it.
        up, gate, down: the linear layers; `gate` is None for plain networks, `down(act(up(x)))`.
        activation: name of the activation module.
        inline: the decoder layer itself holds the parts and runs them, instead of a module `mlp`.
    """

    model_type: str
    title: str
    up: str
    gate: str | None
    down: str
    activation: str
    inline: bool = False


def _gated(model_type: str, title: str) -> DenseFamily:
    return DenseFamily(model_type, title, "up_proj", "gate_proj", "down_proj", "act_fn")


DENSE_FAMILIES: dict[str, DenseFamily] = {
    family.model_type: family
    for family in (
        _gated("llama", "Llama"),
        _gated("mistral", "Mistral"),
        _gated("qwen2", "Qwen2"),
        _gated("qwen3", "Qwen3"),
        DenseFamily("opt", "OPT", "fc1", None, "fc2", "activation_fn", inline=True),
        DenseFamily("phi", "Phi", "fc1", None, "fc2", "activation_fn"),
    )
}


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


def find_dense_layers(model: PreTrainedModel) -> tuple[DenseLayer, ...]:
    """Handles of the dense feed-forward networks of a loaded or meta-device model, not yet edited, in order of depth.

    Empty for a family that isn't in `DENSE_FAMILIES`.
    """
    family = DENSE_FAMILIES.get(model.config.model_type)
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
