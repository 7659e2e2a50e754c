"""Makes a model use the matrix products of `moevolve.kernels.products` on a CPU.

Linear layers and experts of the usual form get another `forward`. Activations, other modules with matrices (routers,
experts of another form) and their parents keep their code, in which torch's products and activations are intercepted.
The products of attention are in `moevolve.workers.engine.packed_attention`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, float32, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from moevolve.kernels import products as kernel

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def make_rows_independent(model: PreTrainedModel) -> None:
    """Make every row's results on a CPU independent of the other rows of a product.

    A model on another device isn't changed. Parameters may be replaced later, and hooks work as before. The model is in
    eval mode, and must from now on run without gradients.
    """
    preferred = kernel.onednn_preferred()
    # Weights that a device gets when a pass reaches them are on the host now.
    on_cpu = model.get_input_embeddings().weight.device.type == "cpu"
    for module in model.modules():
        if isinstance(module.__dict__.get("forward"), _PatchedForward):
            del module.forward
        own = list(module.parameters(recurse=False))
        if not on_cpu:
            continue
        use_onednn = preferred and all(each.dtype == float32 for each in own)
        if type(module) is nn.Linear:
            module.forward = _PatchedForward(_linear, module, use_onednn)  # type: ignore[method-assign]
        elif _has_usual_experts(module):
            module.forward = _PatchedForward(_experts, module, use_onednn)
        elif type(module).__module__ in _ACTIVATIONS or any(map(_has_matrices, (module, *module.children()))):
            module.forward = _PatchedForward(_intercepted, module)


_ACTIVATIONS = ("torch.nn.modules.activation", "transformers.activations")


# Turns interception by parent modules off, which takes microseconds per call and isn't needed in our kernels.
_without_interception = torch._C.DisableTorchFunction  # noqa: SLF001 - torch has no public name for it


class _PatchedForward(partial[Any]):
    """Replacement of a module's `forward`."""


def _linear(module: nn.Linear, use_onednn: bool, inputs: Tensor) -> Tensor:
    with _without_interception():
        return kernel.linear(inputs, module.weight, module.bias, use_onednn=use_onednn)


def _experts(module: Any, use_onednn: bool, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    matrices = (module.gate_up_proj, module.down_proj)
    with _without_interception():
        return kernel.experts(hidden, top_k_index, top_k_weights, *matrices, module.act_fn, use_onednn=use_onednn)


def _intercepted(module: nn.Module, *args: object, **kwargs: object) -> object:
    with _Interception():
        return type(module).forward(module, *args, **kwargs)


def _has_usual_experts(module: nn.Module) -> bool:
    """Whether a module computes `down(act(gate x) * (up x))` per expert, with the usual layout of its weights."""
    traits = {"has_gate": True, "is_concatenated": True}
    traits |= {"has_bias": False, "is_transposed": False, "has_post_expert_norm": False}
    if any(getattr(module, name, None) is not value for name, value in traits.items()):
        return False
    gate = getattr(type(module), "_apply_gate", None)
    return getattr(gate, "__name__", "") == "_default_apply_gate"


def _has_matrices(module: nn.Module) -> bool:
    # A subclass of `nn.Linear` may be a router, which runs as its own class says.
    usual = type(module) is nn.Linear or isinstance(module, nn.Embedding)
    return not usual and any(each.dim() > 1 for each in module.parameters(recurse=False))


class _Interception(TorchFunctionMode):
    """Computes products and activations on a CPU with our kernels."""

    def __torch_function__(
        self, func: Callable[..., Tensor], _: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        settings = kwargs or {}
        # Parents intercept too. Whatever is done with a tensor here, even reading its device, would go through theirs.
        with _without_interception():
            ours = _PRODUCTS.get(func) or (partial(_elementwise, func) if func in _FUNCTIONS else None)
            if ours is not None and args and args[0].device.type == "cpu" and "out" not in settings:
                return ours(*args, **settings)
            return func(*args, **settings)


def _elementwise(func: Callable[..., Tensor], values: Tensor, *args: object, **settings: object) -> Tensor:
    return kernel.elementwise(lambda part: func(part, *args, **settings), values)


def _multiply(left: Tensor, right: Tensor) -> Tensor:
    if right.dim() == 2:
        return kernel.linear(left, right.t())
    rows = torch.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    one = left.expand(*rows, *left.shape[-2:]).flatten(0, -3)
    other = right.expand(*rows, *right.shape[-2:]).flatten(0, -3)
    return kernel.batched(one, other.transpose(1, 2)).view(*rows, left.shape[-2], right.shape[-1])


def _grouped(inputs: Tensor, weights: Tensor, *, offs: Tensor, **settings: None) -> Tensor:
    return kernel.grouped(inputs, weights, offs)


_PRODUCTS: Mapping[Callable[..., object], Callable[..., Tensor]] = {
    functional.linear: kernel.linear,
    functional.grouped_mm: _grouped,
    torch._grouped_mm: _grouped,  # noqa: SLF001
    torch.mm: _multiply,
    torch.bmm: _multiply,
    torch.matmul: _multiply,
    Tensor.matmul: _multiply,
    Tensor.__matmul__: _multiply,
}

# Activations that torch computes with other code at the end of a tensor.
_FUNCTIONS = frozenset(
    (torch.sigmoid, Tensor.sigmoid, functional.sigmoid, functional.silu, functional.gelu, functional.softplus)
)
