"""Layouts of sequences, and dividing examples into batches."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moevolve.workers.contract.edits import Tokens
from moevolve.workers.engine.batches import Batcher, plan_batches
from moevolve.workers.engine.columns import Columns, Layout, Masks, lay_out, pad

CPU = torch.device("cpu")
LAYOUTS: tuple[Layout, ...] = ("packed", "unshared", "padded")

sequences_of_few_tokens = st.lists(
    st.lists(st.integers(0, 2), min_size=1, max_size=12).map(tuple), min_size=1, max_size=25
)


def attended_by(columns: Columns) -> dict[int, list[int]]:
    """Columns that every column attends to, in order of position."""
    assert columns.attention is not None
    seen: list[list[int]] = []
    for part in columns.attention.parts:
        keys = part.keys.view(part.rows, part.length)
        assert part.queries.view(part.rows, -1).tolist() == keys[:, part.start :].tolist()
        ends = [part.start, *(end for _, end in part.blocks)]
        assert [first for first, _ in part.blocks] == ends[:-1] and ends[-1] == part.length
        masks = [columns.attention.masks.of(*block, None, torch.float32, CPU) for block in part.blocks]
        rows = [each for mask in masks if mask is not None for each in mask[0, 0]]
        seen += [row[: len(each)][each == 0].tolist() for row in keys for each in rows]
    return {column: seen[place] for column, place in enumerate(columns.attention.output_index.tolist())}


@settings(max_examples=40)
@given(sequences_of_few_tokens, st.sampled_from(LAYOUTS), st.integers(1, 60))
def test_every_sequence_finds_its_tokens(sequences: list[Tokens], layout: Layout, most: int) -> None:
    columns = lay_out(sequences, layout, most, CPU)
    ids, positions = columns.ids.reshape(-1), columns.positions.reshape(-1)
    for tokens, path in zip(sequences, columns.places, strict=True):
        assert tuple(ids[path[: len(tokens)]].tolist()) == tokens
        assert positions[path[: len(tokens)]].tolist() == list(range(len(tokens)))
        assert (path[len(tokens) :] == path[len(tokens) - 1]).all()
    assert (columns.mask is None) == (layout != "padded")
    if columns.mask is not None:
        assert int(columns.mask.sum()) == sum(map(len, sequences))


@settings(max_examples=40)
@given(sequences_of_few_tokens, st.booleans(), st.integers(1, 60))
def test_packed_tokens_attend_to_those_before_them(sequences: list[Tokens], share: bool, most: int) -> None:
    columns = lay_out(sequences, "packed" if share else "unshared", most, CPU)
    seen = attended_by(columns)
    assert sorted(seen) == list(range(columns.ids.numel()))
    for tokens, path in zip(sequences, columns.places, strict=True):
        for place in range(len(tokens)):
            assert seen[int(path[place])] == path[: place + 1].tolist()
    assert columns.attention is not None
    assert all(part.rows == 1 or part.rows * part.length <= most for part in columns.attention.parts)


def test_blocks_of_attention_depend_on_positions_alone() -> None:
    rng = np.random.default_rng(0)
    long = tuple(rng.integers(0, 1000, size=200).tolist())
    # Beginnings that end within blocks of both sizes, so that rows begin there.
    sequences = [long, (*long[:70], *long[:90]), (*long[:20], *long[:30]), long[:9], (1, 2, 3)]
    columns = lay_out(sequences, "packed", 4096, CPU, later=64)
    seen = attended_by(columns)
    for tokens, path in zip(sequences, columns.places, strict=True):
        assert all(seen[int(path[place])] == path[: place + 1].tolist() for place in range(len(tokens)))
    assert columns.attention is not None
    expected = {(0, 16), (16, 32), (32, 48), (48, 64), (64, 128), (128, 192), (192, 256)}
    assert {block for part in columns.attention.parts for block in part.blocks} == expected


@settings(max_examples=40)
@given(sequences_of_few_tokens)
def test_a_beginning_runs_once(sequences: list[Tokens]) -> None:
    prefixes = {tokens[:end] for tokens in sequences for end in range(1, len(tokens) + 1)}
    assert lay_out(sequences, "packed", 100, CPU).ids.numel() == len(prefixes)
    assert lay_out(sequences, "unshared", 100, CPU).ids.numel() == sum(map(len, sequences))


def test_masks_of_windows_and_of_later_tokens() -> None:
    masks = Masks()
    assert masks.of(0, 4, None, None, CPU) is None and masks.of(0, 4, 4, None, CPU) is None
    window = masks.of(0, 4, 2, None, CPU)
    assert window is not None
    assert window[0, 0].int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    later = masks.of(2, 3, None, torch.float32, CPU)
    assert later is not None and later.tolist() == [[[[0, 0, 0]]]]
    assert masks.of(2, 3, None, torch.float32, CPU) is later, "made once"
    narrow = masks.of(2, 3, 2, torch.float32, CPU)
    assert narrow is not None and narrow[0, 0, 0].tolist() == [torch.finfo(torch.float32).min, 0, 0]


def test_sequences_that_end_together() -> None:
    ids, mask, positions = pad([(5, 6, 7), (8,)], CPU, before=True)
    assert ids.tolist() == [[5, 6, 7], [0, 0, 8]]
    assert mask.tolist() == [[1, 1, 1], [0, 0, 1]]
    assert positions.tolist() == [[0, 1, 2], [0, 0, 0]]


groups = st.lists(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9).map(tuple), max_size=3).map(tuple), max_size=20
)


@settings(max_examples=40)
@given(groups.map(tuple), st.sampled_from(LAYOUTS), st.integers(1, 80))
def test_a_plan_runs_every_example_once_within_the_bound(
    groups: tuple[tuple[Tokens, ...], ...], layout: Layout, bound: int
) -> None:
    batches = plan_batches(groups, layout, bound)
    assert sorted(i for batch in batches for i in batch) == list(range(len(groups)))
    for batch in Batcher(layout, bound, CPU).batches(groups):
        asked = {tokens for i in batch.examples for tokens in groups[i]}
        assert set(batch.rows) == asked and len(batch.columns.places) == len(asked)
        assert len(batch.examples) == 1 or batch.columns.ids.numel() <= bound
        for tokens in asked:
            assert len(batch.path(tokens)) == len(tokens)


def test_packed_batches_hold_what_begins_alike_and_padded_ones_what_is_as_long() -> None:
    groups = tuple((tokens,) for tokens in ((2, 1), (1, 1, 1), (2, 2), (1, 1, 2)))
    assert plan_batches(groups, "packed", 4) == [[1, 3], [0, 2]]
    assert plan_batches(groups, "padded", 6) == [[0, 2], [1, 3]]


def test_ids_and_positions_determine_attention() -> None:
    """Hidden states are cached by ids and positions, so passes that share these must compute the same sums."""
    whole, part = [(1, 2, 3, 4), (1, 2, 5), (6, 7)], [(1, 2), (6,), (1, 2, 3)]
    one, other = (lay_out(sequences, "packed", 100, CPU) for sequences in (whole, [*part, *whole, *part]))
    assert torch.equal(one.ids, other.ids) and torch.equal(one.positions, other.positions)
    assert one.attention is not None and other.attention is not None
    assert torch.equal(one.attention.output_index, other.attention.output_index)
    for mine, theirs in zip(one.attention.parts, other.attention.parts, strict=True):
        assert (mine.rows, mine.start, mine.length) == (theirs.rows, theirs.start, theirs.length)
        assert torch.equal(mine.keys, theirs.keys) and torch.equal(mine.queries, theirs.queries)


def test_similar_rows_share_attention_parts() -> None:
    """Many short sequences and a long one are divided into few parts, with the long one alone."""
    rng = np.random.default_rng(0)
    sequences = [(i, *rng.integers(0, 1000, size=19).tolist()) for i in range(50)]
    sequences.append((50, *rng.integers(0, 1000, size=399).tolist()))
    attention = lay_out(sequences, "packed", 4096, CPU).attention
    assert attention is not None
    assert sorted((part.rows, part.length) for part in attention.parts) == [(1, 400), (50, 32)]
