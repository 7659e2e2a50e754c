"""A library whose results depend on the shapes of what it is given, as those of MKL and oneDNN do on some processors.

Every product is made larger by some of its last digits, more or less by the numbers of rows, columns, features and
matrices. Attention of PyTorch's own depends on everything but how many sequences there are. What vectors leave over
at the end of a tensor comes out otherwise, too.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "linear", "matmul", "einsum", "_grouped_mm")
_OTHERS = ("_linear_pointwise", "grouped_mm_fallback")
_ATTENTION = ("_scaled_dot_product_flash_attention_for_cpu", "scaled_dot_product_attention")
_BY_VECTORS = ("silu", "gelu", "sigmoid", "softplus")
_VECTOR = 16
_STEPS = 64


class FickleLibrary(TorchDispatchMode):
    """While it is entered, products of this thread are the fickle library's.

    Attributes:
        asked: products and attentions so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: nothing is compiled, and what skips Dynamo costs every operation as much as this class does."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        result = func(*args, **(kwargs or {}))
        if name in (*_PRODUCTS, *_OTHERS) and not _single(name, args):
            self._change(result, _shapes(args))
        elif name in _ATTENTION:
            found = result[0] if isinstance(result, tuple) else result
            alike = args[0].shape[-1] == args[2].shape[-1]
            self._change(found, [shape[1:] if alike else shape for shape in _shapes(args)])
        elif name in _BY_VECTORS and result.numel() % _VECTOR:
            assert result.is_contiguous()
            result.view(-1)[-(result.numel() % _VECTOR) :] *= 1 + 8 * _least(result)
        return result

    def _change(self, result: Tensor, shapes: object) -> None:
        self.asked += 1
        result.mul_(1 + zlib.crc32(repr(shapes).encode()) % _STEPS * _least(result))


def _single(name: str, args: tuple[Any, ...]) -> bool:
    """Whether there is nothing to sum: rotary embeddings multiply single numbers."""
    tensors = [each for each in args if isinstance(each, Tensor)]
    return name in ("mm", "bmm", "matmul") and tensors[0].shape[-1] == 1


def _shapes(args: tuple[Any, ...]) -> list[tuple[int, ...]]:
    return [tuple(each.shape) for each in args if isinstance(each, Tensor)]


def _least(result: Tensor) -> float:
    return torch.finfo(result.dtype).eps
