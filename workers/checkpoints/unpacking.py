"""Turning blocks of quantised weights into plain numbers where `transformers` can't, or does it wrongly."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def exact_unpacking() -> Iterator[None]:
    """For the length of a `with` block, let `transformers` unpack quantised weights as their formats say.

    - DeepSeek-V3 in FP8 has a scale per block of 128 x 128, and weights whose sides aren't multiples of that: 576 rows
      in five rows of blocks, the last of 64. `transformers` takes all blocks to be equally large, so it refuses these
      weights, and would scale others wrongly (144 rows in two rows of blocks).
    - It leaves what isn't quantised beside FP8 (norms, embeddings, routers) in the checkpoint's dtype and, up to 5.21,
      unpacks MXFP4 to bfloat16, whatever dtype the model is loaded in.
    - It unpacks a layer's MXFP4 experts at once, by 64-bit indices of every second number: in GPT-OSS-20B these alone
      take 2.1 GB, and a thirty-second part of it expert by expert.
    """
    from transformers.integrations import finegrained_fp8, mxfp4

    fp8: Any = _casting(finegrained_fp8.Fp8Dequantize)

    class Dequantize(fp8):
        def _dequantize_one(self, quantized: Tensor, scales: Tensor, *others: Any, **settings: Any) -> Tensor:
            block = self.hf_quantizer.quantization_config.weight_block_size
            if block is not None:
                scales = equal_blocks(scales, (quantized.shape[-2], quantized.shape[-1]), (block[0], block[1]))
            unpacked: Tensor = super()._dequantize_one(quantized, scales, *others, **settings)
            return unpacked

    with (
        _replaced(finegrained_fp8, "Fp8Dequantize", Dequantize),
        _replaced(mxfp4, "Mxfp4Dequantize", _casting(mxfp4.Mxfp4Dequantize)),
        _replaced(mxfp4, "dequantize_convertops", _by_expert(mxfp4.dequantize_convertops)),
    ):
        yield


@contextmanager
def _replaced(module: ModuleType, name: str, other: Callable[..., Any]) -> Iterator[None]:
    """For the length of a `with` block, have quantizers, which import an operation when they need it, take another."""
    theirs = getattr(module, name)
    setattr(module, name, other)
    try:
        yield
    finally:
        setattr(module, name, theirs)


def _by_expert(theirs: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Unpacking of fused experts, [n, ...] blocks and scales, one after the other."""

    def unpack(blocks: Tensor, scales: Tensor, *settings: Any) -> Tensor:
        first = theirs(blocks[:1], scales[:1], *settings)
        unpacked = first.new_empty((len(blocks), *first.shape[1:]))
        unpacked[:1] = first
        for expert in range(1, len(blocks)):
            part = slice(expert, expert + 1)
            unpacked[part] = theirs(blocks[part], scales[part], *settings)
        return nn.Parameter(unpacked, requires_grad=False)

    return unpack


def _casting(theirs: Any) -> type:
    """A conversion of `transformers` whose results have the dtype of the parameter that they are for."""

    class Casting(theirs):
        def convert(
            self,
            input_dict: dict[str, Any],
            full_layer_name: str | None = None,
            model: torch.nn.Module | None = None,
            **settings: Any,
        ) -> dict[str, Any]:
            found: dict[str, Any] = super().convert(
                input_dict, full_layer_name=full_layer_name, model=model, **settings
            )
            if model is None or full_layer_name is None:
                return found
            owner, _, name = full_layer_name.rpartition(".")
            dtype = getattr(model.get_submodule(owner), name).dtype
            return {key: _cast(value, dtype) for key, value in found.items()}

    return Casting


def _cast(found: Tensor | list[Tensor], dtype: torch.dtype) -> Tensor | list[Tensor]:
    return [each.to(dtype) for each in found] if isinstance(found, list) else found.to(dtype)


def equal_blocks(scales: Tensor, shape: tuple[int, int], block: tuple[int, int]) -> Tensor:
    """Scales of blocks that are all equally large, and say the same of every weight.

    Args:
        scales: [..., ceil(rows / block rows), ceil(columns / block columns)], one per block; the last blocks may be
            smaller. Scales of another form (one per weight, say) are left as they are.
        shape: rows and columns of the weight.
        block: rows and columns of a whole block.

    Returns:
        [..., rows / r, columns / c], where r and c are the largest sizes that divide both a side and a block.
    """
    if tuple(scales.shape[-2:]) != tuple(math.ceil(side / size) for side, size in zip(shape, block, strict=True)):
        return scales
    for dim, side, size in zip((-2, -1), shape, block, strict=True):
        if side % size:
            starts = torch.arange(0, side, math.gcd(side, size), device=scales.device)
            scales = scales.index_select(dim, starts // size)
    return scales
