"""Sequences of tokens laid out for one forward pass: packed, so that common beginnings run once, or padded.

What a causal model makes of a token depends on the tokens before it only. So prompts that begin alike, and several
continuations of one prompt, have these tokens' hidden states in common: laid out as a tree, each distinct beginning
runs once, and nothing is padded. Attention alone needs whole sequences;
`moevolve.workers.engine.packed_attention` gathers them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moevolve.workers.methods.base import Tokens

Layout = Literal["packed", "unshared", "padded"]
"""How sequences lie: as a tree in one row; in one row, one after the other; or one per row, padded on the right."""

_PART_COST = 500
_QUERY_COST = 4
_PAIR_COST = 0.05
"""What a part of attention costs, an asking token and a pair of tokens, as multiples of gathering a token's keys and
values. Measured on a CPU with heads of 128 numbers in all: a part is a dozen operations of some microseconds each, and
PyTorch's attention takes half a microsecond per asking token however few it attends to."""

_GPU_PART_COST = 20_000
"""The same elsewhere, by what launching a dozen kernels takes beside a GPU's bandwidth; not measured."""


@dataclass(frozen=True, slots=True, eq=False)
class AttentionPart:
    """Sequences that attend at once: the closing tokens of each, to all of its tokens.

    Attributes:
        rows: how many there are.
        start: the place in its sequence of each row's first asking token.
        length: tokens of a row; shorter ones are filled up on their right.
        keys: columns of all rows' tokens, int64 [rows * length].
        queries: of those that ask, int64 [rows * (length - start)].
    """

    rows: int
    start: int
    length: int
    keys: Tensor
    queries: Tensor
    _masks: dict[tuple[int | None, torch.dtype | None], Tensor] = field(default_factory=dict)

    @property
    def pairs(self) -> int:
        """Pairs of tokens that are computed, those that are masked or filled up included."""
        return self.rows * (self.length - self.start) * self.length

    def mask(self, window: int | None, additive: torch.dtype | None) -> Tensor | None:
        """Which tokens each asking one attends to, [1, 1, length - start, length].

        Args:
            window: how many tokens back a layer looks, itself included; None for all.
            additive: for a mask that is added, in this dtype; None for a boolean one.

        Returns:
            None where it would be the plain causal one, and boolean.
        """
        window = window if window is not None and window < self.length else None
        if self.start == 0 and window is None and additive is None:
            return None
        if (window, additive) not in self._masks:
            place = torch.arange(self.length, device=self.keys.device)
            back = place[self.start :, None] - place[None, :]
            seen = (back >= 0) & (back < (self.length if window is None else window))
            if additive is not None:
                seen = torch.zeros(seen.shape, dtype=additive, device=seen.device).masked_fill_(
                    ~seen, torch.finfo(additive).min
                )
            self._masks[window, additive] = seen[None, None]
        return self._masks[window, additive]


@dataclass(frozen=True, slots=True, eq=False)
class Attention:
    """Who attends to whom among packed columns.

    Attributes:
        parts: that attend at once.
        found: per column, where its result is among those of all parts, one part's queries after the other's; int64
            [columns].
    """

    parts: tuple[AttentionPart, ...]
    found: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """Sequences laid out for a pass.

    Attributes:
        ids: int64 [rows, columns].
        positions: int64 [rows, columns], each token's place in its own sequence; 0 on padding.
        mask: int64 [rows, columns], 1 where there is a token; None where nothing is padded.
        places: the column of every sequence's every token, in all rows counted through: int64 [sequences, longest], on
            the host; beyond its end a sequence has that of its last token.
        lengths: tokens of every sequence.
        attention: where the sequences are packed.
    """

    ids: Tensor
    positions: Tensor
    mask: Tensor | None
    places: NDArray[np.int64]
    lengths: tuple[int, ...]
    attention: Attention | None = None

    @property
    def pairs(self) -> int:
        """Pairs of tokens of which one attends to the other, as computed: masked and padded ones included."""
        if self.attention is None:
            return self.ids.numel() * self.ids.shape[1]
        return sum(part.pairs for part in self.attention.parts)


