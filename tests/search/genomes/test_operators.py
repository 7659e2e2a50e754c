"""Properties of the evolutionary operators: sizes, distinctness, extreme rates, unchanged arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from search_samples import few

from moevolve.search.genomes.contract.operators import (
    balanced_swaps,
    gaussian_noise,
    matrix_crossover,
    normalise_rows,
    random_subset,
    replace_experts,
    select_groups,
    select_matrices,
    subset_crossover,
)

seeds = st.integers(0, 2**32 - 1)
rates = st.floats(0, 1)
Units = Literal["whole", "rows", "entries"]
AXES: dict[Units, tuple[int, ...]] = {"whole": (0, 1), "rows": (1,), "entries": ()}
sizes = st.integers(1, 16).flatmap(lambda experts: st.tuples(st.just(experts), st.integers(1, experts)))


def kept_experts(seed: int, experts: int, retained: int) -> NDArray[np.int64]:
    return np.sort(np.random.default_rng(seed).choice(experts, size=retained, replace=False)).astype(np.int64)


def matrices(seed: int, retained: int, experts: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((retained, experts)).astype(np.float32)


def is_sorted_subset(kept: NDArray[np.int64], experts: int, retained: int) -> bool:
    inside = bool((kept >= 0).all() and (kept < experts).all())
    return kept.shape == (retained,) and kept.dtype == np.int64 and inside and bool((np.diff(kept) > 0).all())


@few
@given(seeds, sizes, st.integers(1, 8))
def test_a_random_subset_has_distinct_experts_per_group(seed: int, size: tuple[int, int], groups: int) -> None:
    drawn = random_subset(np.random.default_rng(seed), groups, *size)
    assert drawn.shape == (groups, size[1])
    assert all(is_sorted_subset(row, *size) for row in drawn)


def test_random_subsets_are_uniform() -> None:
    drawn = random_subset(np.random.default_rng(0), 6000, 4, 2)
    subsets, counts = np.unique(drawn, axis=0, return_counts=True)
    assert len(subsets) == 6
    # 1000 expected each, standard deviation 29.
    assert np.abs(counts - 1000).max() < 150


@few
@given(seeds, st.integers(1, 40), rates)
def test_selected_groups_are_distinct_and_never_none(seed: int, groups: int, rate: float) -> None:
    chosen = select_groups(np.random.default_rng(seed), groups, rate)
    assert chosen.dtype == np.int64
    assert 1 <= chosen.size <= groups
    assert chosen[0] >= 0 and chosen[-1] < groups and (np.diff(chosen) > 0).all()


@few
@given(seeds, st.integers(1, 40))
def test_group_rates_0_and_1(seed: int, groups: int) -> None:
    rng = np.random.default_rng(seed)
    assert select_groups(rng, groups, 0.0).size == 1
    assert select_groups(rng, groups, 1.0).tolist() == list(range(groups))


@few
@given(seeds, st.integers(1, 20), st.floats(0.01, 1))
def test_selected_matrices_are_never_none(seed: int, groups: int, rate: float) -> None:
    chosen = select_matrices(np.random.default_rng(seed), (2, groups), rate)
    assert chosen.shape == (2, groups) and chosen.dtype == np.bool_ and chosen.any()
    assert select_matrices(np.random.default_rng(seed), (2, groups), 1.0).all()


@few
@given(seeds, sizes, rates)
def test_replacing_experts_keeps_size_and_distinctness(seed: int, size: tuple[int, int], rate: float) -> None:
    experts, retained = size
    kept = kept_experts(seed, experts, retained)
    child = replace_experts(np.random.default_rng(seed), kept, experts, rate)
    assert is_sorted_subset(child, experts, retained)
    if retained == experts:
        assert np.array_equal(child, kept)
    assert np.array_equal(replace_experts(np.random.default_rng(seed), kept, experts, 0.0), kept)


@few
@given(seeds, seeds, sizes)
def test_subset_crossover_takes_experts_of_the_parents_only(one: int, two: int, size: tuple[int, int]) -> None:
    first, second = kept_experts(one, *size), kept_experts(two, *size)
    child = subset_crossover(np.random.default_rng(one), first, second)
    assert is_sorted_subset(child, *size)
    assert np.isin(child, np.union1d(first, second)).all()
    assert np.isin(np.intersect1d(first, second), child).all()


@few
@given(seeds, sizes)
def test_subset_crossover_of_equal_parents_is_the_parent(seed: int, size: tuple[int, int]) -> None:
    kept = kept_experts(seed, *size)
    assert np.array_equal(subset_crossover(np.random.default_rng(seed), kept, kept), kept)


@few
@given(seeds, sizes, rates)
def test_matrix_crossover_takes_its_units_from_either_parent(seed: int, size: tuple[int, int], front: float) -> None:
    experts, retained = size
    first, second = matrices(seed, retained, experts), matrices(seed + 1, retained, experts)
    ends = {1.0: first, 0.0: second}
    for units, axes in AXES.items():
        child = matrix_crossover(np.random.default_rng(seed), first, second, front, units)
        assert child.dtype == np.float32
        assert ((child == first).all(axis=axes) | (child == second).all(axis=axes)).all()
        for rate, expected in ends.items():
            end = matrix_crossover(np.random.default_rng(seed), first, second, rate, units)
            assert np.array_equal(end, expected) and not np.shares_memory(end, expected)


@pytest.mark.parametrize("units", ["whole", "rows", "entries"])
def test_matrix_crossover_has_the_front_rate_and_mixes_units_apart(units: Units) -> None:
    first, second = np.zeros((4, 8), np.float32), np.ones((4, 8), np.float32)
    children = np.stack([matrix_crossover(np.random.default_rng(i), first, second, 0.6, units) for i in range(2000)])
    count = {"whole": 1, "rows": 4, "entries": 32}[units]
    assert abs(children.mean() - 0.4) < 4 * np.sqrt(0.24 / (2000 * count))
    one_parent = (children == children[:, :1, :1]).all(axis=(1, 2)).mean()
    expected = 0.6**count + 0.4**count
    assert abs(one_parent - expected) <= 4 * np.sqrt(expected * (1 - expected) / 2000)


@few
@given(seeds, sizes, rates)
def test_noise_changes_only_what_it_hits(seed: int, size: tuple[int, int], rate: float) -> None:
    experts, retained = size
    given_matrix = matrices(seed, retained, experts)
    child = gaussian_noise(np.random.default_rng(seed), given_matrix, rate, 0.1)
    assert child.dtype == np.float32 and child.shape == given_matrix.shape
    assert np.abs(child - given_matrix).max() < 1
    assert np.array_equal(gaussian_noise(np.random.default_rng(seed), given_matrix, 0.0, 0.1), given_matrix)
    assert (gaussian_noise(np.random.default_rng(seed), given_matrix, 1.0, 0.1) != given_matrix).all()


def test_noise_has_the_rate_and_the_deviation_asked_for() -> None:
    noise = gaussian_noise(np.random.default_rng(1), np.zeros((200, 200), np.float32), 0.25, 0.065)
    hit = noise[noise != 0]
    assert abs(hit.size / noise.size - 0.25) < 0.01
    assert abs(hit.std() - 0.065) < 0.002
    assert abs(hit.mean()) < 0.002


@few
@given(seeds, sizes)
def test_normalised_rows_sum_to_1_or_stay(seed: int, size: tuple[int, int]) -> None:
    experts, retained = size
    given_matrix = matrices(seed, retained, experts)
    given_matrix[0] = 0.0
    child = normalise_rows(given_matrix)
    sums = given_matrix.sum(axis=1)
    assert child.dtype == np.float32 and np.isfinite(child).all()
    large = np.abs(sums) >= 1e-3
    assert np.array_equal(child[~large], given_matrix[~large])
    # Dividing by a small sum magnifies the rounding of its terms.
    assert (np.abs(child[large].sum(axis=1) - 1) <= 1e-6 * np.abs(child[large]).sum(axis=1) + 1e-6).all()


OPERATORS: dict[str, Callable[[np.random.Generator, Any], Any]] = {
    "random_subset": lambda rng, _: random_subset(rng, 3, 8, 4),
    "select_groups": lambda rng, _: select_groups(rng, 12, 0.3),
    "select_matrices": lambda rng, _: select_matrices(rng, (2, 4), 0.3),
    "replace_experts": lambda rng, data: replace_experts(rng, data["kept"][0], 8, 0.5),
    "subset_crossover": lambda rng, data: subset_crossover(rng, *data["kept"]),
    "matrix_crossover": lambda rng, data: matrix_crossover(rng, *data["matrices"], 0.6, "rows"),
    "gaussian_noise": lambda rng, data: gaussian_noise(rng, data["matrices"][0], 0.5, 0.1),
    "normalise_rows": lambda rng, data: normalise_rows(data["matrices"][0]),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_are_functions_of_their_arguments_and_leave_them_alone(name: str) -> None:
    data = {
        "kept": (kept_experts(1, 8, 4), kept_experts(2, 8, 4)),
        "matrices": (matrices(1, 4, 8), matrices(2, 4, 8)),
    }
    before = {key: [array.copy() for array in arrays] for key, arrays in data.items()}
    for arrays in data.values():
        for array in arrays:
            array.flags.writeable = False
    np.random.seed(0)  # noqa: NPY002 - the global generator must not matter
    once = OPERATORS[name](np.random.default_rng(5), data)
    np.random.seed(1)  # noqa: NPY002
    again = OPERATORS[name](np.random.default_rng(5), data)
    assert np.array_equal(once, again)
    assert all(np.array_equal(*pair) for key in data for pair in zip(data[key], before[key], strict=True))


@pytest.mark.parametrize("rate", [0.0, 0.3, 1.0])
def test_balanced_swaps_move_as_many_as_the_rate_says(rate: float) -> None:
    """If every member is a part of its own, the drawn members are permuted, with one fixed point on average."""
    members, draws = 200, 50
    labels = np.arange(members)
    children = [balanced_swaps(np.random.default_rng(seed), labels, rate) for seed in range(draws)]
    assert all(sorted(child) == labels.tolist() for child in children)
    moved = np.mean([child != labels for child in children])
    expected = rate - (rate > 0) / members  # a permutation has one fixed point on average
    assert abs(moved - expected) <= 4 * np.sqrt(rate * (1 - rate) / (members * draws)) + 4 / (members * np.sqrt(draws))
