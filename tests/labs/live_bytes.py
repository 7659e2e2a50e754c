"""Counts the bytes of all tensors that operations make, as long as they live: what a device would have to hold.

For models on the CPU, and for fake tensors, which hold nothing.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """For the length of a `with` block.

    What a kernel takes for itself and gives back before it returns isn't seen.

    Attributes:
        live: bytes of what was made since and still lives.
        peak: most that lived at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {each.untyped_storage()._cdata for each in _tensors((args, kwargs))}
        for made in _tensors(out):
            storage = made.untyped_storage()
            if storage._cdata not in given | self._known and made.device.type != "meta":
                self._known.add(storage._cdata)
                self.live += storage.nbytes()
                weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.live)
        return out

    def _gone(self, key: int, size: int) -> None:
        self._known.remove(key)
        self.live -= size


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