def lay_out(sequences: Sequence[Tokens], layout: Layout, most: int, device: torch.device) -> Columns:
    """Lay sequences out.

    Args:
        sequences: none empty.
        layout: how.
        most: tokens that a part of attention may gather, if it has several rows.
        device: where the tensors go.
    """
    if layout == "padded":
        return _padded(sequences, device)
    ids: list[int] = []
    positions: list[int] = []
    paths: dict[int, NDArray[np.int64]] = {}
    rows: list[tuple[int, NDArray[np.int64]]] = []
    before: Tokens = ()
    path = np.empty(0, dtype=np.int64)
    for i in sorted(range(len(sequences)), key=sequences.__getitem__):
        tokens = sequences[i]
        start = common_start(before, tokens) if layout == "packed" else 0
        path = np.concatenate((path[:start], np.arange(len(ids), len(ids) + len(tokens) - start)))
        ids += tokens[start:]
        positions += range(start, len(tokens))
        if 0 < start == len(before):
            # The one before is its beginning: one row serves both, so that the tree alone says who attends together.
            rows[-1] = (rows[-1][0], path)
        elif start < len(tokens):
            rows.append((start, path))
        paths[i], before = path, tokens
    stacked = torch.tensor([ids, positions], dtype=torch.int64).to(device)
    return Columns(
        stacked[:1],
        stacked[1:],
        None,
        _filled([paths[i] for i in range(len(sequences))]),
        tuple(map(len, sequences)),
        _attention(_grouped(rows, most, _PART_COST if device.type == "cpu" else _GPU_PART_COST), len(ids), device),
    )


def common_start(one: Tokens, other: Tokens) -> int:
    """How many tokens two sequences begin with alike."""
    least = min(len(one), len(other))
    return next((i for i in range(least) if one[i] != other[i]), least)


def pad_left(sequences: Sequence[Tokens], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, mask (1 where there is a token) and positions of sequences that end together, int64 [sequences, longest]."""
    return _stacked(sequences, device, before=True)


def _padded(sequences: Sequence[Tokens], device: torch.device) -> Columns:
    ids, mask, positions = _stacked(sequences, device, before=False)
    places = [np.arange(len(tokens)) + row * ids.shape[1] for row, tokens in enumerate(sequences)]
    return Columns(ids, positions, mask, _filled(places), tuple(map(len, sequences)))


def _stacked(sequences: Sequence[Tokens], device: torch.device, before: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, mask and positions; padding goes before the tokens or behind them."""
    longest = max(map(len, sequences), default=0)
    stacked = np.zeros((3, len(sequences), longest), dtype=np.int64)
    for row, tokens in enumerate(sequences):
        start = longest - len(tokens) if before else 0
        stacked[:, row, start : start + len(tokens)] = tokens, [1] * len(tokens), range(len(tokens))
    ids, mask, positions = torch.from_numpy(stacked).to(device)
    return ids, mask, positions


def _filled(paths: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Paths as rows of one array, each filled up with its last element."""
    longest = max(map(len, paths), default=0)
    if not longest:
        return np.zeros((len(paths), 0), dtype=np.int64)
    return np.stack([np.pad(path, (0, longest - len(path)), mode="edge") for path in paths])


def _grouped(
    rows: list[tuple[int, NDArray[np.int64]]], most: int, part_cost: float
) -> list[list[tuple[int, NDArray[np.int64]]]]:
    """Divide rows, sorted by start and length, into the parts that cost least, by dynamic programming.

    Args:
        rows: where each begins to ask, and its path.
        most: tokens of a part with several rows.
        part_cost: what a part costs besides its tokens.
    """
    rows = sorted(rows, key=lambda row: (row[0], len(row[1])))
    starts = np.array([start for start, _ in rows])
    lengths = np.array([len(path) for _, path in rows])
    cost, begins = np.zeros(len(rows) + 1), np.zeros(len(rows) + 1, dtype=np.int64)
    for end in range(1, len(rows) + 1):
        # Parts that end here, by their first row, from the last one backwards.
        first = np.arange(end - 1, max(-1, end - 1 - most), -1)
        longest, count = np.maximum.accumulate(lengths[first]), end - first
        asking = longest - starts[first]
        each = longest + asking * (_QUERY_COST + _PAIR_COST * longest)
        total = cost[first] + count * each + part_cost
        total[(count > 1) & (count * longest > most)] = np.inf
        best = int(total.argmin())
        cost[end], begins[end] = total[best], first[best]
    parts = []
    end = len(rows)
    while end:
        parts.append(rows[begins[end] : end])
        end = int(begins[end])
    return parts[::-1]


def _attention(parts: list[list[tuple[int, NDArray[np.int64]]]], columns: int, device: torch.device) -> Attention:
    made = []
    found = np.empty(columns, dtype=np.int64)
    done = 0

    def put(values: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values.reshape(-1))).to(device)

    for rows in parts:
        start = min(first for first, _ in rows)
        paths = _filled([path for _, path in rows])
        count, length = paths.shape
        for row, (first, path) in enumerate(rows):
            found[path[first:]] = done + row * (length - start) + np.arange(first, len(path)) - start
        made.append(AttentionPart(count, start, length, put(paths), put(paths[:, start:])))
        done += count * (length - start)
    return Attention(tuple(made), put(found))
