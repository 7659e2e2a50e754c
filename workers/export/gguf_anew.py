"""Tensors of a GGUF file that an edit changes.

A tensor has one type for all experts. If the gguf library can't pack it, as with K-quants, the whole tensor is written
as Q8_0 once one of its experts has to be packed; the tensors of a file may be of different types.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import numpy as np
import torch
from torch import Tensor

from moevolve.workers.checkpoints.formats.gguf import GgufNames
from moevolve.workers.checkpoints.formats.gguf_types import INSTEAD, GgufType
from moevolve.workers.checkpoints.pruning import KeptTensor
from moevolve.workers.export.anew import Rewriter


class GgufRewriter(Rewriter):
    """See `Rewriter`.

    Args:
        kept: Tensors of the export.
        names: Names of the file's tensors.
        file: Scratch file.
        stream: The same, opened for writing.
        requantise: Whether quantised tensors may be packed anew.
    """

    def __init__(
        self, kept: Sequence[KeptTensor], names: GgufNames, file: Path, stream: IO[bytes], requantise: bool
    ) -> None:
        super().__init__(kept, file, stream, requantise)
        self._names = names
        self._changed: dict[str, dict[int | None, tuple[GgufType, Tensor]]] = defaultdict(dict)

    def write(self, name: str, values: Tensor, required: bool) -> None:
        """See `Rewriter`."""
        for stored, expert, part in self._names.stored(name, values):
            kept = self.kept.get(stored)
            if kept is None:
                self.miss(name, required)
                continue
            codec, before = GgufType(kept.source.dtype), _read(kept, expert)
            target = codec if codec.packs else GgufType(INSTEAD)
            after = self.changed(stored, codec, {"": before}, part, target)
            if after:
                used = codec if after[""].shape == before.shape else target
                self._changed[stored][expert] = used, after[""]

    def finish_layer(self) -> None:
        """See `Rewriter`. Experts that an edit leaves as they are keep their bytes where the type stays."""
        for name, units in self._changed.items():
            kept = self.kept[name]
            own = kept.source.dtype
            target = next((codec for codec, _ in units.values() if codec.kind != own), GgufType(own))
            if target.kind != own:
                self.found.retyped[name] = own
            experts = [None] if None in units else range(kept.shape[0])
            data = (self._bytes(kept, expert, units.get(expert), target) for expert in experts)
            self.append(name, data, target.kind)
        self._changed.clear()

    @staticmethod
    def _bytes(kept: KeptTensor, expert: int | None, unit: tuple[GgufType, Tensor] | None, target: GgufType) -> bytes:
        codec, data = unit or (GgufType(kept.source.dtype), _read(kept, expert))
        if codec.kind != target.kind:
            data = target.pack(codec.unpack({"": data}, torch.float32), {})[""]
        return data.numpy().tobytes()


def _read(kept: KeptTensor, expert: int | None) -> Tensor:
    """Read a tensor's bytes, or those of a kept expert of a fused one, as uint8 [..., bytes of a row]."""
    shape = kept.shape
    if expert is None:
        chunks = kept.chunks()
    else:
        shape, chunks = shape[1:], kept.source.chunks((expert if kept.rows is None else kept.rows[expert],))
    data = np.frombuffer(bytearray(b"".join(chunks)), np.uint8)
    return torch.from_numpy(data).reshape(*shape[:-1], -1)
