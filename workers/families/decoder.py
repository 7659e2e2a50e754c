"""The decoder's layers one by one, and running some of them only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def decoder_layers(model: PreTrainedModel) -> tuple[nn.Module, ...]:
    """The decoder's layers in the order in which they run; empty where that isn't known."""
    layers = getattr(model.get_decoder(), "layers", None)
    known = isinstance(layers, nn.ModuleList) and len(layers) == getattr(model.config, "num_hidden_layers", None)
    return tuple(layers) if known and layers is not None else ()


@contextmanager
def skipped(layers: Sequence[nn.Module], state: Tensor | None = None) -> Iterator[None]:
    """For the length of a `with` block, let layers hand on what they are given instead of running.

    Args:
        layers: of a decoder, one after the other.
        state: what the last of them hands on instead, if given.
    """
    before = [layer.__dict__.get("forward") for layer in layers]
    try:
        for i, layer in enumerate(layers):
            layer.forward = _hand_on(state if i == len(layers) - 1 else None)
        yield
    finally:
        for layer, forward in zip(layers, before, strict=True):
            if forward is None:
                layer.__dict__.pop("forward", None)
            else:
                layer.forward = forward


def _hand_on(state: Tensor | None) -> Callable[..., Tensor]:
    def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden_states if state is None else state

    return forward
