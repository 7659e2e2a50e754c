"""Matrix products on a CPU in which a row's result doesn't depend on the other rows.

Libraries choose code by the shape of a product. A row of `x W^T` among 30 rows may be summed in another order than the
same row among 4,000, for example on Intel's processors with AVX-512, and its last digits differ. Scores of candidates
must not depend on which rows share a product. So on a CPU every product is divided into products of one shape: `TILE`
rows at a time, padded with zeros. The library always gets the same shape, so the order of each sum is fixed.

A row's position in its tile must not matter either. `TILE` is a multiple of the rows that micro-kernels compute at once
(2, 3, 4, 6, 8, 12, 16, 24, 32 or 48), so that no row is left over for other code, and tiles of float32 begin at
multiples of 64 bytes. For matrices with 8 outputs or fewer, such as small routers or one thread's share of a matrix,
MKL nevertheless treats some rows differently, mostly if the number of features isn't a multiple of 8; so both are
padded with zeros. MKL is nearly as fast with tiles as without. oneDNN takes longer to start a product, so its tiles
have more rows, and small matrices are left to MKL.

torch computes some functions, such as `silu`, with vector instructions, and the end of a tensor with other code that
rounds differently. `elementwise` avoids that end. Sums over a row, softmax and norms are computed row by row in torch,
except for a single long row, which several threads share; see `row_sums`.

On other devices torch's own operations are used. oneDNN (https://github.com/uxlfoundation/oneDNN) is used for float32
on processors with AVX-512 that aren't Intel's, where MKL doesn't use its fastest code: one core of an AMD EPYC with
AVX-512 reaches 97 GFLOP/s with MKL and 218 with oneDNN; with AVX2 both are equally fast
(tests/benchmarks/bench_kernels.py).

Processors of x86 without instructions for 16-bit products multiply such numbers as float32, which takes a quarter of
the time that torch takes otherwise. Matrices are widened piece by piece, and sums are rounded once.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from functools import cache
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

# Rows of every product on a CPU.
TILE = 96

# Rows of every product with oneDNN; with fewer rows it takes up to twice as long per row.
ONEDNN_TILE = 192

# Minimum number of values in a matrix for which oneDNN is used.
ONEDNN_LEAST = 1 << 16

# Rows of every product of a small 16-bit matrix where the processor multiplies such numbers: starting a product takes
# 20 us, and multiplying 96 rows by 192 x 128 values 3 us.
SMALL_TILE = 384

# Maximum number of values in a small matrix.
_SMALL = 1 << 17

# Minimum number of outputs; matrices with fewer are padded.
_LEAST_OUTPUTS = 16
# The number of features is padded to a multiple of this.
_FEATURES = 16
# Alignment of matrices in bytes, on which MKL's results may depend.
_ALIGNMENT = 64
# A multiple of the number of values that torch's vectorised loops process at once.
_VECTOR = 64
# Maximum number of values of a 16-bit matrix that are widened at once, roughly; they take 8 MiB.
_WIDENED = 1 << 21
# Number of values that are normalised at once in float32: on a CPU as many as its cache holds with a copy of them.
_CACHED, _ELSEWHERE = 1 << 20, 1 << 22
# Maximum number of values for which torch computes elementwise functions in one thread: `at::internal::GRAIN_SIZE`.
_SERIAL = 1 << 15


@cache
def onednn_available() -> bool:
    """Return whether torch was built with oneDNN."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


@cache
def onednn_preferred() -> bool:
    """Return whether oneDNN is faster than MKL here: on processors with AVX-512 that aren't Intel's."""
    try:
        processor = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return onednn_available() and "GenuineIntel" not in processor and "avx512f" in processor


@cache
def widens(dtype: torch.dtype) -> bool:
    """Return whether numbers of this dtype are multiplied as float32 on this machine's CPU."""
    supported = {
        torch.bfloat16: torch.cpu._is_avx512_bf16_supported,  # noqa: SLF001 - torch has no public name for it
        torch.float16: torch.cpu._is_amx_fp16_supported,  # noqa: SLF001
    }
    return dtype in supported and platform.machine() in ("x86_64", "AMD64") and not supported[dtype]()


