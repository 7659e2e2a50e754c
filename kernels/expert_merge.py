"""Expert merging: `theta'_i = sum_j W_EM[i, j] theta_j`, EEP (arXiv 2407.00945, Eq. 6).

Coefficients and sums are float32 whatever the experts' dtype; results are rounded once at the end. The implementation
is chosen by coefficients, shapes, dtype and devices only, so equal edits give equal results, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

# Number of values computed per step on a CPU; few enough for malloc to reuse pages.
_MERGED_VALUES = 1 << 17
# Number of values of all experts that are converted to float32 per step on a CPU; they stay in the L2 cache.
_SCRATCH_VALUES = 1 << 18
# Number of values of all experts per step on other devices; with their float32 copies they take 200 MB.
_STAGED_VALUES = 1 << 25
# Columns per bag: their sums fit into registers, and the values of all experts in them into the L1 cache.
_BAG_COLUMNS = 256


def merge_experts(coefficients: Tensor, experts: Tensor, out: Tensor) -> None:
    """Write merged experts into a preallocated buffer.

    Args:
        coefficients: Merging matrix `W_EM`, float32 [n', n], finite, on the host.
        experts: Parameters of the n experts, contiguous [n, ...], float32, bfloat16 or float16.
        out: Buffer for the new experts, contiguous [n', ...], in the dtype of `experts`. It may be on another device
            than `experts`, to which the experts in use are then copied piece by piece.
    """
    retained, count = coefficients.shape
    source, target = experts.view(count, -1), out.view(retained, -1)
    if source.device != target.device:
        _merge_streamed(coefficients, source, target)
    elif source.device.type != "cpu":
        _merge_dense(coefficients.to(source.device), source, target)
    else:
        _merge_on_host(coefficients, source, target)


@dataclass(frozen=True, slots=True, eq=False)
class _Bags:
    """Weighted sums of experts as the bags of `embedding_bag`, for `rows` rows of `_BAG_COLUMNS` values per expert.

    Sums over the non-zero coefficients stay in registers, and each needed value is read once. The bags of a row are
    consecutive, so that all but the first find it in the cache.
    """

    indices: Tensor
    weights: Tensor
    offsets: Tensor

    @classmethod
    def of(cls, coefficients: Tensor, rows: int, stride: int) -> _Bags:
        """Make the bags of a table in which each expert's rows begin `stride` rows after those of the previous one."""
        new, old = coefficients.nonzero().unbind(dim=1)
        counts = coefficients.count_nonzero(dim=1).repeat(rows)
        indices = (torch.arange(rows)[:, None] + old * stride).flatten()
        offsets = counts.cumsum(0) - counts
        return cls(indices.int(), coefficients[new, old].repeat(rows), offsets.int())

    def sums(self, table: Tensor) -> Tensor:
        """Compute the sums [rows * n', _BAG_COLUMNS] from a table of rows."""
        return embedding_bag(self.indices, table, self.offsets, mode="sum", per_sample_weights=self.weights)


def _merge_on_host(coefficients: Tensor, source: Tensor, target: Tensor) -> None:
    """Write `coefficients @ source`, [n', size] from [n, size], some columns at a time."""
    count, size = source.shape
    wide = source.dtype == torch.float32
    values = min(_MERGED_VALUES // len(coefficients), size if wide else _SCRATCH_VALUES // count)
    step = max(values // _BAG_COLUMNS, 1) * _BAG_COLUMNS
    # The cost of bags is proportional to the number of non-zero coefficients. On one core they break even with a matrix
    # product at about two coefficients per expert read or written (few experts), or 0.6 of the matrix (many experts).
    most = max(2 * (len(coefficients) + count), 3 * len(coefficients) * count // 5)
    bagged = size % _BAG_COLUMNS == 0 and int(coefficients.count_nonzero()) <= most
    bags: dict[int, _Bags] = {}
    scratch = torch.empty(0 if wide else count * min(step, size), dtype=torch.float32)
    for start in range(0, size, step):
        width = min(step, size - start)
        piece, merged = source[:, start : start + width], target[:, start : start + width]
        if not wide:
            piece = scratch[: count * width].view(count, width).copy_(piece)
        if not bagged:
            _product(coefficients, piece, merged)
            continue
        rows, stride = width // _BAG_COLUMNS, piece.stride(0) // _BAG_COLUMNS
        if rows not in bags:
            bags[rows] = _Bags.of(coefficients, rows, stride)
        table = piece.as_strided(((count - 1) * stride + rows, _BAG_COLUMNS), (_BAG_COLUMNS, 1))
        sums = bags[rows].sums(table).view(rows, -1, _BAG_COLUMNS).transpose(0, 1)
        merged.view(-1, rows, _BAG_COLUMNS).copy_(sums)


def _product(coefficients: Tensor, piece: Tensor, merged: Tensor) -> None:
    """Write `coefficients @ piece`, computed in float32, to `merged`, which may have another dtype."""
    if merged.dtype == torch.float32:
        torch.mm(coefficients, piece, out=merged)
    else:
        merged.copy_(torch.mm(coefficients, piece))


def _merge_dense(coefficients: Tensor, source: Tensor, target: Tensor) -> None:
    """Merge by matrix products on a GPU, in pieces if experts must be converted to float32."""
    if source.dtype == torch.float32:
        torch.mm(coefficients, source, out=target)
        return
    step = _staged_columns(len(source))
    for start in range(0, source.shape[1], step):
        piece = slice(start, start + step)
        _product(coefficients, source[:, piece].float(), target[:, piece])


def staged_bytes(retained: int, experts: int, values: int, itemsize: int) -> int:
    """Peak temporary device memory of merging one tensor, in bytes; an expert has `values` of `itemsize` bytes."""
    widened = 0 if itemsize == 4 else 4 * (experts + retained)
    return min(_staged_columns(experts), values) * (itemsize * experts + widened)


def _staged_columns(experts: int) -> int:
    return max(1, _STAGED_VALUES // experts)


def _merge_streamed(coefficients: Tensor, source: Tensor, target: Tensor) -> None:
    """Copy the experts in use to the target's device piece by piece, and merge them there."""
    used = coefficients.any(dim=0).nonzero().flatten().tolist()
    if not used:
        target.zero_()
        return
    weights = coefficients[:, used].to(target.device)
    step = min(_staged_columns(len(used)), source.shape[1])
    staged = torch.empty((len(used), step), dtype=source.dtype, device=target.device)
    for start in range(0, source.shape[1], step):
        width = min(step, source.shape[1] - start)
        for row, old in enumerate(used):
            staged[row, :width].copy_(source[old, start : start + width], non_blocking=True)
        _merge_dense(weights, staged[:, :width], target[:, start : start + width])
