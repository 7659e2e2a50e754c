"""Matrix products whose rows don't depend on how many there are, for what a CPU computes of a model.

Libraries choose code by the shape of a product. A row of `x W^T` that is one of 30 may be summed in another order
than the same row among 4,000, on Intel's processors with AVX-512 for one, and its last digits differ. What ranks
candidates must not hang on which rows share a product. So on a CPU every product is made of products of one shape:
`TILE` rows at a time, the last ones filled up with zeros. The same library gets the same shape every time, so a row's
sum has one order.

Nor may a row's place in its tile matter. `TILE` is a multiple of the rows that micro-kernels compute at once (2, 3,
4, 6, 8, 12, 16, 24, 32 or 48), so that no row is left over for code of another kind, and whole tiles of float32 begin
at multiples of 64 bytes. For matrices of 8 outputs or fewer, such as those of small routers or of one thread's share,
MKL has code that treats some rows otherwise all the same, mostly where features aren't a multiple of 8: both are
filled up with zeros. MKL is nearly as fast in tiles as without. oneDNN takes longer to begin a product: it gets more
rows, and small matrices are left to MKL.

torch computes some functions, `silu` for one, by vectors, and what is left over at the end of a tensor by other code
that rounds otherwise. `elementwise` leaves nothing over. Sums along a row, softmax and norms are each row's own in
torch, but for a long row that is the only one, which several threads share; see `row_sums`.

On other devices everything is torch's own. oneDNN (https://github.com/uxlfoundation/oneDNN) multiplies float32 on
processors with AVX-512 that Intel didn't make, where MKL keeps its fastest code back: on an AMD EPYC with AVX-512,
one core reaches 97 GFLOP/s through MKL and 218 through oneDNN; with AVX2 both are alike
(tests/benchmarks/bench_kernels.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

TILE = 96
"""Rows of every product on a CPU."""

ONEDNN_TILE = 192
"""Rows of those through oneDNN, for which a product of fewer takes up to twice as long per row."""

ONEDNN_LEAST = 1 << 16
"""Numbers in a matrix from which on oneDNN is worth what it takes to begin a product."""

_LEAST_OUTPUTS = 16
_FEATURES = 16
"""Numbers of features are filled up to multiples of this."""

_ALIGNMENT = 64
"""Bytes; MKL's results may depend on where a matrix begins."""

_VECTOR = 64
"""A multiple of the values that torch's vectorised loops take at once."""

_SERIAL = 1 << 15
"""Values up to which torch leaves elementwise work to one thread (`at::internal::GRAIN_SIZE`)."""


@cache
def onednn_available() -> bool:
    """Whether torch was built with it."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


@cache
def onednn_preferred() -> bool:
    """Whether it is the faster one here: MKL is left to Intel's processors, and to those without AVX-512."""
    try:
        processor = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return onednn_available() and "GenuineIntel" not in processor and "avx512f" in processor


def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None, *, by_onednn: bool = False) -> Tensor:
    """`x W^T + b`. On a CPU, unless gradients are recorded, a row's result depends on that row alone.

    Args:
        inputs: [..., features].
        weight: [outputs, features].
        bias: [outputs].
        by_onednn: whether oneDNN multiplies; for float32 on a CPU.

    Returns:
        [..., outputs].
    """
    if _is_torchs(inputs):
        return functional.linear(inputs, weight, bias)
    outputs = weight.shape[0]
    if outputs < _LEAST_OUTPUTS:
        weight = functional.pad(weight, (0, 0, 0, _LEAST_OUTPUTS - outputs))
        bias = None if bias is None else functional.pad(bias, (0, _LEAST_OUTPUTS - outputs))
    rows = inputs.reshape(-1, inputs.shape[-1])
    made = rows.new_empty(_whole(len(rows), weight, by_onednn), len(weight))
    _multiply(rows, weight, bias, made, by_onednn)
    return made[: len(rows), :outputs].reshape(*inputs.shape[:-1], outputs)


def batched(inputs: Tensor, weights: Tensor) -> Tensor:
    """`x_b W_b^T` for every b: [batch, rows, outputs] of [batch, rows, features] and [batch, outputs, features]."""
    if _is_torchs(inputs):
        return torch.bmm(inputs, weights.transpose(1, 2))
    return torch.stack([linear(*pair) for pair in zip(inputs, weights, strict=True)])


