"""The layout of token sequences in one forward pass: packed into a prefix tree, or padded.

In a causal model a token's hidden states depend only on the tokens before it. So sequences with a common prefix share
its hidden states: laid out as a tree in one row of columns, each distinct prefix runs once, and nothing is padded. Only
attention needs whole sequences, which `moevolve.workers.engine.packed_attention` gathers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moevolve.workers.contract.edits import Tokens
from moevolve.workers.families.rotary import Scale, unscaled

# How sequences are laid out: `packed` as a prefix tree in one row, `unshared` one after the other in one row, or
# `padded` on the right with one sequence per row.
Layout = Literal["packed", "unshared", "padded"]

# The scale of a sequence's text, and the sequence.
Scaled = tuple[tuple[int, ...], Tokens]

# Number of query tokens that attend at once on a CPU: those at positions 0 to 15 of their sequences, 16 to 31 and so
# on, each block attending to all positions up to its end. So the shapes of the products in a token's attention depend
# on its position alone (compare `moevolve.kernels.products`). Blocks of 8 and of 32 are slower for prompts of 20
# tokens.
BLOCK = 16

# The same for texts that aren't decoded, from this position on: windows of 256 tokens take 16 % less time than with
# blocks of 16, while a decoding step would compute four times as many queries for its one token.
TEXT_BLOCK = 64

# Costs of an attention part, a query token and a pair of tokens, relative to gathering a token's keys and values.
# Measured on a CPU with 128 values over all heads: a part is a dozen operations of some microseconds each, and
# PyTorch's attention takes half a microsecond per query token, however few tokens it attends to.
_PART_COST = 500
_QUERY_COST = 4
_PAIR_COST = 0.05

# Cost of an attention part on a GPU, estimated (not measured) from the launch time of a dozen kernels.
_GPU_PART_COST = 20_000


@dataclass(frozen=True, slots=True, eq=False)
class Masks:
    """Causal attention masks, cached by the positions that they are for."""

    _cache: dict[tuple[object, ...], Tensor] = field(default_factory=dict)

    def of(
        self, first: int, end: int, window: int | None, additive: torch.dtype | None, device: torch.device
    ) -> Tensor | None:
        """Return the mask of queries at positions `first` to `end` over keys at positions 0 to `end`.

        Args:
            first, end: Half-open range of positions.
            window: Size of the sliding window in tokens, including the query's own; None without one.
            additive: Dtype of an additive mask; None for a boolean one.
            device: Device of the mask.

        Returns:
            Mask [1, 1, end - first, end]; None for the boolean mask of plain causal attention.
        """
        window = window if window is not None and window < end else None
        if first == 0 and window is None and additive is None:
            return None
        key = (first, end, window, additive, device)
        if key not in self._cache:
            position = torch.arange(end, device=device)
            distance = position[first:, None] - position[None, :]
            mask = (distance >= 0) & (distance < (end if window is None else window))
            if additive is not None:
                mask = torch.zeros(mask.shape, dtype=additive, device=device).masked_fill_(
                    ~mask, torch.finfo(additive).min
                )
            self._cache[key] = mask[None, None]
        return self._cache[key]


@dataclass(frozen=True, slots=True, eq=False)
class AttentionPart:
    """Sequences whose attention is computed together: the last tokens of each attend to all of its tokens.

    Attributes:
        start: Position of the first query token in every sequence.
        length: Number of tokens per sequence; shorter sequences are padded on the right.
        keys: Columns of all tokens, int64 [rows * length].
        queries: Columns of the query tokens, int64 [rows * (length - start)].
        blocks: Ranges (first, end) of positions whose queries are computed at once over the keys up to `end`.
    """

    rows: int
    start: int
    length: int
    keys: Tensor
    queries: Tensor
    blocks: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Attention:
    """How attention between packed columns is computed.

    Attributes:
        output_index: Index of every column's output among the concatenated queries of all parts, int64 [columns].
    """

    parts: tuple[AttentionPart, ...]
    output_index: Tensor
    masks: Masks = field(default_factory=Masks)


@dataclass(frozen=True, slots=True, eq=False)
class StepGroup:
    """Rows of a decoding step whose new tokens lie in the same block of positions.

    Attributes:
        rows: Indices of the rows, int64 [n].
        columns: Columns of each row's tokens in the cache, ending with the new one and padded with arbitrary ones,
            int64 [n, end].
        offsets: Position of each new token within the block, int64 [n].
        first, end: Range of positions of the block.
    """

    rows: Tensor
    columns: Tensor
    offsets: Tensor
    first: int
    end: int


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """Attention of a decoding step, whose results equal those of a pass over the whole sequences on a CPU.

    Attributes:
        output_index: Index of every row's output among those of all groups, int64 [rows].
    """

    groups: tuple[StepGroup, ...]
    output_index: Tensor
    masks: Masks

    @classmethod
    def of(cls, mask: Tensor, masks: Masks) -> Step:
        """Derive a step from the mask of cached and new columns, int64 [rows, cached + 1], 1 for tokens of the row."""
        positions = mask.sum(dim=1) - 1
        order = mask.argsort(dim=1, descending=True, stable=True)
        blocks = positions // BLOCK
        groups = []
        for block in blocks.unique().tolist():
            rows = (blocks == block).nonzero().squeeze(1)
            end = (block + 1) * BLOCK
            columns = torch.nn.functional.pad(order[rows, :end], (0, max(0, end - order.shape[1])))
            groups.append(StepGroup(rows, columns, positions[rows] % BLOCK, block * BLOCK, end))
        return cls(tuple(groups), torch.cat([group.rows for group in groups]).argsort(), masks)


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """The layout of sequences in a forward pass.

    Attributes:
        ids: Token ids, int64 [rows, columns].
        positions: Position of each token in its sequence, 0 on padding, int64 [rows, columns].
        mask: 1 for tokens and 0 for padding, int64 [rows, columns]; None if nothing is padded.
        places: Place of every token of every sequence, int64 [sequences, longest] on the host. A place is an index into
            the flattened [rows, columns]. Beyond the end of a sequence its last place is repeated.
        attention: Attention between the columns of packed sequences, or of a decoding step after them; None if
            sequences are padded.
        lengths: Length of the text that each token belongs to, int64 [rows, columns]; None if position ids say it, or
            nothing depends on it (`moevolve.workers.families.rotary`).
    """

    ids: Tensor
    positions: Tensor
    mask: Tensor | None
    places: NDArray[np.int64]
    attention: Attention | Step | None = None
    lengths: Tensor | None = None


def lay_out(
    sequences: Sequence[Tokens],
    layout: Layout,
    most: int,
    device: torch.device,
    later: int = BLOCK,
    scale: Scale = unscaled,
    ahead: int = 1,
) -> Columns:
    """Lay out non-empty sequences for a forward pass.

    `most` is the maximum number of tokens in an attention part with several sequences, and `later` that of query tokens
    per block of attention on a CPU from that position on; it is `BLOCK` before. Texts have `ahead` more tokens than
    their sequences, and a prefix is shared by texts of one `scale` only.
    """
    texts = [len(tokens) + ahead for tokens in sequences]
    if layout == "padded":
        return _padded(sequences, device, None if scale is unscaled else texts)
    ids: list[int] = []
    positions: list[int] = []
    lengths: list[int] = []
    paths: dict[int, NDArray[np.int64]] = {}
    rows: list[tuple[int, NDArray[np.int64]]] = []
    before: Scaled = (), ()
    path = np.empty(0, dtype=np.int64)
    scaled = [(scale(length), tokens) for length, tokens in zip(texts, sequences, strict=True)]
    for i in sorted(range(len(sequences)), key=scaled.__getitem__):
        tokens = sequences[i]
        start = common_start(before, scaled[i]) if layout == "packed" else 0
        path = np.concatenate((path[:start], np.arange(len(ids), len(ids) + len(tokens) - start)))
        ids += tokens[start:]
        positions += range(start, len(tokens))
        lengths += [texts[i]] * (len(tokens) - start)
        if 0 < start == len(before[1]):
            # The previous sequence is a prefix of this one, so one row serves both.
            rows[-1] = (rows[-1][0], path)
        elif start < len(tokens):
            rows.append((start, path))
        paths[i], before = path, scaled[i]
    stacked = torch.tensor([ids, positions, lengths], dtype=torch.int64).to(device)
    block, part_cost = (later, _PART_COST) if device.type == "cpu" else (None, _GPU_PART_COST)
    parts = _grouped([_PackedRow.of(start, path, block) for start, path in rows], most, part_cost)
    return Columns(
        stacked[:1],
        stacked[1:2],
        None,
        _stack_paths([paths[i] for i in range(len(sequences))]),
        _attention(parts, len(ids), block, device),
        None if scale is unscaled else stacked[2:],
    )


def common_start(one: Scaled, other: Scaled) -> int:
    """Return the number of tokens that two sequences can share: their common prefix, or none if their scales differ."""
    (scale, first), (others, second) = one, other
    least = min(len(first), len(second)) if scale == others else 0
    return next((i for i in range(least) if first[i] != second[i]), least)


def _padded(sequences: Sequence[Tokens], device: torch.device, texts: Sequence[int] | None) -> Columns:
    ids, mask, positions = pad(sequences, device, before=False)
    places = [np.arange(len(tokens)) + row * ids.shape[1] for row, tokens in enumerate(sequences)]
    lengths = None if texts is None else torch.tensor(texts, device=device).unsqueeze(1).expand_as(ids)
    return Columns(ids, positions, mask, _stack_paths(places), lengths=lengths)


def pad(sequences: Sequence[Tokens], device: torch.device, before: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Pad sequences before or after their tokens.

    Returns:
        Ids, mask (1 for tokens) and positions, int64 [sequences, longest].
    """
    longest = max(map(len, sequences), default=0)
    stacked = np.zeros((3, len(sequences), longest), dtype=np.int64)
    for row, tokens in enumerate(sequences):
        start = longest - len(tokens) if before else 0
        stacked[:, row, start : start + len(tokens)] = tokens, [1] * len(tokens), range(len(tokens))
    ids, mask, positions = torch.from_numpy(stacked).to(device)
    return ids, mask, positions