def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None, *, use_onednn: bool = False) -> Tensor:
    """Compute `x W^T + b`, [..., outputs], for inputs [..., features] and a weight [outputs, features].

    On a CPU a row's result depends on that row alone, unless gradients are recorded. `use_onednn` is for float32 there.
    """
    if _uses_plain_torch(inputs):
        return functional.linear(inputs, weight, bias)
    outputs = weight.shape[0]
    if outputs < _LEAST_OUTPUTS:
        weight = functional.pad(weight, (0, 0, 0, _LEAST_OUTPUTS - outputs))
        bias = None if bias is None else functional.pad(bias, (0, _LEAST_OUTPUTS - outputs))
    rows = inputs.reshape(-1, inputs.shape[-1])
    tile = _tile(weight, use_onednn)
    out = rows.new_empty(_padded(len(rows), tile), len(weight))
    _multiply(rows, weight, bias, out, tile)
    return out[: len(rows), :outputs].reshape(*inputs.shape[:-1], outputs)


def batched(inputs: Tensor, weights: Tensor) -> Tensor:
    """Compute `x_b W_b^T`, [batch, rows, outputs], for every b, with the guarantee of `linear`."""
    if _uses_plain_torch(inputs):
        return torch.bmm(inputs, weights.transpose(1, 2))
    return torch.stack([linear(*pair) for pair in zip(inputs, weights, strict=True)])