def grouped(inputs: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """`torch.nn.functional.grouped_mm` on a CPU: rows up to `ends[0]` by the first matrix, and so on.

    Args:
        inputs: [rows, features].
        weights: [groups, features, outputs].
        ends: int32 [groups].

    Returns:
        [rows, outputs].
    """
    begins = [0, *ends.tolist()]
    parts = [
        linear(inputs[begin:end], weight.t()) for begin, end, weight in zip(begins, begins[1:], weights, strict=False)
    ]
    return torch.cat(parts)


def experts(
    hidden: Tensor,
    chosen: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activation: Callable[[Tensor], Tensor],
    *,
    by_onednn: bool = False,
) -> Tensor:
    """A mixture's experts: the chosen ones' `down (act(gate x) * (up x))`, summed with their weights in order of rank.

    Args:
        hidden: [tokens, hidden] on a CPU, 16 wide or more.
        chosen: int64 [tokens, k].
        weights: [tokens, k].
        gate_up: the gates' rows, then the ups', [experts, 2 * width, hidden].
        down: [experts, hidden, width].
        activation: of the gates, elementwise.
        by_onednn: see `linear`.

    Returns:
        [tokens, hidden] in the dtype of `hidden`, summed in float32.
    """
    tokens, active = chosen.shape
    if not tokens:
        return torch.zeros_like(hidden)
    order = torch.argsort(chosen.flatten(), stable=True)
    counts = torch.bincount(chosen.flatten(), minlength=len(gate_up)).tolist()
    # What fills an expert's rows up to whole tiles is computed and never read.
    filled = [_whole(count, gate_up[0], by_onednn) for count in counts]
    outputs = hidden.new_empty(sum(filled), hidden.shape[1])
    place = torch.empty_like(order)
    parts = zip(order.split(counts), outputs.split(filled), accumulate(filled, initial=0), strict=False)
    for expert, (pairs, into, begin) in enumerate(parts):
        if len(pairs):
            place[pairs] = torch.arange(begin, begin + len(pairs))
            source = torch.zeros(len(into), dtype=torch.int64)
            source[: len(pairs)] = pairs // active
            inner = linear(hidden.index_select(0, source), gate_up[expert], by_onednn=by_onednn)
            gate, up = inner.chunk(2, dim=-1)
            _multiply(elementwise(activation, gate).mul_(up), down[expert], None, into, by_onednn)
    return _weighted(outputs.index_select(0, place).view(tokens, active, hidden.shape[1]), weights)


def elementwise(function: Callable[[Tensor], Tensor], values: Tensor) -> Tensor:
    """A function of single values, [..., width]; on a CPU a value's result doesn't depend on where it stands."""
    width = values.shape[-1]
    alone = torch.get_num_threads() == 1 or values.numel() <= _SERIAL
    if values.device.type != "cpu" or (alone and width % _VECTOR == 0) or not values.numel():
        return function(values.contiguous())
    flat = functional.pad(values, (0, -width % _VECTOR)).flatten()
    made = torch.cat([function(part) for part in flat.split(_SERIAL)])
    return made.view(*values.shape[:-1], -1)[..., :width]


def logsumexp(values: Tensor) -> Tensor:
    """`log(sum(exp(x)))` of every row of [rows, width], [rows]."""
    largest = values.amax(dim=-1, keepdim=True)
    return row_sums((values - largest).exp_()).log_() + largest.squeeze(-1)


def row_sums(values: Tensor) -> Tensor:
    """Sums of every row of [rows, width], [rows]. One row alone, which torch divides among threads, gets company."""
    if len(values) == 1 and values.device.type == "cpu":
        return torch.cat((values, values)).sum(dim=-1)[:1]
    return values.sum(dim=-1)


def _is_torchs(inputs: Tensor) -> bool:
    return inputs.device.type != "cpu" or torch.is_grad_enabled()


def _tile(weight: Tensor, by_onednn: bool) -> int:
    return ONEDNN_TILE if by_onednn and weight.numel() >= ONEDNN_LEAST else TILE


def _whole(rows: int, weight: Tensor, by_onednn: bool) -> int:
    """Rows of as many tiles as there must be."""
    tile = _tile(weight, by_onednn)
    return -(-rows // tile) * tile


def _multiply(rows: Tensor, weight: Tensor, bias: Tensor | None, into: Tensor, by_onednn: bool) -> None:
    """Write products of rows, [n, features], to as many whole tiles as these take, [n or more, outputs]."""
    beside = -rows.shape[1] % _FEATURES
    if beside:
        rows, weight = functional.pad(rows, (0, beside)), functional.pad(weight, (0, beside))
    tile, matrix = _tile(weight, by_onednn), weight.t()
    for part, made in zip(_divided(rows, tile), into.split(tile), strict=False):
        if tile == ONEDNN_TILE:
            # torch has no public name for a product that always goes through oneDNN, and none that writes to a tensor.
            made.copy_(torch.ops.mkldnn._linear_pointwise(part, weight, bias, "none", [], ""))  # noqa: SLF001
        elif bias is None:
            torch.mm(part, matrix, out=made)
        else:
            torch.addmm(bias, part, matrix, out=made)


def _divided(rows: Tensor, tile: int) -> tuple[Tensor, ...]:
    """Tiles of rows, the last one filled up with zeros."""
    if not rows.is_contiguous() or rows.data_ptr() % _ALIGNMENT:
        rows = rows.clone(memory_format=torch.contiguous_format)
    full = len(rows) // tile * tile
    whole = rows[:full].split(tile) if full else ()
    if full == len(rows):
        return whole
    last = rows.new_zeros(tile, rows.shape[1])
    last[: len(rows) - full] = rows[full:]
    return (*whole, last)


def _weighted(outputs: Tensor, weights: Tensor) -> Tensor:
    """Sums over the middle axis of [tokens, k, hidden] with weights [tokens, k], in float32."""
    # A product and a sum, each rounded: one operation for both may or may not round between them.
    total = (outputs[:, 0] * weights[:, :1]).float()
    for rank in range(1, weights.shape[1]):
        total += outputs[:, rank] * weights[:, rank : rank + 1]
    return total.to(outputs.dtype)