def _stack_paths(paths: Sequence[NDArray[np.int64]], least: int = 0) -> NDArray[np.int64]:
    """Stack paths into one array of at least `least` columns, repeating the last element of shorter ones."""
    longest = max(map(len, paths), default=0)
    longest = max(longest, least) if longest else 0
    if not longest:
        return np.zeros((len(paths), 0), dtype=np.int64)
    return np.stack([np.pad(path, (0, longest - len(path)), mode="edge") for path in paths])


@dataclass(frozen=True, slots=True, eq=False)
class _PackedRow:
    """A sequence in attention.

    Attributes:
        first: Position of its first query token.
        path: Columns of its tokens.
        start, length: Range of positions that are computed as queries, `first` and the end rounded to whole blocks.
    """

    first: int
    path: NDArray[np.int64]
    start: int
    length: int

    @classmethod
    def of(cls, first: int, path: NDArray[np.int64], later: int | None) -> _PackedRow:
        if later is None:
            return cls(first, path, first, len(path))
        return cls(first, path, _block(first, later)[0], _block(len(path) - 1, later)[1])


def _block(position: int, later: int) -> tuple[int, int]:
    """Return the range of positions whose queries are computed with that of a position; see `Columns`."""
    size = BLOCK if position < later else later
    start = position // size * size
    return start, start + size


