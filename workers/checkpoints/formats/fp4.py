"""Four-bit floating-point numbers, E2M1 (OCP Microscaling, v1.0): 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives."""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = 6.0
"""Largest number of E2M1."""
_MIDDLES = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
"""Numbers halfway between neighbours, by the code of the smaller one."""


def fp4_bytes(values: Tensor) -> Tensor:
    """Round numbers to the nearest of E2M1, ties to the even code, and larger ones than 6 to 6.

    Args:
        values: Numbers, [..., even].

    Returns:
        Codes, uint8 [..., half], the first of two numbers in the low bits.
    """
    size = values.abs().float().contiguous()
    below = torch.bucketize(size, _MIDDLES)  # a number in the middle gets the smaller code
    up = (below % 2 == 1) & (size == _MIDDLES[below.clamp_max(len(_MIDDLES) - 1)])
    codes = (below + up + 8 * values.signbit()).to(torch.uint8)
    return codes[..., 0::2] | codes[..., 1::2] << 4
