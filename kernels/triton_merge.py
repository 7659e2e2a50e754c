"""Expert merging (EEP, arXiv 2407.00945, Eq. 6) in Triton: the originals cross memory once for all candidates.

A program keeps some columns of several new experts in float32 registers and adds the originals' columns one after the
other. Every new expert is the same sum in the same order whatever is merged beside it, so a candidate gets the bits it
gets alone. Programs of the same columns come one after another, so that what the first one read is in the L2 cache for
the others.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_MOST_ROWS = 16
"""New experts per program: their sums have to fit into registers."""

_UNROLL = 4
"""Originals whose loads are in flight together."""


def merge(coefficients: Tensor, source: Tensor, target: Tensor) -> None:
    """Write `target = coefficients source`, summed in float32.

    Args:
        coefficients: float32 [rows, n], contiguous: the `W_EM` of one candidate or of several below each other.
        source: [n, size], contiguous, float32, bfloat16 or float16.
        target: [rows, size], contiguous, dtype of `source`. All three on one device.
    """
    rows, count = coefficients.shape
    size = source.shape[1]
    tile = min(_MOST_ROWS, triton.next_power_of_2(rows))
    # Every thread loads 16 bytes of an expert at a time, twice that where few sums leave room for it.
    block = 128 * 16 // source.element_size() * (2 if tile <= 4 else 1)
    with torch.cuda.device_of(source):
        _merge[(triton.cdiv(rows, tile), triton.cdiv(size, block))](
            coefficients, source, target, size, rows, COUNT=count, ROWS=tile, BLOCK=block, UNROLL=_UNROLL, num_warps=4
        )


@triton.jit
def _merge(  # type: ignore[no-untyped-def]
    coefficients,
    source,
    target,
    size,
    rows,
    COUNT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
):
    columns = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = columns < size
    used = row < rows
    pointers = source + columns
    sums = tl.zeros((ROWS, BLOCK), tl.float32)
    rest: tl.constexpr = COUNT % UNROLL
    for first in range(0, COUNT - rest, UNROLL):
        for step in tl.static_range(UNROLL):
            values = tl.load(pointers, mask=inside, other=0.0).to(tl.float32)
            factors = tl.load(coefficients + row * COUNT + first + step, mask=used, other=0.0)
            sums = tl.fma(factors[:, None], values[None, :], sums)
            pointers += size
    for step in tl.static_range(rest):
        values = tl.load(pointers, mask=inside, other=0.0).to(tl.float32)
        factors = tl.load(coefficients + row * COUNT + COUNT - rest + step, mask=used, other=0.0)
        sums = tl.fma(factors[:, None], values[None, :], sums)
        pointers += size
    out = target + row.to(tl.int64)[:, None] * size + columns[None, :]
    tl.store(out, sums.to(target.dtype.element_ty), mask=used[:, None] & inside[None, :])
