"""A mixture's gated feed-forward experts over tokens sorted by expert: `down_e (act(gate_e x) * (up_e x))`.

The experts of one model, or of several candidates stacked as [P * n', ...], with any number of tokens each, also none.
Three implementations: `grouped_mm` (torch's grouped matrix product, which `transformers` uses too), `loop` (a product
per expert) and `triton` (gate, up and activation in one kernel, for CUDA). Which one runs by default depends on device,
dtype and shapes; tests/benchmarks/bench_kernels.py compares them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import gelu, linear, silu

from moevolve.kernels.dispatch import uses_triton

Activation = Literal["silu", "gelu"]
Implementation = Literal["grouped_mm", "loop", "triton"]

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": silu, "gelu": gelu}

_ALIGNMENT = 16
"""Bytes that rows must be a multiple of for torch's grouped product."""


def sort_by_expert(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """In which order the pairs of a token and one of its experts lie sorted by expert, and where each expert's end.

    Args:
        chosen: expert of each pair, int64 [tokens, k], from 0 to `experts` - 1.
        experts: E.

    Returns:
        The pairs' places in `chosen.flatten()`, int64 [tokens * k], by token within an expert; and the end of each
        expert's part, int32 [E]. Nothing waits for the device.
    """
    flat = chosen.flatten()
    order = torch.argsort(flat, stable=True)
    bounds = torch.arange(experts, device=flat.device)
    return order, torch.searchsorted(flat[order], bounds, right=True).to(torch.int32)


def grouped_ffn(
    tokens: Tensor,
    ends: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activation: Activation = "silu",
    implementation: Implementation | None = None,
) -> Tensor:
    """Run every expert on its own tokens.

    Args:
        tokens: [pairs, hidden], sorted by expert.
        ends: where each expert's tokens end, int32 [E], ascending, the last one `pairs`.
        gate_up: the gates' rows, then the ups', [E, 2 * width, hidden], contiguous.
        down: [E, hidden, width], contiguous.
        activation: of the gate; `gelu` is the exact one.
        implementation: which one; None for the best (see `best_implementation`).

    Returns:
        [pairs, hidden] in the dtype of `tokens`, which the weights have too.
    """
    name = implementation or best_implementation(tokens, gate_up, down)
    if name == "triton":
        from moevolve.kernels.triton_ffn import ffn

        return ffn(tokens, ends, gate_up, down, activation)
    if name == "loop":
        return _loop(tokens, ends, gate_up, down, ACTIVATIONS[activation])
    gate, up = _grouped_mm(tokens, gate_up, ends).chunk(2, dim=-1)
    return _grouped_mm(ACTIVATIONS[activation](gate) * up, down, ends)


def best_implementation(tokens: Tensor, gate_up: Tensor, down: Tensor) -> Implementation:
    """The one to use: torch's grouped product where it takes the tensors, else Triton on CUDA, else the loop.

    On CUDA torch has a grouped kernel for bfloat16 alone, and runs a product per expert for other dtypes, waiting for
    the device to know the sizes.
    """
    grouped = hasattr(torch.nn.functional, "grouped_mm")
    aligned = all(t.shape[-1] * t.element_size() % _ALIGNMENT == 0 and t.is_contiguous() for t in (gate_up, down))
    if tokens.device.type != "cuda":
        return "grouped_mm" if grouped and aligned else "loop"
    if (
        grouped
        and aligned
        and tokens.dtype == torch.bfloat16
        and torch.cuda.get_device_capability(tokens.device)[0] >= 8
    ):
        return "grouped_mm"
    return "triton" if uses_triton(tokens, gate_up, down) else "loop"


def combine(outputs: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    """Put the experts' outputs back and add them up with the routing weights, in order of rank, in float32.

    Args:
        outputs: [tokens * k, hidden], as `order` sorted them.
        order: of `sort_by_expert`.
        weights: routing weights [tokens, k].

    Returns:
        [tokens, hidden] in the dtype of `outputs`.
    """
    tokens, active = weights.shape
    weighted = outputs.new_empty((tokens * active, outputs.shape[1]), dtype=torch.float32)
    weighted[order] = outputs * weights.flatten()[order][:, None].float()
    return weighted.view(tokens, active, -1).sum(dim=1).to(outputs.dtype)


def _grouped_mm(inputs: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return torch.nn.functional.grouped_mm(inputs, weight.transpose(1, 2), offs=ends)


def _loop(tokens: Tensor, ends: Tensor, gate_up: Tensor, down: Tensor, activate: Callable[[Tensor], Tensor]) -> Tensor:
    out = torch.empty_like(tokens)
    start = 0
    for expert, end in enumerate(ends.tolist()):
        if end > start:
            gate, up = linear(tokens[start:end], gate_up[expert]).chunk(2, dim=-1)
            out[start:end] = linear(activate(gate) * up, down[expert])
        start = end
    return out