def grouped(inputs: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Compute `torch.nn.functional.grouped_mm` on a CPU, with the guarantee of `linear`.

    Args:
        inputs: Inputs [rows, features], sorted by group.
        weights: Weights [groups, features, outputs].
        ends: End of each group's rows, int32 [groups].
    """
    parts = inputs.tensor_split(ends.tolist()[:-1])
    return torch.cat([linear(part, weight.t()) for part, weight in zip(parts, weights, strict=True)])


def experts(
    hidden: Tensor,
    chosen: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activation: Callable[[Tensor], Tensor],
    *,
    use_onednn: bool = False,
) -> Tensor:
    """Compute the chosen experts' `down (act(gate x) * (up x))`, summed with their weights in order of rank.

    Args:
        hidden: Hidden states [tokens, hidden] on a CPU, with at least 16 values.
        chosen: Experts of every token, int64 [tokens, k].
        weights: Routing weights [tokens, k].
        gate_up: Gate rows followed by up rows, [experts, 2 * width, hidden].
        down: Output projections [experts, hidden, width].
        activation: Elementwise function of the gates.
        use_onednn: See `linear`.

    Returns:
        [tokens, hidden] in the dtype of `hidden`, summed in float32.
    """
    tokens, active = chosen.shape
    if not tokens:
        return torch.zeros_like(hidden)
    order = torch.argsort(chosen.flatten(), stable=True)
    counts = torch.bincount(chosen.flatten(), minlength=len(gate_up)).tolist()
    # Padding rows are computed and never read.
    tile = _tile(gate_up[0], use_onednn)
    padded = [_padded(count, tile) for count in counts]
    outputs = hidden.new_empty(sum(padded), hidden.shape[1])
    position = torch.empty_like(order)
    parts = zip(order.split(counts), outputs.split(padded), accumulate(padded, initial=0), strict=False)
    for expert, (pairs, out, begin) in enumerate(parts):
        if len(pairs):
            position[pairs] = torch.arange(begin, begin + len(pairs))
            source = torch.zeros(len(out), dtype=torch.int64)
            source[: len(pairs)] = pairs // active
            inner = linear(hidden.index_select(0, source), gate_up[expert], use_onednn=use_onednn)
            gate, up = inner.chunk(2, dim=-1)
            _multiply(elementwise(activation, gate).mul_(up), down[expert], None, out, tile)
    return weighted_sum(outputs.index_select(0, position).view(tokens, active, hidden.shape[1]), weights)


def elementwise(function: Callable[[Tensor], Tensor], values: Tensor) -> Tensor:
    """Apply an elementwise function to [..., width]. On a CPU a value's result doesn't depend on its position."""
    width = values.shape[-1]
    serial = torch.get_num_threads() == 1 or values.numel() <= _SERIAL
    if values.device.type != "cpu" or (serial and width % _VECTOR == 0) or not values.numel():
        return function(values.contiguous())
    flat = functional.pad(values, (0, -width % _VECTOR)).flatten()
    results = torch.cat([function(part) for part in flat.split(_SERIAL)])
    return results.view(*values.shape[:-1], -1)[..., :width]


def logsumexp(values: Tensor) -> Tensor:
    """Compute `log(sum(exp(x)))` of every row of [rows, width] in float32; returns [rows]."""
    sums = []
    for part in values.split(max(1, (_CACHED if values.device.type == "cpu" else _ELSEWHERE) // values.shape[-1])):
        rows = part.float()
        largest = rows.amax(dim=-1, keepdim=True)
        sums.append(row_sums((rows - largest).exp_()).log_() + largest.squeeze(-1))
    return torch.cat(sums)


def row_sums(values: Tensor) -> Tensor:
    """Compute the sum of every row of [rows, width]; returns [rows]."""
    if len(values) == 1 and values.device.type == "cpu":
        # torch would divide a single row among threads.
        return torch.cat((values, values)).sum(dim=-1)[:1]
    return values.sum(dim=-1)


def _uses_plain_torch(inputs: Tensor) -> bool:
    return inputs.device.type != "cpu" or torch.is_grad_enabled()


def _tile(weight: Tensor, use_onednn: bool) -> int:
    if use_onednn and weight.numel() >= ONEDNN_LEAST:
        return ONEDNN_TILE
    multiplied = weight.dtype in (torch.bfloat16, torch.float16) and not widens(weight.dtype)
    return SMALL_TILE if multiplied and weight.numel() <= _SMALL else TILE


def _padded(rows: int, tile: int) -> int:
    """Return the number of rows, rounded up to whole tiles."""
    return -(-rows // tile) * tile


def _multiply(rows: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, tile: int) -> None:
    """Write the products of rows [n, features] to `out` [padded n, outputs], a tile at a time."""
    padding = -rows.shape[1] % _FEATURES
    if padding:
        rows, weight = functional.pad(rows, (0, padding)), functional.pad(weight, (0, padding))
    if widens(rows.dtype):
        _multiply_widened(rows, weight, bias, out)
        return
    matrix = weight.t()
    for part, result in zip(_tiles(rows, tile), out.split(tile), strict=False):
        if tile == ONEDNN_TILE:
            # torch has no public function that always uses oneDNN, and none that writes its result to a tensor.
            result.copy_(torch.ops.mkldnn._linear_pointwise(part, weight, bias, "none", [], ""))  # noqa: SLF001
        elif bias is None:
            torch.mm(part, matrix, out=result)
        else:
            torch.addmm(bias, part, matrix, out=result)


def _multiply_widened(rows: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Do as `_multiply` with MKL for 16-bit numbers, as float32."""
    tiles, results = _tiles(rows, TILE), out.split(TILE)
    pieces = max(1, min(weight.numel() // _WIDENED, len(weight) // _LEAST_OUTPUTS))
    begin = 0
    for piece in weight.tensor_split(pieces):
        end = begin + len(piece)
        matrix, offset = piece.float().t(), None if bias is None else bias[begin:end].float()
        for part, result in zip(tiles, results, strict=False):
            wide = part.float()
            result[:, begin:end] = torch.mm(wide, matrix) if offset is None else torch.addmm(offset, wide, matrix)
        begin = end


def _tiles(rows: Tensor, tile: int) -> tuple[Tensor, ...]:
    """Divide rows into tiles; the last one is padded with zeros."""
    if not rows.is_contiguous() or rows.data_ptr() % _ALIGNMENT:
        rows = rows.clone(memory_format=torch.contiguous_format)
    full = len(rows) // tile * tile
    whole = rows[:full].split(tile) if full else ()
    if full == len(rows):
        return whole
    last = rows.new_zeros(tile, rows.shape[1])
    last[: len(rows) - full] = rows[full:]
    return (*whole, last)


def weighted_sum(outputs: Tensor, weights: Tensor) -> Tensor:
    """Sum [tokens, k, hidden] over k with weights [tokens, k], in float32."""
    # Separate products and sums, because a fused operation may or may not round between them.
    total = (outputs[:, 0] * weights[:, :1]).float()
    for rank in range(1, weights.shape[1]):
        total += outputs[:, rank] * weights[:, rank : rank + 1]
    return total.to(outputs.dtype)
