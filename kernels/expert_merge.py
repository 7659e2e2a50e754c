"""Expert merging: `theta'_i = sum_j W_EM[i, j] theta_j`, EEP (arXiv 2407.00945, Eq. 6)."""

from __future__ import annotations

import torch
from torch import Tensor


def merge_experts(coefficients: Tensor, experts: Tensor, out: Tensor) -> None:
    """Write merged experts straight into a preallocated buffer.

    Args:
        coefficients: `W_EM`, float32 [n', n], finite, on any device.
        experts: parameters of the n experts, contiguous [n, ...].
        out: buffer for the n' new experts, contiguous [n', ...], dtype of `experts`.
    """
    retained, count = coefficients.shape
    torch.mm(coefficients.to(experts.device, experts.dtype), experts.view(count, -1), out=out.view(retained, -1))
