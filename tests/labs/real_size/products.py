"""What CPUs do in another way than GPUs: histograms of integers, and matrix products of 16-bit tensors.

These go by way of float32, several times as fast where there are no instructions for 16 bits.

Sums are in float32 and rounded once, as on a GPU. A weight is widened piece by piece into room that is mapped once, so
that nothing of it shows in what is metered.
"""

from __future__ import annotations

import mmap
from functools import cache
from typing import Any

import torch
from torch import Tensor

_ROOM = 1 << 26
"""Values of a piece."""
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
