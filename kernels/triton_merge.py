"""Expert merging (EEP, arXiv 2407.00945, Eq. 6) in Triton, which reads the original experts once for all new experts.

A program keeps some columns of several new experts in float32 registers and adds the columns of the original experts
one after the other. Programs for the same columns are consecutive, so that all but the first read them from the L2
cache. The grid has one axis, because CUDA allows 2^31 - 1 programs on the first axis and only 65,535 on the others.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

# Maximum number of new experts per program, whose sums must fit into registers.
_MOST_ROWS = 16
# Number of original experts that are loaded concurrently.
_UNROLL = 4


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
    def of(cls, rows: int, size: int, itemsize: int) -> LaunchGrid:
        """Plan the merge into `rows` new experts of `size` values with `itemsize` bytes each."""
        tile = min(_MOST_ROWS, triton.next_power_of_2(rows))
        # Every thread loads 16 bytes of an expert at a time, or 32 if there are few sums per thread.
        block = 128 * 16 // itemsize * (2 if tile <= 4 else 1)
        row_tiles = triton.cdiv(rows, tile)
        return cls(tile, block, row_tiles, row_tiles * triton.cdiv(size, block))


def merge(coefficients: Tensor, source: Tensor, target: Tensor) -> None:
    """Write `target = coefficients source`, [rows, size] from float32 [rows, n] and [n, size], summed in float32.

    All three are contiguous and on one device; source and target are float32, bfloat16 or float16 alike.
    """
    rows, count = coefficients.shape
    size = source.shape[1]
    launch = LaunchGrid.of(rows, size, source.element_size())
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
            UNROLL=_UNROLL,
            num_warps=4,
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
):
    program = tl.program_id(0)
    # Offsets into experts are 64 bits wide: all experts of a layer together can be more than 2^31 values.
    columns = (program // row_tiles).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = program % row_tiles * ROWS + tl.arange(0, ROWS)
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
