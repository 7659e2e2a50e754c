"""Which examples run together, and how: planned once for the same examples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from moevolve.workers.contract.edits import Tokens
from moevolve.workers.engine.columns import Columns, Layout, common_start, lay_out

Groups = tuple[tuple[Tokens, ...], ...]
"""Per example, the sequences that have to run for it, in one pass."""

_REMEMBERED = 32


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Examples that run in one pass.

    Attributes:
        examples: which.
        columns: of all their sequences.
        rows: each sequence's number among those of `columns`.
    """

    examples: list[int]
    columns: Columns
    rows: dict[Tokens, int]

    def path(self, tokens: Tokens) -> NDArray[np.int64]:
        """The column of each token of one of the sequences; see `Columns.places`."""
        path: NDArray[np.int64] = self.columns.places[self.rows[tokens], : len(tokens)]
        return path


class Batcher:
    """Plans batches, and remembers what it planned: the examples of a split come again for every candidate.

    Args:
        layout: how sequences lie.
        batch_tokens: upper bound on columns of a pass, in all rows; a batch has one example at least.
        device: where passes run.
    """

    def __init__(self, layout: Layout, batch_tokens: int, device: torch.device) -> None:
        self.layout = layout
        self._batch_tokens = batch_tokens
        self._device = device
        self._planned: dict[Groups, list[Batch]] = {}

    def batches(self, groups: Groups) -> list[Batch]:
        """Batches of examples; depends on the arguments only, so an example always runs in the same batch."""
        planned = self._planned.get(groups)
        if planned is None:
            if len(self._planned) >= _REMEMBERED:
                self._planned.clear()
            plan = plan_batches(groups, self.layout, self._batch_tokens)
            planned = self._planned[groups] = [self._batch(groups, examples) for examples in plan]
        return planned

    def _batch(self, groups: Groups, examples: list[int]) -> Batch:
        sequences = dict.fromkeys(chain.from_iterable(groups[i] for i in examples))
        rows = {tokens: row for row, tokens in enumerate(sequences)}
        return Batch(examples, lay_out(list(rows), self.layout, self._batch_tokens, self._device), rows)


def plan_batches(groups: Groups, layout: Layout, batch_tokens: int) -> list[list[int]]:
    """Which examples run together: as many as fit.

    Those that begin alike are next to each other, or where sequences are padded, those that are as long.

    Args:
        groups: what examples need.
        layout: how it will lie.
        batch_tokens: upper bound on columns in all rows; a batch has one example at least.

    Returns:
        Example indices per batch; all of them exactly once.
    """
    if layout == "padded":
        return _plan_padded(groups, batch_tokens)
    batches: list[list[int]] = []
    taken = 0
    before: Tokens = ()
    for i in sorted(range(len(groups)), key=lambda i: (sorted(groups[i]), i)):
        more = _new_tokens((before, *sorted(groups[i])), layout)
        if not batches or taken + more > batch_tokens:
            batches.append([])
            taken, more = 0, _new_tokens(((), *sorted(groups[i])), layout)
        batches[-1].append(i)
        taken += more
        before = max(groups[i], default=before)
    return batches


def _new_tokens(sequences: Sequence[Tokens], layout: Layout) -> int:
    """Columns that all but the first of sorted sequences add to it."""
    shared = common_start if layout == "packed" else lambda one, other: 0
    return sum(len(other) - shared(one, other) for one, other in pairwise(sequences))


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