def _grouped(rows: list[_PackedRow], most: int, part_cost: float) -> list[list[_PackedRow]]:
    """Divide rows, sorted by start and length, into the parts with the least total cost, by dynamic programming.

    `most` is the maximum number of tokens in a part with several rows.
    """
    rows = sorted(rows, key=lambda row: (row.start, row.length))
    starts = np.array([row.start for row in rows])
    lengths = np.array([row.length for row in rows])
    cost, begins = np.zeros(len(rows) + 1), np.zeros(len(rows) + 1, dtype=np.int64)
    for end in range(1, len(rows) + 1):
        # Candidate parts that end with this row, by their first row, in descending order.
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


def _attention(parts: list[list[_PackedRow]], columns: int, later: int | None, device: torch.device) -> Attention:
    built = []
    output_index = np.empty(columns, dtype=np.int64)
    outputs = 0

    def to_device(values: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values.reshape(-1))).to(device)

    for rows in parts:
        start = min(row.start for row in rows)
        paths = _stack_paths([row.path for row in rows], max(row.length for row in rows))
        count, length = paths.shape
        for number, row in enumerate(rows):
            queries = np.arange(row.first, len(row.path))
            output_index[row.path[row.first :]] = outputs + number * (length - start) + queries - start
        blocks = [(start, length)] if later is None else [_block(start, later)]
        while blocks[-1][1] < length:
            assert later is not None
            blocks.append(_block(blocks[-1][1], later))
        built.append(AttentionPart(count, start, length, to_device(paths), to_device(paths[:, start:]), tuple(blocks)))
        outputs += count * (length - start)
    return Attention(tuple(built), to_device(output_index))
