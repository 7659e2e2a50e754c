"""Expert merging: `theta'_i = sum_j W_EM[i, j] theta_j`, EEP (arXiv 2407.00945, Eq. 6).

Coefficients stay float32 and sums are accumulated in float32 whatever the experts' dtype, rounded once at the end.
Which formulation runs depends on the coefficients, shapes, dtype and devices only, so equal edits give equal bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from moevolve.kernels.dispatch import uses_triton

_MERGED_VALUES = 1 << 17
"""Values that a step on a CPU computes: no more than malloc hands out without fetching new pages."""

_SCRATCH_VALUES = 1 << 18
"""Values of all experts per step where they are widened to float32 first: those stay in the second-level cache."""

_STAGED_VALUES = 1 << 25
"""Values of all experts per step on other devices: with their float32 copies 200 MB, however many experts there are."""

_BAG_COLUMNS = 256
"""Columns per bag: their sums fit into registers, and all experts' values of them into the first-level cache."""


def merge_experts(coefficients: Tensor, experts: Tensor, out: Tensor) -> None:
    """Write merged experts straight into a preallocated buffer.

    Args:
        coefficients: `W_EM`, float32 [n', n], finite, on the host.
        experts: parameters of the n experts, contiguous [n, ...], float32, bfloat16 or float16.
        out: buffer for the new experts, contiguous [n', ...], dtype of `experts`; on the device of `experts`, or on
            another one, to which the experts in use are then streamed piece by piece.
    """
    retained, count = coefficients.shape
    source, target = experts.view(count, -1), out.view(retained, -1)
    if source.device != target.device:
        _merge_streamed(coefficients, source, target)
    elif uses_triton(source, target):
        from moevolve.kernels.triton_merge import merge

        merge(coefficients.to(source.device).contiguous(), source, target)
    elif source.device.type != "cpu":
        _merge_dense(coefficients.to(source.device), source, target)
    else:
        _merge_on_host(coefficients, source, target)


@dataclass(frozen=True, slots=True, eq=False)
class _Bags:
    """Weighted sums as bags of an embedding, for `rows` rows of `_BAG_COLUMNS` values per expert.

    The sum over the non-zero coefficients stays in registers while each needed value is read once. Bags of the same
    row come one after the other, so that all but the first find it in cache.
    """

    indices: Tensor
    weights: Tensor
    offsets: Tensor

    @classmethod
    def of(cls, coefficients: Tensor, rows: int, stride: int) -> _Bags:
        """For a table in which an expert's rows begin `stride` rows after those of the one before."""
        new, old = coefficients.nonzero().unbind(dim=1)
        counts = coefficients.count_nonzero(dim=1).repeat(rows)
        indices = (torch.arange(rows)[:, None] + old * stride).flatten()
        offsets = counts.cumsum(0) - counts
        return cls(indices.int(), coefficients[new, old].repeat(rows), offsets.int())

    def sums(self, table: Tensor) -> Tensor:
        """[rows * n', _BAG_COLUMNS] of a table of rows."""
        return embedding_bag(self.indices, table, self.offsets, mode="sum", per_sample_weights=self.weights)


def _is_sparse(coefficients: Tensor) -> bool:
    """Whether bags beat a matrix product.

    Bags cost in proportion to the non-zero coefficients, the product whatever they are. Measured on one core, they
    break even at about two coefficients per expert read or written (few experts), or 0.6 of the matrix (many).
    """
    retained, count = coefficients.shape
    return int(coefficients.count_nonzero()) <= max(2 * (retained + count), 3 * retained * count // 5)


def _merge_on_host(coefficients: Tensor, source: Tensor, target: Tensor) -> None:
    """`coefficients @ source`, [n', size] from [n, size], a piece of columns at a time."""
    count, size = source.shape
    wide = source.dtype == torch.float32
    values = min(_MERGED_VALUES // len(coefficients), size if wide else _SCRATCH_VALUES // count)
    step = max(values // _BAG_COLUMNS, 1) * _BAG_COLUMNS
    bagged = size % _BAG_COLUMNS == 0 and _is_sparse(coefficients)
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
    """`coefficients @ piece` in float32 into `merged`, which may be of another dtype."""
    if merged.dtype == torch.float32:
        torch.mm(coefficients, piece, out=merged)
    else:
        merged.copy_(torch.mm(coefficients, piece))


def _merge_dense(coefficients: Tensor, source: Tensor, target: Tensor) -> None:
    """One matrix product on a device without Triton, in pieces where it has to be widened to float32."""
    if source.dtype == torch.float32:
        torch.mm(coefficients, source, out=target)
        return
    step = _staged_columns(len(source))
    for start in range(0, source.shape[1], step):
        piece = slice(start, start + step)
        _product(coefficients, source[:, piece].float(), target[:, piece])


def staged_bytes(retained: int, experts: int, values: int, itemsize: int) -> int:
    """Most device memory that merging a tensor takes beside it and its buffer.

    That is from experts on the host, or without Triton; with it, merging on one device takes none.

    Args:
        retained: new experts n'.
        experts: original ones n.
        values: of one expert's tensor.
        itemsize: bytes of a value.
    """
    widened = 0 if itemsize == 4 else 4 * (experts + retained)
    return min(_staged_columns(experts), values) * (itemsize * experts + widened)


def _staged_columns(experts: int) -> int:
    return max(1, _STAGED_VALUES // experts)


def _merge_streamed(coefficients: Tensor, source: Tensor, target: Tensor) -> None:
    """Bring the experts in use to the target's device piece by piece and merge them there."""
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
