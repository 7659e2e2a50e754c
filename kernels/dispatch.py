"""Which implementation of a kernel runs: a question of device, dtype, shape and what is installed, never of values."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

from torch import Tensor


@cache
def has_triton() -> bool:
    """Whether Triton is installed. It comes with CUDA builds of torch for Linux, not with those for CPUs."""
    return find_spec("triton") is not None


def uses_triton(*tensors: Tensor) -> bool:
    """Whether a Triton kernel can run on these tensors: all on one CUDA device, and Triton installed."""
    first = tensors[0].device
    return first.type == "cuda" and has_triton() and all(tensor.device == first for tensor in tensors)
