"""Has a resident model multiply on a CPU as `moevolve.kernels.products` does, whoever wrote the layer.

Linear layers and experts of the usual form get a `forward` of ours. Activations, other modules with matrices of their
own (routers, experts of another form), and those around them run their own code, in which calls of torch's products and
activations are caught.
Attention's products are `moevolve.workers.engine.packed_attention`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import Tensor, float32, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from moevolve.evaluators.errors import UserError
from moevolve.kernels import products as kernel
from moevolve.workers.contract.settings import MatmulBackend

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def use_products(model: PreTrainedModel, products: MatmulBackend) -> None:
    """Let what a model computes on a CPU not depend on which rows share a product; modules elsewhere stay as they are.

    A module's parameters may be exchanged later, and hooks see what they saw before.

    Args:
        model: in eval mode, and run without gradients from now on.
        products: who multiplies float32: `torch`, `onednn`, or `auto`, the one that is faster here
            (`moevolve.kernels.products`). Other dtypes are torch's.

    Raises:
        UserError: oneDNN is asked for and torch was built without it.
    """
    if products not in get_args(MatmulBackend):
        raise UserError(f"engine.matmul_backend is {products!r}; use {', '.join(get_args(MatmulBackend))}")
    if products == "onednn" and not kernel.onednn_available():
        raise UserError("engine.matmul_backend: this build of torch has no oneDNN; use torch or auto")
    wanted = takes_onednn(products)
    for module in model.modules():
        if isinstance(module.__dict__.get("forward"), _Exchanged):
            del module.forward
        own = list(module.parameters(recurse=False))
        if any(each.device.type != "cpu" for each in own):
            continue
        by_onednn = wanted and all(each.dtype == float32 for each in own)
        if type(module) is nn.Linear:
            module.forward = _Exchanged(_linear, module, by_onednn)  # type: ignore[method-assign]
        elif _plain_experts(module):
            module.forward = _Exchanged(_experts, module, by_onednn)
        elif type(module).__module__ in _ACTIVATIONS or any(map(_has_matrices, (module, *module.children()))):
            module.forward = _Exchanged(_caught, module)


def takes_onednn(products: MatmulBackend) -> bool:
    """Whether float32 products on this machine's CPU go through oneDNN."""
    return products == "onednn" or (products == "auto" and kernel.onednn_preferred())


_ACTIVATIONS = ("torch.nn.modules.activation", "transformers.activations")


_uncaught = torch._C.DisableTorchFunction  # noqa: SLF001 - torch has no public name for it
"""Runs what follows by itself, within modules around it whose own products are caught; catching takes microseconds."""


class _Exchanged(partial[Any]):
    """What runs in the place of a module's own `forward`."""


def _linear(module: nn.Linear, by_onednn: bool, inputs: Tensor) -> Tensor:
    with _uncaught():
        return kernel.linear(inputs, module.weight, module.bias, by_onednn=by_onednn)


def _experts(module: Any, by_onednn: bool, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """What `transformers` calls experts with: [tokens, hidden], and [tokens, k] chosen experts and their weights."""
    matrices = (module.gate_up_proj, module.down_proj)
    with _uncaught():
        return kernel.experts(hidden, top_k_index, top_k_weights, *matrices, module.act_fn, by_onednn=by_onednn)


def _caught(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    with _Catching():
        return type(module).forward(module, *args, **kwargs)


def _plain_experts(module: nn.Module) -> bool:
    """Whether a module is `down(act(gate x) * (up x))` per expert, with the weights where `transformers` has them."""
    traits = {"has_gate": True, "is_concatenated": True}
    traits |= {"has_bias": False, "is_transposed": False, "has_post_expert_norm": False}
    if any(getattr(module, name, None) is not value for name, value in traits.items()):
        return False
    gate = getattr(type(module), "_apply_gate", None)
    return getattr(gate, "__name__", "") == "_default_apply_gate"


def _has_matrices(module: nn.Module) -> bool:
    usual = isinstance(module, (nn.Linear, nn.Embedding))
    return not usual and any(each.dim() > 1 for each in module.parameters(recurse=False))


class _Catching(TorchFunctionMode):
    """While it is entered, products and activations on a CPU are computed by our kernels."""

    def __torch_function__(
        self, func: Callable[..., Any], _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        settings = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, Tensor) and first.device.type == "cpu" and "out" not in settings:
            if func in _PRODUCTS:
                return _PRODUCTS[func](*args, **settings)
            if func in _FUNCTIONS:
                return kernel.elementwise(lambda part: func(part, *args[1:], **settings), first)
        return func(*args, **settings)


def _multiply(left: Tensor, right: Tensor) -> Tensor:
    """`left @ right`."""
    if right.dim() == 2:
        return kernel.linear(left, right.t())
    rows = torch.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    one = left.expand(*rows, *left.shape[-2:]).flatten(0, -3)
    other = right.expand(*rows, *right.shape[-2:]).flatten(0, -3)
    return kernel.batched(one, other.transpose(1, 2)).view(*rows, left.shape[-2], right.shape[-1])


def _grouped(inputs: Tensor, weights: Tensor, *, offs: Tensor, **settings: None) -> Tensor:
    return kernel.grouped(inputs, weights, offs)


_PRODUCTS: Mapping[Callable[..., Any], Callable[..., Tensor]] = {
    functional.linear: kernel.linear,
    functional.grouped_mm: _grouped,
    torch._grouped_mm: _grouped,  # noqa: SLF001
    torch.mm: _multiply,
    torch.bmm: _multiply,
    torch.matmul: _multiply,
    Tensor.matmul: _multiply,
    Tensor.__matmul__: _multiply,
}

_FUNCTIONS = frozenset(
    (torch.sigmoid, Tensor.sigmoid, functional.sigmoid, functional.silu, functional.gelu, functional.softplus)
)
"""Those that torch computes otherwise at a tensor's end."""
