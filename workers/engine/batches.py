"""Plans which examples run together in one forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from moevolve.workers.contract.edits import Tokens
from moevolve.workers.engine.columns import BLOCK, Columns, Layout, Scaled, common_start, lay_out
from moevolve.workers.families.rotary import Scale, unscaled

# The sequences of every example, which must run in the same pass.
Groups = tuple[tuple[Tokens, ...], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Examples, by their indices, that run in one pass.

    Attributes:
        columns: Layout of all their sequences.
        rows: Number of each sequence in `columns`.
    """

    examples: list[int]
    columns: Columns
    rows: dict[Tokens, int]

    def path(self, tokens: Tokens) -> NDArray[np.int64]:
        """Return the place of each token of a sequence, int64 [tokens]; see `Columns.places`."""
        path: NDArray[np.int64] = self.columns.places[self.rows[tokens], : len(tokens)]
        return path


class Batcher:
    """Plans batches, whose plans are cached because the examples of a split come again for every candidate.

    Args:
        layout: Layout of the sequences of a pass.
        batch_tokens: Upper bound on the columns of a pass, over all rows; every batch has at least one example.
        device: Device of the passes.
        scale: Scale of the model's rotary embeddings.
    """

    def __init__(self, layout: Layout, batch_tokens: int, device: torch.device, scale: Scale = unscaled) -> None:
        self.layout: Layout = layout
        self._batch_tokens = batch_tokens
        self._device = device
        self.scale = scale
        self._cached = lru_cache(maxsize=1024)(self.planned)

    def batches(self, groups: Groups, later: int = BLOCK) -> list[Batch]:
        """Plan the batches of examples; for `later` see `lay_out`.

        They depend only on the arguments and the batcher's, so an example's batch never changes.
        """
        return self._cached(groups, later)

    def planned(self, groups: Groups, later: int = BLOCK, ahead: int = 1) -> list[Batch]:
        """Do as `batches`, but keep no plan, because the examples won't come again; for `ahead` see `lay_out`."""
        planned = []
        for examples in plan_batches(groups, self.layout, self._batch_tokens, self.scale, ahead):
            sequences = dict.fromkeys(chain.from_iterable(groups[i] for i in examples))
            rows = {tokens: row for row, tokens in enumerate(sequences)}
            columns = lay_out(list(rows), self.layout, self._batch_tokens, self._device, later, self.scale, ahead)
            planned.append(Batch(examples, columns, rows))
        return planned


def plan_batches(
    groups: Groups, layout: Layout, batch_tokens: int, scale: Scale = unscaled, ahead: int = 1
) -> list[list[int]]:
    """Divide examples into batches, each with as many examples as fit.

    Examples are ordered so that those with common prefixes, or of equal length if sequences are padded, are neighbours.

    Returns:
        Example indices per batch; each example is in exactly one batch.
    """
    if layout == "padded":
        return _plan_padded(groups, batch_tokens)
    batches: list[list[int]] = []
    taken = 0
    before: Scaled = (), ()
    scaled = [sorted((scale(len(tokens) + ahead), tokens) for tokens in group) for group in groups]
    for i in sorted(range(len(groups)), key=lambda i: (scaled[i], i)):
        more = _new_tokens((before, *scaled[i]), layout)
        if not batches or taken + more > batch_tokens:
            batches.append([])
            taken, more = 0, _new_tokens((((), ()), *scaled[i]), layout)
        batches[-1].append(i)
        taken += more
        before = max(scaled[i], default=before)
    return batches


def _new_tokens(sequences: Sequence[Scaled], layout: Layout) -> int:
    """Return the number of columns that sorted sequences add to the first of them."""
    shared = common_start if layout == "packed" else lambda one, other: 0
    return sum(len(other[1]) - shared(one, other) for one, other in pairwise(sequences))


def _plan_padded(groups: Groups, batch_tokens: int) -> list[list[int]]:
    batches: list[list[int]] = []
    rows = longest = 0
    lengths = [max(map(len, group), default=0) for group in groups]
    for i in sorted(range(len(groups)), key=lambda i: (lengths[i], i)):
        rows, longest = rows + len(groups[i]), max(longest, lengths[i])
        if not batches or rows * longest > batch_tokens:
            batches.append([])
            rows, longest = len(groups[i]), lengths[i]
        batches[-1].append(i)
    return batches
