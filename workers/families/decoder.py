"""Access to the layers of a decoder, and skipping some of them in a forward pass."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel


# Argument of layers that return hidden states and which tokens an indexer chose (GLM-5, Hunyuan 4): that choice of the
# layer before.
CARRIED = "prev_topk_indices"


def carries(layer: nn.Module) -> bool:
    """Return whether a decoder layer hands an indexer's choice to the next layer; see `CARRIED`."""
    return CARRIED in inspect.signature(type(layer).forward).parameters


def cache_name(model: nn.Module) -> str:
    """Return the name of the cache in a model's arguments and outputs, another one from transformers 5.24 on."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def state_of(output: Tensor | tuple[Tensor, ...]) -> Tensor:
    """Return the hidden states that a decoder layer returns, alone or before other values."""
    return output[0] if isinstance(output, tuple) else output


def softmax_attention(layer: nn.Module) -> Any:
    """Return the attention of a decoder layer over cached keys and values; None if it has a recurrent mixer instead.

    Linear attention, Mamba and short convolutions all begin with a convolution, which softmax attention never has.
    """
    mixer = getattr(layer, "mixer", None)  # of Nemotron-H: attention, Mamba or a feed-forward block
    attention = getattr(layer, "self_attn", mixer if hasattr(mixer, "k_proj") else None)
    return None if attention is None or any(isinstance(each, nn.Conv1d) for each in attention.children()) else attention


def decoder_of(model: PreTrainedModel) -> Any:
    """Return the decoder of a causal language model, whose layers are in `layers`."""
    decoder = model.get_decoder()
    # Llama-4's gives the whole model, whose class calls its decoder by another name.
    return decoder if hasattr(decoder, "layers") else model.model


def decoder_layers(model: PreTrainedModel) -> tuple[nn.Module, ...]:
    """Return the decoder's layers in the order in which they run; empty if that order isn't known."""
    layers = getattr(decoder_of(model), "layers", None)
    known = isinstance(layers, nn.ModuleList) and len(layers) == getattr(model.config, "num_hidden_layers", None)
    return tuple(layers) if known and layers is not None else ()


@contextmanager
def skipped(layers: Sequence[nn.Module], state: Tensor | None = None) -> Iterator[None]:
    """Context manager that makes consecutive layers return their input instead of running, or the last one `state`."""
    # An instance's own `forward` hides its class's; another wrapper may have set one already.
    before = [layer.__dict__.get("forward") for layer in layers]
    try:
        for i, layer in enumerate(layers):
            layer.forward = _identity(state if i == len(layers) - 1 else None, carries(layer))
        yield
    finally:
        for layer, forward in zip(layers, before, strict=True):
            if forward is None:
                layer.__dict__.pop("forward", None)
            else:
                layer.forward = forward


@contextmanager
def only_layer(
    layers: Sequence[nn.Module], index: int, state: Tensor | None, part: nn.Module | None = None
) -> Iterator[list[Tensor]]:
    """Context manager in which a decoder's pass runs one of its layers on `state` [rows, columns, hidden] and no other.

    Every pass appends the layer's output, or the first input of `part`, a module of the layer. With the number of
    layers as `index` and no state, it appends the embeddings.
    """
    found: list[Tensor] = []
    first, read = layers[:index], layers[-1] if index == len(layers) else part or layers[index]
    before = part is not None

    def keep(module: nn.Module, args: tuple[Tensor, ...], output: Tensor | tuple[Tensor, ...]) -> None:
        found.append(args[0] if before else state_of(output))

    with ExitStack() as stack:
        stack.callback(read.register_forward_hook(keep).remove)
        stack.enter_context(skipped(first, state))
        stack.enter_context(skipped(layers[index + 1 :]))
        if state is not None and not first:
            # There is no layer before that could pass it on.
            handle = layers[0].register_forward_pre_hook(lambda _module, args: (state, *args[1:]))
            stack.callback(handle.remove)
        yield found


def _identity(state: Tensor | None, carrying: bool) -> Callable[..., object]:
    def forward(hidden_states: Tensor, *args: object, **kwargs: object) -> object:
        given = hidden_states if state is None else state
        return (given, kwargs.get(CARRIED)) if carrying else given

    return forward
