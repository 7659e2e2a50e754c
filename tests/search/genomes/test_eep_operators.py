"""Frequencies of EEP's operators, compared with Sec. 4.3 and App. C of the paper, and its authors' rates.

Every bound is four standard deviations of the number that it bounds, over draws with fixed seeds. Expected rates are
written out here, apart from the code: a group's matrix is touched with probability 1/4, drawn again until one is; of a
touched one while pruning, a row is replaced with probability 0.15 by an expert that no other row has; while merging, an
entry gets N(0, 0.065^2) with probability 1/4, and the rows of all expert mergings are scaled to sum 1 with probability
0.1; of two parents a touched matrix has rows of both, any other is one's, the first one's with probability 0.6.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from search_samples import MERGE, PRUNE, eep_space

from moevolve.search.genomes.eep.space import EepGenome, EepSpace

DRAWS = 1000
GROUPS, KEPT, EXPERTS = 4, 3, 8
TOUCHED = 0.25 / (1 - 0.75 ** (2 * GROUPS))
"""Probability that a given one of the 2 G matrices is drawn, given that at least one is."""
Floats = NDArray[np.floating[Any]]


@pytest.fixture
def unscaled(monkeypatch: pytest.MonkeyPatch) -> None:
    """No rows are scaled to sum 1."""
    monkeypatch.setattr("moevolve.search.genomes.eep.space._NORMALISED", 0.0)


def near(rate: float, expected: float, draws: int) -> bool:
    return bool(abs(rate - expected) <= 4 * np.sqrt(expected * (1 - expected) / draws))


def space() -> EepSpace:
    return eep_space(KEPT, GROUPS, layers=8)


def filled(mapping: float, merging: float) -> EepGenome:
    shape = (GROUPS, KEPT, EXPERTS)
    return EepGenome(space(), np.full(shape, mapping, np.float32), np.full(shape, merging, np.float32))


def children(parents: Sequence[EepGenome], draws: int = DRAWS, phase: Any = MERGE, **changes: Any) -> Floats:
    """Router mappings and expert mergings of many children: [draws, 2, groups, n', n]."""
    changed = phase.model_copy(update=changes)
    bred = [
        parents[0].space.breed(np.random.default_rng(seed), changed, tuple(parents)).genome for seed in range(draws)
    ]
    return np.stack([np.stack([child.router_mapping, child.expert_merging]) for child in bred])


@pytest.mark.usefixtures("unscaled")
def test_groups_of_both_matrices_are_touched_apart() -> None:
    touched = children([filled(0, 0)], entry_rate=1.0).any(axis=(3, 4))
    assert touched.any(axis=(1, 2)).all()
    for rate in touched.mean(axis=0).ravel():
        assert near(rate, TOUCHED, DRAWS)
    # Both of a group are as often as two draws of their own, among those that aren't empty.
    mapped, merged = touched[:, 0], touched[:, 1]
    assert near((mapped & merged).mean(), 0.25**2 / (1 - 0.75 ** (2 * GROUPS)), DRAWS * GROUPS)


@pytest.mark.usefixtures("unscaled")
def test_entries_of_touched_matrices_get_noise_of_the_rate_and_deviation() -> None:
    noise = children([filled(0, 0)])
    hit = noise[noise != 0]
    assert near(hit.size / noise.size, TOUCHED * 0.25, DRAWS)
    rows = noise[noise.any(axis=(3, 4))]
    assert near((rows != 0).mean(), 0.25, rows.size)
    assert abs(hit.mean()) < 4 * 0.065 / np.sqrt(hit.size)
    assert abs(hit.std() - 0.065) < 4 * 0.065 / np.sqrt(2 * hit.size)
    assert near((np.abs(hit) < 0.065).mean(), 0.6827, hit.size)


def test_all_expert_mergings_are_normalised_at_once() -> None:
    bred = children([filled(0.5, 0.5)], entry_rate=0.0)
    scaled = np.isclose(bred.sum(axis=4), 1, atol=1e-5)
    assert not scaled[:, 0].any(), "the router mapping stays as it is"
    whole = scaled[:, 1].all(axis=(1, 2))
    assert np.array_equal(whole, scaled[:, 1].any(axis=(1, 2)))
    assert near(whole.mean(), 0.1, DRAWS)


@pytest.mark.usefixtures("unscaled")
def test_touched_matrices_are_mixed_by_rows_and_others_come_whole() -> None:
    """The first parent is all zeros, the second all ones."""
    bred = children([filled(0, 0), filled(1, 1)], entry_rate=0.0)
    assert near(1 - bred[..., 0, 0].mean(), 0.6, DRAWS * 2 * GROUPS), "the front parent's share"
    assert np.array_equal(bred.min(axis=4), bred.max(axis=4))
    whole = (bred == bred[..., :1, :1]).all(axis=(3, 4))
    expected = (1 - TOUCHED) + TOUCHED * (0.6**KEPT + 0.4**KEPT)
    assert near(whole.mean(), expected, DRAWS * GROUPS)
    # Each matrix of each group by itself.
    first = bred[..., 0, 0]
    for one, two in (((0, 0), (1, 0)), ((0, 0), (0, 1)), ((1, 1), (0, 3))):
        assert near((first[:, *one] == first[:, *two]).mean(), 0.6**2 + 0.4**2, DRAWS)


@pytest.mark.usefixtures("unscaled")
def test_noise_of_a_crossed_child_is_where_rows_of_both_are() -> None:
    bred = children([filled(0, 0), filled(1, 1)], entry_rate=1.0)
    plain = np.isin(bred, (0, 1)).all(axis=(3, 4))
    assert near(1 - plain.mean(), TOUCHED, DRAWS * GROUPS)
    whole = bred[plain]
    assert np.array_equal(whole, np.broadcast_to(whole[:, :1, :1], whole.shape))


def replacements(**changes: Any) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Experts that a pruning parent keeps, int64 [groups, n'], and its children: int64 [draws, groups, n']."""
    parent = space().sample(np.random.default_rng(0), PRUNE).genome
    bred = children([parent], phase=PRUNE, **changes)
    assert np.array_equal(bred[:, 0], bred[:, 1]), "one selection in both matrices"
    return space().kept(parent), np.sort(bred[:, 1].argmax(axis=3), axis=2)


def gone(before: NDArray[np.int64], after: NDArray[np.int64]) -> NDArray[np.int64]:
    """Number of replaced experts in every group: int64 [draws, groups]."""
    return np.array([[np.setdiff1d(*pair).size for pair in zip(before, child, strict=True)] for child in after])


def one_after_the_other(kept: tuple[int, ...], rate: float = 0.15) -> dict[tuple[int, ...], float]:
    """Outcomes of a subset whose rows are replaced in order, with their probabilities, by enumeration.

    App. C replaces rows at random; in the authors' code a row is emptied, and drawn again until no other row has it.
    """
    found: dict[tuple[int, ...], float] = {kept: 1.0}
    for place in range(len(kept)):
        after: dict[tuple[int, ...], float] = {}
        for rows, probability in found.items():
            after[rows] = after.get(rows, 0) + (1 - rate) * probability
            free = [expert for expert in range(EXPERTS) if expert not in rows[:place] + rows[place + 1 :]]
            for expert in free:
                child = (*rows[:place], expert, *rows[place + 1 :])
                after[child] = after.get(child, 0) + rate * probability / len(free)
        found = after
    return found


def test_a_replaced_expert_may_be_drawn_again() -> None:
    before, after = replacements(group_rate=1.0)
    changed = gone(before, after)
    outcomes = one_after_the_other(tuple(before[0].tolist()))
    for count in range(3):
        expected = sum(p for rows, p in outcomes.items() if len(set(before[0]) - set(rows)) == count)
        assert near((changed == count).mean(), expected, changed.size), count
    # All that come in are as likely.
    came = np.concatenate([np.setdiff1d(child[0], before[0]) for child in after])
    counts = np.bincount(came, minlength=EXPERTS)[np.setdiff1d(np.arange(EXPERTS), before[0])]
    assert counts.size == EXPERTS - KEPT
    assert all(near(each / came.size, 1 / counts.size, came.size) for each in counts)


def test_a_pruning_child_changes_where_the_expert_merging_was_drawn() -> None:
    """Groups of the router mapping are drawn too, and change nothing: a quarter of the children equal their parents."""
    before, after = replacements(replace_rate=1.0)
    changed = gone(before, after) > 0
    # All rows of a drawn group are replaced one after the other, and may end as they were.
    outcomes = one_after_the_other(tuple(before[0].tolist()), rate=1.0)
    same = sum(p for rows, p in outcomes.items() if set(rows) == set(before[0]))
    assert near(changed.mean(), TOUCHED * (1 - same), DRAWS * GROUPS)


@pytest.mark.usefixtures("unscaled")
def test_merging_takes_no_expert_from_both_of_two_pruned_relatives() -> None:
    """Rows of {0, 1, 2, 3} and of its child {7, 1, 2, 3} are mixed in place; sorted, {1, 2, 3, 7} would repeat some."""
    wide = eep_space(4, 1)
    parent = wide.from_kept(np.array([[0, 1, 2, 3]]))
    bred = (wide.breed(np.random.default_rng(seed), PRUNE, (parent,)).genome for seed in range(10 * DRAWS))
    child = next(each for each in bred if set(wide.kept(each)[0]) == {1, 2, 3, 7})
    mixed = children([parent, child], group_rate=1.0, entry_rate=0.0)
    assert mixed.sum(axis=3).max() == 1, "an expert comes twice"
    assert near(mixed[..., 0, 7].mean(), 0.4, DRAWS * 2), "the front parent's share is 0.6"


def test_rows_that_are_not_replaced_stay_and_their_order_changes_no_set() -> None:
    rng = np.random.default_rng(0)
    kept = [space().kept(space().sample(rng, PRUNE).genome) for _ in range(2)]
    mixed = [rng.permuted(each, axis=1) for each in kept]

    def bred(sets: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
        return children([space().from_kept(each) for each in sets], phase=PRUNE)[:, 1].argmax(axis=3)

    for parents in (1, 2):
        assert np.array_equal(np.sort(bred(kept[:parents])), np.sort(bred(mixed[:parents])))
    stays = bred(mixed[:1]) == mixed[0]
    # A replaced expert is drawn again with probability 1 / 6, since two of eight are in other rows.
    assert near(stays.mean(), 1 - TOUCHED * 0.15 * 5 / 6, stays.size)
