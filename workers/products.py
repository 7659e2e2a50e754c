"""Lets a resident model's linear layers and experts run through the fastest matrix products of a CPU."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, get_args

from torch import Tensor, float32, nn

from moevolve.evaluators.errors import UserError
from moevolve.kernels import onednn
from moevolve.workers.config import Products

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def use_products(model: PreTrainedModel, products: Products) -> None:
    """Let a model's layers multiply matrices as the configuration says; layers it doesn't suit stay as they are.

    It suits float32 on a CPU: `nn.Linear`, and experts with gates, whose weights lie as `transformers` fuses them by
    default. A layer's parameters may be exchanged later, and hooks see what they saw before.

    Args:
        model: in eval mode, and run without gradients from now on.
        products: `auto` takes oneDNN where it is the faster one (`moevolve.kernels.onednn`).

    Raises:
        UserError: oneDNN is asked for and torch was built without it.
    """
    if products not in get_args(Products):
        raise UserError(f"engine.products is {products!r}; use {', '.join(get_args(Products))}")
    if products == "onednn" and not onednn.available():
        raise UserError("engine.products: this build of torch has no oneDNN; use torch or auto")
    wanted = takes_onednn(products)
    for module in model.modules():
        if isinstance(module.__dict__.get("forward"), _Exchanged):
            del module.forward
        if wanted and type(module) is nn.Linear and _suits(module.weight):
            module.forward = _Exchanged(_linear, module)  # type: ignore[method-assign]
        elif wanted and _plain_experts(module):
            module.forward = _Exchanged(_experts, module)  # type: ignore[method-assign]


def takes_onednn(products: Products) -> bool:
    """Whether float32 products on this machine's CPU go through oneDNN."""
    return products == "onednn" or (products == "auto" and onednn.preferred())


class _Exchanged(partial[Tensor]):
    """What runs in the place of a module's own `forward`."""


def _suits(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.dtype == float32


def _linear(module: nn.Linear, inputs: Tensor) -> Tensor:
    return onednn.linear(inputs, module.weight, module.bias)


def _plain_experts(module: nn.Module) -> bool:
    """Whether a module is `down(act(gate x) * (up x))` per expert, with the weights where `transformers` has them."""
    traits = {"has_gate": True, "is_concatenated": True}
    traits |= {"has_bias": False, "is_transposed": False, "has_post_expert_norm": False}
    if any(getattr(module, name, None) is not value for name, value in traits.items()):
        return False
    gate = getattr(type(module), "_apply_gate", None)
    return getattr(gate, "__name__", "") == "_default_apply_gate" and _suits(module.gate_up_proj)  # type: ignore[arg-type]


def _experts(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """What `transformers` calls experts with: [tokens, hidden], and [tokens, k] chosen experts and their weights."""
    weights = top_k_weights.to(hidden_states.dtype)
    return onednn.experts(hidden_states, top_k_index, weights, module.gate_up_proj, module.down_proj, module.act_fn)
