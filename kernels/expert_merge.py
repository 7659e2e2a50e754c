"""Expert merging: `theta'_i = sum_j W_EM[i, j] theta_j`, EEP (arXiv 2407.00945, Eq. 6).

Coefficients stay float32 and sums are accumulated in float32 whatever the experts' dtype, rounded once at the end.
Which formulation runs depends on the coefficients, dtype and devices only, so equal edits give equal bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

_DENSE_COLUMNS = 1 << 16
_SCRATCH_COLUMNS = 1 << 15
_SPARSE_COLUMNS = 1 << 14
_STAGED_COLUMNS = 1 << 22

_SPARSE_DENSITY = 1 / 3
"""Below this share of non-zero coefficients, adding scaled experts one by one beats a matrix product on a CPU."""


def merge_experts(coefficients: Tensor, experts: Tensor, out: Tensor) -> None:
    """Write merged experts straight into a preallocated buffer.

    Args:
        coefficients: `W_EM`, float32 [n', n], finite, on the host.
        experts: parameters of the n experts, contiguous [n, ...], float32, bfloat16 or float16.
        out: buffer for the n' new experts, contiguous [n', ...], dtype of `experts`; on the device of `experts`, or on
            another one, to which the experts in use are then streamed piece by piece.
    """
    retained, count = coefficients.shape
    source, target = experts.view(count, -1), out.view(retained, -1)
    if source.device != target.device:
        _merge_streamed(coefficients, source, target)
    elif source.device.type == "cpu" and int(coefficients.count_nonzero()) <= _SPARSE_DENSITY * coefficients.numel():
        _merge_sparse(coefficients, source, target)
    else:
        _merge_dense(coefficients.to(source.device), source, target)


def _merge_dense(coefficients: Tensor, source: Tensor, target: Tensor) -> None:
    """One matrix product, in pieces that stay in cache."""
    if source.dtype == torch.float32:
        if source.device.type != "cpu":
            torch.mm(coefficients, source, out=target)
            return
        step = _DENSE_COLUMNS * torch.get_num_threads()
        for start in range(0, source.shape[1], step):
            piece = slice(start, start + step)
            torch.mm(coefficients, source[:, piece], out=target[:, piece])
        return
    step = _SCRATCH_COLUMNS if source.device.type == "cpu" else _STAGED_COLUMNS
    step = min(step, source.shape[1])
    wide = torch.empty((source.shape[0], step), dtype=torch.float32, device=source.device)
    merged = torch.empty((target.shape[0], step), dtype=torch.float32, device=source.device)
    for start in range(0, source.shape[1], step):
        width = min(step, source.shape[1] - start)
        wide[:, :width].copy_(source[:, start : start + width])
        torch.mm(coefficients, wide[:, :width], out=merged[:, :width])
        target[:, start : start + width].copy_(merged[:, :width])


def _merge_sparse(coefficients: Tensor, source: Tensor, target: Tensor) -> None:
    """Scaled additions of the experts with a non-zero coefficient, in pieces that stay in cache."""
    terms = [[(j, c) for j, c in enumerate(row) if c != 0.0] for row in coefficients.tolist()]
    step = min(_SPARSE_COLUMNS, source.shape[1])
    exact = source.dtype == torch.float32
    scratch = torch.empty(step, dtype=torch.float32)
    for start in range(0, source.shape[1], step):
        width = min(step, source.shape[1] - start)
        inputs, outputs = source[:, start : start + width].unbind(0), target[:, start : start + width].unbind(0)
        for row, output in zip(terms, outputs, strict=True):
            if not row:
                output.zero_()
                continue
            total = output if exact else scratch[:width]
            (first, weight), *others = row
            if exact and weight == 1.0:
                total.copy_(inputs[first])
            else:
                torch.mul(inputs[first], weight, out=total) if exact else total.copy_(inputs[first]).mul_(weight)
            for old, coefficient in others:
                total.add_(inputs[old], alpha=coefficient)
            if not exact:
                output.copy_(total)


def _merge_streamed(coefficients: Tensor, source: Tensor, target: Tensor) -> None:
    """Bring the experts in use to the target's device piece by piece and merge them there."""
    used = coefficients.any(dim=0).nonzero().flatten().tolist()
    if not used:
        target.zero_()
        return
    weights = coefficients[:, used].to(target.device)
    step = min(_STAGED_COLUMNS, source.shape[1])
    staged = torch.empty((len(used), step), dtype=source.dtype, device=target.device)
    for start in range(0, source.shape[1], step):
        width = min(step, source.shape[1] - start)
        for row, old in enumerate(used):
            staged[row, :width].copy_(source[old, start : start + width], non_blocking=True)
        _merge_dense(weights, staged[:, :width], target[:, start : start + width])
