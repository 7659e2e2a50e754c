"""What CPUs do in another way than GPUs: histograms of integers, and matrix products of 16-bit tensors.

Where there are no instructions for these, they go by way of float32, several times as fast. Sums are in float32 and
rounded once, as on a GPU. Weights are widened, or laid out anew, piece by piece, so that next to nothing of it shows in
what is metered.
"""

from __future__ import annotations

import mmap
from functools import cache
from typing import Any

import torch
from torch import Tensor

_ROOM = 1 << 20
"""Values of a piece that is widened, which stays in a core's cache."""
_LAID_OUT = 1 << 25
"""Values of a piece that is multiplied as it is: the library lays it out anew for that."""
_HALF = (torch.bfloat16, torch.float16)


def exchanged(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operator, as a GPU would as far as anyone sees."""
    name = func._schema.name
    if name == "aten::histc" and not args[0].is_floating_point():
        return func(args[0].float(), *args[1:], **kwargs).to(args[0].dtype)
    if name == "aten::linear" and args[1].dtype in _HALF and args[1].dim() == 2:
        return _linear(args[0], args[1].t(), args[2] if len(args) > 2 else kwargs.get("bias"))
    if name == "aten::mm" and args[0].dtype in _HALF:
        return _linear(args[0], args[1], None)
    if name == "aten::addmm" and args[1].dtype in _HALF and not kwargs:
        return _linear(args[1], args[2], args[0])
    if name == "aten::_grouped_mm" and args[0].dtype in _HALF and args[0].dim() == 2 and args[1].dim() == 3:
        return _grouped(args[0], args[1], args[2] if len(args) > 2 else kwargs["offs"])
    return func(*args, **kwargs)


def _linear(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """[..., in] times [in, out]."""
    if bias is None and inputs.dtype == torch.bfloat16 and torch.cpu._is_avx512_bf16_supported():
        return _as_it_is(inputs, weight)
    flat = inputs.reshape(-1, inputs.shape[-1]).float()
    out = torch.empty(len(flat), weight.shape[1], dtype=torch.float32)
    step = max(1, _ROOM // weight.shape[0])
    for start in range(0, weight.shape[1], step):
        piece = weight[:, start : start + step]
        # Laid out as it lies, so that widening reads it in order.
        room = _room()[: piece.numel()]
        wide = room.view(piece.shape[1], -1).t() if piece.stride(0) == 1 else room.view(piece.shape)
        torch.mm(flat, wide.copy_(piece), out=out[:, start : start + step])
    if bias is not None:
        out += bias.float()
    return out.to(inputs.dtype).view(*inputs.shape[:-1], -1)


def _as_it_is(inputs: Tensor, weight: Tensor) -> Tensor:
    """[..., in] times [in, out] on a CPU that multiplies 16-bit values."""
    flat = inputs.reshape(-1, inputs.shape[-1])
    step = max(1, _LAID_OUT // weight.shape[0])
    pieces = [torch.mm(flat, piece) for piece in weight.split(step, dim=1)]
    return (pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)).view(*inputs.shape[:-1], -1)


def _grouped(inputs: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Rows up to each end times that group's [in, out]; rows behind the last end stay anything."""
    out = inputs.new_zeros(len(inputs), weights.shape[2])
    start = 0
    for group, end in enumerate(ends.tolist()):
        if end > start:
            out[start:end] = _linear(inputs[start:end], weights[group], None)
        start = end
    return out


@cache
def _room() -> Tensor:
    return torch.frombuffer(mmap.mmap(-1, 4 * _ROOM), dtype=torch.float32)
