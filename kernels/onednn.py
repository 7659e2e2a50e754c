"""Linear layers and experts through oneDNN, whose float32 products outrun MKL's on processors that Intel didn't make.

torch multiplies float32 matrices by MKL, which keeps its fastest code for Intel's processors: on an AMD EPYC with
AVX-512, one core reaches 97 GFLOP/s that way and 218 through oneDNN (tests/benchmarks/bench_kernels.py). Both compute
in float32; their sums may differ in the last digits. oneDNN makes code for every new shape, which takes as long as a
small product, so the numbers of tokens that experts get are rounded up to few different ones.

Library: oneDNN (https://github.com/uxlfoundation/oneDNN), through the operators that torch's compiler uses on CPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor


@cache
def available() -> bool:
    """Whether torch was built with it."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


@cache
def preferred() -> bool:
    """Whether it is the faster one here: MKL is left to the processors that it is made for."""
    try:
        return available() and "GenuineIntel" not in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x W^T + b`, to be called without gradients.

    Args:
        inputs: float32 [..., features] on a CPU.
        weight: float32 [outputs, features], contiguous.
        bias: float32 [outputs].

    Returns:
        float32 [..., outputs].
    """
    if inputs.numel() == 0:
        return inputs.new_zeros((*inputs.shape[:-1], weight.shape[0]))
    # torch has no public name for a product that always goes through oneDNN.
    product: Tensor = torch.ops.mkldnn._linear_pointwise(inputs, weight, bias, "none", [], "")  # noqa: SLF001
    return product


def experts(
    hidden: Tensor,
    chosen: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activation: Callable[[Tensor], Tensor],
) -> Tensor:
    """A mixture's experts: the chosen ones' `down (act(gate x) * (up x))`, summed with their weights in order of rank.

    Args:
        hidden: float32 [tokens, hidden] on a CPU.
        chosen: int64 [tokens, k].
        weights: float32 [tokens, k].
        gate_up: the gates' rows, then the ups', float32 [experts, 2 * width, hidden], contiguous.
        down: float32 [experts, hidden, width], contiguous.
        activation: of the gates.

    Returns:
        float32 [tokens, hidden].
    """
    tokens, active = chosen.shape
    if not tokens:
        return torch.zeros_like(hidden)
    order = torch.argsort(chosen.flatten(), stable=True)
    counts = torch.bincount(chosen.flatten(), minlength=len(gate_up)).tolist()
    # What fills an expert's rows up is computed and never read.
    outputs = []
    done = 0
    for expert, count in enumerate(counts):
        if count:
            source = torch.zeros(_rounded(count), dtype=torch.int64)
            source[:count] = order[done : done + count] // active
            gate, up = linear(hidden.index_select(0, source), gate_up[expert]).chunk(2, dim=-1)
            outputs.append(linear(activation(gate).mul_(up), down[expert])[:count])
            done += count
    # Joining and selecting takes half as long as torch's copy to an index.
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order))
    return _weighted(torch.cat(outputs).index_select(0, place).view(tokens, active, hidden.shape[1]), weights)


def _rounded(count: int) -> int:
    """`count` or a little more: one of eight sizes per power of two."""
    step = max(8, 1 << max(0, count.bit_length() - 4))
    return -(-count // step) * step


def _weighted(outputs: Tensor, weights: Tensor) -> Tensor:
    """Sums over the middle axis of [tokens, k, hidden] with weights [tokens, k]."""
    total = outputs[:, 0] * weights[:, :1]
    for rank in range(1, weights.shape[1]):
        total.addcmul_(outputs[:, rank], weights[:, rank : rank + 1])
    return total
