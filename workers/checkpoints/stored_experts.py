"""Original experts that stay in a checkpoint's files, and are read in the fused layout of `transformers` on demand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moevolve.workers.checkpoints.headers import EXPERT
from moevolve.workers.checkpoints.state import SavedNames, experts_prefix, layers_prefix
from moevolve.workers.checkpoints.text_models import ReadableTensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class _Piece:
    """A stored tensor of one expert, as rows of the expert in a fused tensor.

    Attributes:
        block, rest: Parts of its name before and after the number of the expert.
        start, count: Its first row, and its number of rows.
    """

    block: str
    rest: str
    start: int
    count: int

    def of(self, expert: int) -> str:
        """Return the name of the tensor of an expert, or of the fused one."""
        return f"{self.block}.{expert}{self.rest}" if self.rest else self.block


class StoredExperts:
    """The routed experts of all layers of a checkpoint.

    Args:
        model: Model on the meta device, whose fused experts have the checkpoint's shapes.
        tensors: Tensors of the checkpoint by name.
    """

    def __init__(self, model: PreTrainedModel, tensors: Mapping[str, ReadableTensor]) -> None:
        self._tensors = tensors
        self._names = SavedNames(model)
        self._layers, self._experts = layers_prefix(model), experts_prefix(model)
        # `transformers` also loads checkpoints of the decoder alone, as DeepSeek-V4's names are.
        stem = self._layers.removesuffix("layers.")
        self._left_out = "" if any(name.startswith(stem) for name in tensors) else stem
        # One layer's experts at a time: several of a large model don't fit into the host's memory.
        self._whole: tuple[int, dict[str, Tensor]] | None = None
        self._pieces: dict[tuple[int, str], list[_Piece]] = {}

    def layer(self, index: int, parameters: Mapping[str, Tensor]) -> StoredLayer:
        """Return the experts of a decoder layer, whose fused tensors on the meta device are given by name."""
        return StoredLayer(self, index, dict(parameters))

    def read(self, index: int, kept: Sequence[int], tensors: Mapping[str, Tensor]) -> None:
        """Read the experts `kept` of a decoder layer into fused tensors by name, [len(kept), ...], on any device."""
        for name, tensor in tensors.items():
            for piece in self._found(index, name, tensor):
                # Expert by expert, so that no more than one is unpacked beside those that are kept.
                for slot, expert in enumerate(kept):
                    stored = self._tensors[piece.of(expert)]
                    part = stored[...] if piece.rest else stored[expert : expert + 1][0]
                    tensor[slot, piece.start : piece.start + piece.count].copy_(part)

    def whole(self, index: int, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return all experts of a layer. They stay in host memory until another layer's are needed."""
        if self._whole is None or self._whole[0] != index:
            self._whole = None
            tensors = {name: torch.empty_like(each, device="cpu") for name, each in parameters.items()}
            self.read(index, range(len(next(iter(tensors.values())))), tensors)
            self._whole = index, tensors
        return self._whole[1]

    def forget(self) -> None:
        self._whole = None

    def _found(self, index: int, name: str, tensor: Tensor) -> list[_Piece]:
        """Stored tensors that make up one expert of a fused tensor; pieces without `rest` have all experts."""
        if (index, name) not in self._pieces:
            full, rows = f"{self._layers}{index}.{self._experts}{name}", tensor.shape[1]
            # Numbered rows show where `transformers` takes the stored tensors from.
            numbered = torch.arange(rows).view(1, rows, *[1] * (tensor.ndim - 2))
            pieces = []
            # Some checkpoints have the names and shapes that the model has in memory.
            own = full.removeprefix(self._left_out)
            found = {} if own in self._tensors else self._names.saved(full, numbered)
            if not found:
                pieces.append(_Piece(own, "", 0, rows))
            for saved, numbers in found.items():
                stored = saved.removeprefix(self._left_out)
                match, place = EXPERT.fullmatch(stored), (int(numbers.flatten()[0]), numbers.numel())
                if match is None:
                    pieces.append(_Piece(stored, "", *place))
                elif (fused := f"{match['block']}.{name}") in self._tensors:
                    pieces = [_Piece(fused, "", 0, rows)]
                    break
                else:
                    pieces.append(_Piece(match["block"], match["rest"], *place))
            self._pieces[index, name] = pieces
        return self._pieces[index, name]


class StoredLayer(Mapping[str, Tensor]):
    """The fused tensors of a layer's original experts by name, read from files when one is used."""

    def __init__(self, experts: StoredExperts, index: int, parameters: Mapping[str, Tensor]) -> None:
        self._experts, self._index, self._parameters = experts, index, parameters

    def __getitem__(self, name: str) -> Tensor:
        return self._experts.whole(self._index, self._parameters)[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)

    def read(self, kept: Sequence[int], tensors: Mapping[str, Tensor]) -> None:
        """Read the experts `kept` into fused tensors by name, [len(kept), ...], on any device."""
        self._experts.read(self._index, kept, tensors)
