"""Sequences of tokens laid out for one forward pass: packed, so that common beginnings run once, or padded.

What a causal model makes of a token depends on the tokens before it only. So prompts that begin alike, and several
continuations of one prompt, have these tokens' hidden states in common: laid out as a tree, each distinct beginning
runs once, and nothing is padded. Attention alone needs whole sequences;
`moevolve.workers.engine.packed_attention` gathers them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moevolve.workers.contract.edits import Tokens

Layout = Literal["packed", "unshared", "padded"]
"""How sequences lie: as a tree in one row; in one row, one after the other; or one per row, padded on the right."""

BLOCK = 16
"""Tokens that ask at once on a CPU: those at places 0 to 15 of their sequences, 16 to 31 and so on, each block
attending to all up to its end. So the shape of the products that a token's attention is made of depends on its place
alone (compare `moevolve.kernels.products`). Blocks of 8 and of 32 take longer for prompts of 20 tokens."""

_PART_COST = 500
_QUERY_COST = 4
_PAIR_COST = 0.05
"""What a part of attention costs, an asking token and a pair of tokens, as multiples of gathering a token's keys and
values. Measured on a CPU with heads of 128 numbers in all: a part is a dozen operations of some microseconds each, and
PyTorch's attention takes half a microsecond per asking token however few it attends to."""

_GPU_PART_COST = 20_000
"""The same elsewhere, by what launching a dozen kernels takes beside a GPU's bandwidth; not measured."""


@dataclass(frozen=True, slots=True, eq=False)
class Masks:
    """Which tokens others attend to, made once for the same places."""

    _made: dict[tuple[Any, ...], Tensor] = field(default_factory=dict)

    def of(
        self, first: int, end: int, window: int | None, additive: torch.dtype | None, device: torch.device
    ) -> Tensor | None:
        """For the tokens from place `first` of their sequences up to `end`, and all before these: [1, 1, asking, end].

        Args:
            first, end: places.
            window: how many tokens back a layer looks, itself included; None for all.
            additive: for a mask that is added, in this dtype; None for a boolean one.
            device: where it goes.

        Returns:
            None where it would be the plain causal one, and boolean.
        """
        window = window if window is not None and window < end else None
        if first == 0 and window is None and additive is None:
            return None
        key = (first, end, window, additive, device)
        if key not in self._made:
            place = torch.arange(end, device=device)
            back = place[first:, None] - place[None, :]
            seen = (back >= 0) & (back < (end if window is None else window))
            if additive is not None:
                seen = torch.zeros(seen.shape, dtype=additive, device=device).masked_fill_(
                    ~seen, torch.finfo(additive).min
                )
            self._made[key] = seen[None, None]
        return self._made[key]


@dataclass(frozen=True, slots=True, eq=False)
class AttentionPart:
    """Sequences that attend together: the closing tokens of each, to all of its tokens.

    Attributes:
        rows: how many there are.
        start: the place in its sequence of each row's first asking token.
        length: tokens of a row; shorter ones are filled up on their right.
        keys: columns of all rows' tokens, int64 [rows * length].
        queries: of those that ask, int64 [rows * (length - start)].
        blocks: first and end place of the tokens that ask at once, and attend to what is before that end.
    """

    rows: int
    start: int
    length: int
    keys: Tensor
    queries: Tensor
    blocks: tuple[tuple[int, int], ...]

    @property
    def pairs(self) -> int:
        """Pairs of tokens that are computed, those that are masked or filled up included."""
        return self.rows * sum((end - first) * end for first, end in self.blocks)


@dataclass(frozen=True, slots=True, eq=False)
class Attention:
    """Who attends to whom among packed columns.

    Attributes:
        parts: that attend at once.
        found: per column, where its result is among those of all parts, one part's queries after the other's; int64
            [columns].
        masks: of the parts.
    """

    parts: tuple[AttentionPart, ...]
    found: Tensor
    masks: Masks = field(default_factory=Masks)


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
    block, part_cost = (BLOCK, _PART_COST) if device.type == "cpu" else (None, _GPU_PART_COST)
    parts = _grouped([_Row.of(start, path, block) for start, path in rows], most, part_cost)
    return Columns(
        stacked[:1],
        stacked[1:],
        None,
        _filled([paths[i] for i in range(len(sequences))]),
        tuple(map(len, sequences)),
        _attention(parts, len(ids), block, device),
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


def _filled(paths: Sequence[NDArray[np.int64]], least: int = 0) -> NDArray[np.int64]:
    """Paths as rows of one array of `least` columns or more, each filled up with its last element."""
    longest = max(map(len, paths), default=0)
    longest = max(longest, least) if longest else 0
    if not longest:
        return np.zeros((len(paths), 0), dtype=np.int64)
    return np.stack([np.pad(path, (0, longest - len(path)), mode="edge") for path in paths])


@dataclass(frozen=True, slots=True, eq=False)
class _Row:
    """A sequence that attends.

    Attributes:
        first: the place of its first token that asks for itself.
        path: columns of its tokens.
        start, length: the places from which on and up to which it is computed.
    """

    first: int
    path: NDArray[np.int64]
    start: int
    length: int

    @classmethod
    def of(cls, first: int, path: NDArray[np.int64], block: int | None) -> _Row:
        unit = 1 if block is None else block
        return cls(first, path, first // unit * unit, -(-len(path) // unit) * unit)


def _grouped(rows: list[_Row], most: int, part_cost: float) -> list[list[_Row]]:
    """Divide rows, sorted by start and length, into the parts that cost least, by dynamic programming.

    Args:
        rows: sequences.
        most: tokens of a part with several rows.
        part_cost: what a part costs besides its tokens.
    """
    rows = sorted(rows, key=lambda row: (row.start, row.length))
    starts = np.array([row.start for row in rows])
    lengths = np.array([row.length for row in rows])
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


def _attention(parts: list[list[_Row]], columns: int, block: int | None, device: torch.device) -> Attention:
    made = []
    found = np.empty(columns, dtype=np.int64)
    done = 0

    def put(values: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values.reshape(-1))).to(device)

    for rows in parts:
        start = min(row.start for row in rows)
        paths = _filled([row.path for row in rows], max(row.length for row in rows))
        count, length = paths.shape
        for place, row in enumerate(rows):
            asking = np.arange(row.first, len(row.path))
            found[row.path[row.first :]] = done + place * (length - start) + asking - start
        unit = length if block is None else block
        blocks = tuple((first, min(first + unit, length)) for first in range(start, length, unit))
        made.append(AttentionPart(count, start, length, put(paths), put(paths[:, start:]), blocks))
        done += count * (length - start)
    return Attention(tuple(made), put(found))
