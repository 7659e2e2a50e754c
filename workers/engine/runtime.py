"""Process-wide settings of a worker: threads, an allocator that keeps what it freed, and who multiplies matrices."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import Tensor, float32, nn

from moevolve.evaluators.errors import UserError
from moevolve.kernels import onednn
from moevolve.workers.config import Products

if TYPE_CHECKING:
    from transformers import PreTrainedModel


WORKER_ENV: Mapping[str, str] = MappingProxyType(
    {
        "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
        "MALLOC_MMAP_THRESHOLD_": str(1 << 32),
        "TOKENIZERS_PARALLELISM": "false",
    }
)
"""Environment of a worker process; read when it starts, so it must be set by whoever starts it.

A forward pass allocates and frees the same activations again and again. glibc by default gives large blocks back to
the kernel at once, and every following pass pays for page faults and zeroing. With both thresholds out of reach freed
memory stays with the process. Other C libraries ignore the variables. Threads are set by `configure_runtime`.
"""


def configure_runtime(threads: int) -> None:
    """Fix the number of threads of torch's operators in this process.

    The number is configuration, because the order of floating-point sums, and with it the last digits of a score, may
    depend on it. It overrides `OMP_NUM_THREADS`, which Ray sets to the CPUs an actor reserves.

    Args:
        threads: intra-op threads, at least 1.

    Raises:
        UserError: `threads` is below 1.
    """
    if threads < 1:
        raise UserError(f"engine.threads is {threads}; give the torch threads per worker, at least 1")
    torch.set_num_threads(threads)


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
            module.forward = _Exchanged(_experts, module)


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
