"""Expert merging: `theta'_i = sum_j W_EM[i, j] theta_j`, EEP (arXiv 2407.00945, Eq. 6).

Coefficients stay float32 and sums are accumulated in float32 whatever the experts' dtype, rounded once at the end.
Which formulation runs depends on the coefficients, shapes, dtype and devices only, so equal edits give equal bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moevolve.kernels.dispatch import uses_triton

_DENSE_COLUMNS = 1 << 16
_SCRATCH_COLUMNS = 1 << 15
_STAGED_COLUMNS = 1 << 22

_BAG_COLUMNS = 1024
_BAG_ROWS = 32
"""Rows of `_BAG_COLUMNS` values per step and expert: all experts' pieces (128 KiB each) stay in cache."""


def merge_experts(coefficients: Tensor, experts: Tensor, out: Tensor) -> None:
    """Write merged experts of one candidate, or of P at once, straight into a preallocated buffer.

    On a CPU each candidate's experts get the bits they get alone.

    Args:
        coefficients: `W_EM`, float32 [n', n] or [P, n', n], finite, on the host.
        experts: parameters of the n experts, contiguous [n, ...], float32, bfloat16 or float16.
        out: buffer for the new experts, contiguous [n', ...] or [P, n', ...], dtype of `experts`; on the device of
            `experts`, or on another one, to which the experts in use are then streamed piece by piece.
    """
    candidates = coefficients.reshape(-1, *coefficients.shape[-2:])
    population, retained, count = candidates.shape
    source, target = experts.view(count, -1), out.view(population * retained, -1)
    if source.device != target.device:
        _merge_streamed(coefficients.reshape(-1, count), source, target)
    elif uses_triton(source, target):
        from moevolve.kernels.triton_merge import merge

        merge(coefficients.reshape(-1, count).to(source.device), source, target)
    elif source.device.type != "cpu":
        _merge_dense(coefficients.reshape(-1, count).to(source.device), source, target)
    else:
        for each, merged in zip(candidates, target.view(population, retained, -1), strict=True):
            _merge_on_host(each, source, merged)


def _merge_on_host(coefficients: Tensor, source: Tensor, target: Tensor) -> None:
    """One candidate, on a CPU."""
    if source.dtype == torch.float32 and source.shape[1] % _BAG_COLUMNS == 0 and _is_sparse(coefficients):
        _merge_bags(coefficients, source, target)
    else:
        _merge_dense(coefficients, source, target)


def _is_sparse(coefficients: Tensor) -> bool:
    """Whether bags beat a matrix product.

    Bags cost in proportion to the non-zero coefficients, the product whatever they are. Measured on one core, they
    break even at about one coefficient per expert read or written (few experts), or a quarter of the matrix (many).
    """
    retained, count = coefficients.shape
    return int(coefficients.count_nonzero()) <= max(retained + count, retained * count // 4)


def _merge_dense(coefficients: Tensor, source: Tensor, target: Tensor) -> None:
    """One matrix product, on a CPU in pieces that stay in cache."""
    on_cpu = source.device.type == "cpu"
    if source.dtype == torch.float32:
        step = _DENSE_COLUMNS * torch.get_num_threads() if on_cpu else source.shape[1]
        for start in range(0, source.shape[1], step):
            piece = slice(start, start + step)
            torch.mm(coefficients, source[:, piece], out=target[:, piece])
        return
    step = min(_SCRATCH_COLUMNS if on_cpu else _STAGED_COLUMNS, source.shape[1])
    wide = torch.empty((source.shape[0], step), dtype=torch.float32, device=source.device)
    merged = torch.empty((target.shape[0], step), dtype=torch.float32, device=source.device)
    for start in range(0, source.shape[1], step):
        width = min(step, source.shape[1] - start)
        wide[:, :width].copy_(source[:, start : start + width])
        torch.mm(coefficients, wide[:, :width], out=merged[:, :width])
        target[:, start : start + width].copy_(merged[:, :width])


def _merge_bags(coefficients: Tensor, source: Tensor, target: Tensor) -> None:
    """Weighted sums over the non-zero coefficients only, as bags of an embedding.

    The experts are read as a table of short rows; bag (i, r) sums row r of every expert that new expert i uses. The sum
    stays in registers while each needed value is read once, and a step's rows of all experts stay in cache.
    """
    retained, count = coefficients.shape
    rows = source.shape[1] // _BAG_COLUMNS
    table = source.view(count * rows, _BAG_COLUMNS)
    uses = [row.nonzero().flatten() for row in coefficients]
    for start in range(0, rows, _BAG_ROWS):
        step = min(_BAG_ROWS, rows - start)
        if start == 0 or step < _BAG_ROWS:
            within = torch.arange(step)[:, None]
            indices = torch.cat([(used * rows + within).flatten() for used in uses])
            weights = torch.cat([row[used].repeat(step) for row, used in zip(coefficients, uses, strict=True)])
            sizes = torch.tensor([len(used) for used in uses]).repeat_interleave(step)
            offsets = sizes.cumsum(0) - sizes
        sums = torch.nn.functional.embedding_bag(
            indices + start, table, offsets, mode="sum", per_sample_weights=weights
        )
        columns = slice(start * _BAG_COLUMNS, (start + step) * _BAG_COLUMNS)
        target[:, columns].copy_(sums.view(retained, step * _BAG_COLUMNS))


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
