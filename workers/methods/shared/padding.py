"""Token sequences in batches, padded at their ends: what stands behind a token changes nothing for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moevolve.workers.contract.edits import Tokens

_COLUMNS = 4096
"""Most columns of a batch that has more than one sequence."""


@dataclass(frozen=True, slots=True, eq=False)
class PaddedBatch:
    """Sequences of a pass.

    Attributes:
        ids: int64 [rows, columns].
        real: which columns, counted through all rows, hold a token, int64 [tokens].
        places: which of all sequences' tokens these are, int64 [tokens].
    """

    ids: Tensor
    real: Tensor
    places: Tensor


def padded_batches(sequences: Sequence[Tokens], device: torch.device) -> Iterator[PaddedBatch]:
    """Sequences of like lengths together; which ones follows from the sequences alone."""
    starts = torch.tensor([0, *map(len, sequences)]).cumsum(0).tolist()
    order = sorted(range(len(sequences)), key=lambda each: (len(sequences[each]), each))
    while order:
        rows = len(order)
        while rows > 1 and rows * len(sequences[order[rows - 1]]) > _COLUMNS:
            rows -= 1
        chosen, order = order[:rows], order[rows:]
        columns = len(sequences[chosen[-1]])
        ids = torch.zeros(rows, columns, dtype=torch.int64)
        for row, each in enumerate(chosen):
            ids[row, : len(sequences[each])] = torch.tensor(sequences[each])
        real = [row * columns + column for row, each in enumerate(chosen) for column in range(len(sequences[each]))]
        places = [starts[each] + column for each in chosen for column in range(len(sequences[each]))]
        yield PaddedBatch(ids.to(device), torch.tensor(real, device=device), torch.tensor(places, device=device))
