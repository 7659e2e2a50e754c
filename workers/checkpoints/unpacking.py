"""Dequantises FP8 and MXFP4 weights where `transformers` refuses to, does it wrongly, or needs too much memory."""

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
    """Context manager in which `transformers` dequantises weights exactly as their formats define.

    It changes three things:

    - DeepSeek-V3 in FP8 has a scale per block of 128 x 128, and weights whose sides aren't multiples of 128, such as
      576 rows in five rows of blocks. `transformers` assumes equal blocks: it refuses these weights, and would scale
      others wrongly (144 rows in two rows of blocks).
    - In FP8 checkpoints it leaves tensors that aren't quantised (norms, embeddings, routers) in the checkpoint's dtype,
      and up to 5.21 it dequantises MXFP4 to bfloat16, whatever dtype the model is loaded in.
    - It dequantises all MXFP4 experts of a layer at once, with 64-bit indices for every second value. For GPT-OSS-20B
      these take 2.1 GB; expert by expert they take a thirty-second of that.
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
def _replaced(module: ModuleType, name: str, replacement: Callable[..., Any]) -> Iterator[None]:
    # Quantizers import an operation when they need it, so replacing it in its module is enough.
    original = getattr(module, name)
    setattr(module, name, replacement)
    try:
        yield
    finally:
        setattr(module, name, original)


def _by_expert(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Dequantise fused experts, with blocks and scales [n, ...], one after the other."""

    def unpack(blocks: Tensor, scales: Tensor, *settings: Any) -> Tensor:
        first = original(blocks[:1], scales[:1], *settings)
        unpacked = first.new_empty((len(blocks), *first.shape[1:]))
        unpacked[:1] = first
        for expert in range(1, len(blocks)):
            part = slice(expert, expert + 1)
            unpacked[part] = original(blocks[part], scales[part], *settings)
        return nn.Parameter(unpacked, requires_grad=False)

    return unpack


def _casting(original: Any) -> type:
    """Make a conversion class of `transformers` cast its results to the dtype of their parameter."""

    class Casting(original):
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
    """Repeat scales so that they belong to blocks of equal size, without changing the scale of any weight.

    Args:
        scales: Scale of every block, [..., ceil(rows / block rows), ceil(columns / block columns)]; the last blocks
            may be smaller. Scales of another shape are returned unchanged.
        shape: Rows and columns of the weight.
        block: Rows and columns of a whole block.

    Returns:
        Scales [..., rows / r, columns / c], where r and c are the largest sizes that divide both a side and a block.
    """
    if tuple(scales.shape[-2:]) != tuple(math.ceil(side / size) for side, size in zip(shape, block, strict=True)):
        return scales
    for dim, side, size in zip((-2, -1), shape, block, strict=True):
        if side % size:
            starts = torch.arange(0, side, math.gcd(side, size), device=scales.device)
            scales = scales.index_select(dim, starts // size)
    return scales
