"""Counts the bytes of all tensors that operations make, as long as they live: what a device would have to hold."""

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
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for given in tree_leaves((args, kwargs)):
            if isinstance(given, torch.Tensor):
                self._meet(given, 0)
        out = func(*args, **(kwargs or {}))
        for made in tree_leaves(out):
            if isinstance(made, torch.Tensor):
                self._meet(made, made.untyped_storage().nbytes())
        self.peak = max(self.peak, self.live)
        return out

    def _meet(self, tensor: torch.Tensor, size: int) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._known or tensor.device.type == "meta":
            return
        self.live += size

        def gone(_: Any) -> None:
            del self._known[key]
            self.live -= size

        self._known[key] = weakref.ref(storage, gone)
