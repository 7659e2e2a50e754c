"""Properties of evolutionary operators that the tests of genomes leave open."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from search_samples import few

from moevolve.evaluators.errors import UserError
from moevolve.search.genomes.contract.operators import (
    balanced_swaps,
    normalise_rows,
    random_subset,
    rounded,
    select_groups,
    select_matrices,
)

seeds = st.integers(0, 2**32 - 1)
sizes = st.integers(1, 16).flatmap(lambda experts: st.tuples(st.just(experts), st.integers(1, experts)))


def test_random_subsets_are_uniform() -> None:
    drawn = random_subset(np.random.default_rng(0), 6000, 4, 2)
    subsets, counts = np.unique(drawn, axis=0, return_counts=True)
    assert len(subsets) == 6
    # 1000 expected each, standard deviation 29.
    assert np.abs(counts - 1000).max() < 150


@few
@given(seeds, st.integers(1, 40), st.floats(0, 1))
def test_selected_groups_and_matrices_are_distinct_and_never_none(seed: int, groups: int, rate: float) -> None:
    rng = np.random.default_rng(seed)
    chosen = select_groups(rng, groups, rate)
    assert chosen.dtype == np.int64 and 1 <= chosen.size <= groups
    assert chosen[0] >= 0 and chosen[-1] < groups and (np.diff(chosen) > 0).all()
    assert select_groups(rng, groups, 0.0).size == 1 and select_groups(rng, groups, 1.0).tolist() == [*range(groups)]
    matrices = select_matrices(rng, (2, groups), max(rate, 0.01))
    assert matrices.shape == (2, groups) and matrices.dtype == np.bool_ and matrices.any()
    assert select_matrices(rng, (2, groups), 1.0).all()


@few
@given(seeds, sizes)
def test_normalised_rows_sum_to_1_or_stay(seed: int, size: tuple[int, int]) -> None:
    given_matrix = np.random.default_rng(seed).standard_normal(size[::-1]).astype(np.float32)
    given_matrix[0] = 0.0
    child = normalise_rows(given_matrix)
    sums = given_matrix.sum(axis=1)
    assert child.dtype == np.float32 and np.isfinite(child).all()
    large = np.abs(sums) >= 1e-3
    assert np.array_equal(child[~large], given_matrix[~large])
    # Dividing by a small sum magnifies the rounding of its terms.
    assert (np.abs(child[large].sum(axis=1) - 1) <= 1e-6 * np.abs(child[large]).sum(axis=1) + 1e-6).all()


@pytest.mark.parametrize("rate", [0.0, 0.3, 1.0])
def test_balanced_swaps_move_as_many_as_the_rate_says_and_keep_parts_equal(rate: float) -> None:
    """If every member is a part of its own, the drawn members are permuted, with one fixed point on average."""
    members, draws = 200, 50
    labels = np.arange(members)
    children = [balanced_swaps(np.random.default_rng(seed), labels, rate) for seed in range(draws)]
    assert all(sorted(child) == labels.tolist() for child in children)
    moved = np.mean([child != labels for child in children])
    expected = rate - (rate > 0) / members
    assert abs(moved - expected) <= 4 * np.sqrt(rate * (1 - rate) / (members * draws)) + 4 / (members * np.sqrt(draws))
    parts = np.repeat(np.arange(5), 9)
    assert np.array_equal(np.sort(balanced_swaps(np.random.default_rng(0), parts, rate)), parts)


def test_layers_get_no_sizes_from_numbers_that_are_not_finite() -> None:
    for wrong in (np.nan, np.inf):
        with pytest.raises(UserError, match="isn't finite: look for NaN and infinity among the checkpoint's weights"):
            rounded(np.array([2.0, wrong]), 4, 1, 4)
