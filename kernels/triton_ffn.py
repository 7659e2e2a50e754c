"""Gated experts over tokens sorted by expert, in two Triton kernels: gate, up and activation; then down.

Tokens of an expert are divided into tiles; tiles of all experts lie one after the other, so that experts without tokens
have none and cost nothing. A tile finds its expert in a table made on the device, without waiting for it. Products are
summed in float32 and rounded to the tokens' dtype, as torch's are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_TOKENS = 64
_INNER = 32


def ffn(tokens: Tensor, ends: Tensor, gate_up: Tensor, down: Tensor, activation: str) -> Tensor:
    """See `moevolve.kernels.grouped_ffn.grouped_ffn`; `activation` is silu or gelu (exact)."""
    pairs, hidden = tokens.shape
    experts, width = down.shape[0], down.shape[2]
    inner = tokens.new_empty((pairs, width))
    out = tokens.new_empty((pairs, hidden))
    if pairs == 0:
        return out
    starts, first_tiles = _tiles(ends)
    tiles = triton.cdiv(pairs, _TOKENS) + experts
    tokens = tokens.contiguous()
    outputs = 128 if tokens.element_size() == 2 else 64  # as shared memory has room for
    common = {"TOKENS": _TOKENS, "OUTPUTS": outputs, "INNER": _INNER, "num_warps": 4}
    with torch.cuda.device_of(tokens):
        _gate_up[(tiles, triton.cdiv(width, outputs))](
            tokens,
            gate_up,
            inner,
            starts,
            ends,
            first_tiles,
            experts,
            hidden,
            width,
            GELU=activation == "gelu",
            **common,
        )
        _down[(tiles, triton.cdiv(hidden, outputs))](
            inner, down, out, starts, ends, first_tiles, experts, width, hidden, **common
        )
    return out


def _tiles(ends: Tensor) -> tuple[Tensor, Tensor]:
    """Where each expert's tokens start, int32 [E], and its first tile and the number of all, int32 [E + 1]."""
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])
    counts = (ends - starts + _TOKENS - 1) // _TOKENS
    return starts, torch.cat([ends.new_zeros(1), counts.cumsum(0, dtype=torch.int32)])


@triton.jit
def _expert_of(tile, first_tiles, experts):  # type: ignore[no-untyped-def]
    """The last expert whose first tile is not after this one, by bisection; past the last tile it is `experts`."""
    low, high = tl.full((), 0, tl.int32), experts + 1
    while low < high:
        middle = (low + high) // 2
        if tl.load(first_tiles + middle) <= tile:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def _gate_up(  # type: ignore[no-untyped-def]
    tokens,
    weight,
    inner,
    starts,
    ends,
    first_tiles,
    experts,
    hidden,
    width,
    GELU: tl.constexpr,
    TOKENS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INNER: tl.constexpr,
):
    tile = tl.program_id(0)
    expert = _expert_of(tile, first_tiles, experts)
    if expert < experts:
        first = tl.load(starts + expert) + (tile - tl.load(first_tiles + expert)) * TOKENS
        rows = (first + tl.arange(0, TOKENS)).to(tl.int64)
        mine = rows < tl.load(ends + expert)
        outputs = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
        depth = tl.arange(0, INNER)
        base = expert.to(tl.int64) * 2 * width
        gate_lines = weight + (base + outputs)[None, :] * hidden
        up_lines = weight + (base + width + outputs)[None, :] * hidden
        gates = tl.zeros((TOKENS, OUTPUTS), tl.float32)
        ups = tl.zeros((TOKENS, OUTPUTS), tl.float32)
        for start in range(0, hidden, INNER):
            at = start + depth
            x = tl.load(
                tokens + rows[:, None] * hidden + at[None, :], mask=mine[:, None] & (at < hidden)[None, :], other=0.0
            )
            good = (outputs < width)[None, :] & (at < hidden)[:, None]
            gate = tl.load(gate_lines + at[:, None], mask=good, other=0.0)
            gates = tl.dot(x, gate, gates, input_precision="ieee")
            up = tl.load(up_lines + at[:, None], mask=good, other=0.0)
            ups = tl.dot(x, up, ups, input_precision="ieee")
        if GELU:
            gates = 0.5 * gates * (1.0 + tl.erf(gates * 0.7071067811865476))
        else:
            gates = gates * tl.sigmoid(gates)
        out = inner + rows[:, None] * width + outputs[None, :]
        tl.store(out, (gates * ups).to(inner.dtype.element_ty), mask=mine[:, None] & (outputs < width)[None, :])


@triton.jit
def _down(  # type: ignore[no-untyped-def]
    inner,
    weight,
    out,
    starts,
    ends,
    first_tiles,
    experts,
    width,
    hidden,
    TOKENS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INNER: tl.constexpr,
):
    tile = tl.program_id(0)
    expert = _expert_of(tile, first_tiles, experts)
    if expert < experts:
        first = tl.load(starts + expert) + (tile - tl.load(first_tiles + expert)) * TOKENS
        rows = (first + tl.arange(0, TOKENS)).to(tl.int64)
        mine = rows < tl.load(ends + expert)
        outputs = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
        depth = tl.arange(0, INNER)
        lines = weight + (expert.to(tl.int64) * hidden + outputs)[None, :] * width
        sums = tl.zeros((TOKENS, OUTPUTS), tl.float32)
        for start in range(0, width, INNER):
            at = start + depth
            x = tl.load(
                inner + rows[:, None] * width + at[None, :], mask=mine[:, None] & (at < width)[None, :], other=0.0
            )
            good = (outputs < hidden)[None, :] & (at < width)[:, None]
            sums = tl.dot(x, tl.load(lines + at[:, None], mask=good, other=0.0), sums, input_precision="ieee")
        place = out + rows[:, None] * hidden + outputs[None, :]
        tl.store(place, sums.to(out.dtype.element_ty), mask=mine[:, None] & (outputs < hidden)[None, :])
