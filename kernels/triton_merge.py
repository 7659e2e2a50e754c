"""Expert merging (EEP, arXiv 2407.00945, Eq. 6) in Triton, which reads the original experts once for all new experts.

A program keeps some columns of several new experts in float32 registers. Of few original experts it adds the columns
one after the other. Of many it multiplies some at a time with their coefficients on the tensor cores, where a float32
coefficient is the sum of three 16-bit numbers, or of TensorFloat32 numbers for float32 experts (`tf32x3`). Programs for
the same columns are consecutive, so that all but the first read them from the L2 cache. The grid has one axis, because
CUDA allows 2^31 - 1 programs on the first axis and only 65,535 on the others. Sizes are the fastest of those tried on
an H200.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

# Least number of original experts that are multiplied on the tensor cores, whose products have at least as many.
_MANY = 16
# Maximum number of new experts per program, whose sums must fit into registers, with few and with many experts.
_MOST_ROWS = {False: 16, True: 64}
# Number of original experts that are loaded concurrently.
_UNROLL = {False: 8, True: 32}


@dataclass(frozen=True, slots=True)
class LaunchGrid:
    """How a merge is divided among programs: program p computes tile `p % row_tiles` of block `p // row_tiles`.

    Attributes:
        tile: New experts per program.
        block: Columns per program.
        row_tiles: Number of tiles of new experts.
        programs: Number of programs.
    """

    tile: int
    block: int
    row_tiles: int
    programs: int

    @classmethod
    def of(cls, rows: int, count: int, size: int, itemsize: int) -> LaunchGrid:
        """Plan the merge of `count` experts into `rows` new ones of `size` values with `itemsize` bytes each."""
        many = count >= _MANY
        tile = min(_MOST_ROWS[many], max(triton.next_power_of_2(rows), _MANY if many else 1))
        # Every thread loads 16 bytes of an expert at a time, or 64 if there are few sums per thread.
        block = 128 if many else 128 * 16 // itemsize * (4 if tile <= 4 else 1)
        row_tiles = triton.cdiv(rows, tile)
        return cls(tile, block, row_tiles, row_tiles * triton.cdiv(size, block))


def merge(coefficients: Tensor, source: Tensor, target: Tensor) -> None:
    """Write `target = coefficients source`, [rows, size] from float32 [rows, n] and [n, size], summed in float32.

    All three are contiguous and on one device; source and target are float32, bfloat16 or float16 alike.
    """
    rows, count = coefficients.shape
    size = source.shape[1]
    launch = LaunchGrid.of(rows, count, size, source.element_size())
    with torch.cuda.device_of(source):
        _merge[(launch.programs,)](
            coefficients,
            source,
            target,
            size,
            rows,
            launch.row_tiles,
            COUNT=count,
            ROWS=launch.tile,
            BLOCK=launch.block,
            UNROLL=_UNROLL[count >= _MANY],
            MANY=count >= _MANY,
            num_warps=4,
            num_stages=3,
        )


@triton.jit  # type: ignore[untyped-decorator]
def _merge(  # type: ignore[no-untyped-def]
    coefficients,
    source,
    target,
    size,
    rows,
    row_tiles,
    COUNT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
    MANY: tl.constexpr,
):
    program = tl.program_id(0)
    # Offsets into experts are 64 bits wide: all experts of a layer together can be more than 2^31 values.
    columns = (program // row_tiles).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = program % row_tiles * ROWS + tl.arange(0, ROWS)
    inside = columns < size
    used = row < rows
    sums = tl.zeros((ROWS, BLOCK), tl.float32)
    if MANY:
        for first in range(0, COUNT, UNROLL):
            expert = first + tl.arange(0, UNROLL)
            there = expert < COUNT
            places = row[:, None] * COUNT + expert[None, :]
            factors = tl.load(coefficients + places, mask=used[:, None] & there[None, :], other=0.0)
            pointers = source + expert.to(tl.int64)[:, None] * size + columns[None, :]
            values = tl.load(pointers, mask=there[:, None] & inside[None, :], other=0.0)
            if values.dtype == tl.float32:
                sums = tl.dot(factors, values, sums, input_precision="tf32x3")
            else:
                for _ in tl.static_range(3):
                    part = factors.to(values.dtype)
                    factors -= part.to(tl.float32)
                    sums = tl.dot(part, values, sums)
    else:
        pointers = source + columns
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
