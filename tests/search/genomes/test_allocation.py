"""Genomes of an `allocate` phase: widths under one total, importance by exponents, and their operators."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from search_samples import ALLOCATE, eep_space, few, many, mixtral

from moevolve.search.genomes.eep.allocation import (
    REAP_EXPONENTS,
    AllocationGenome,
    breed_allocation,
    even_genome,
    expert_importance,
    from_vector,
    layer_widths,
    line_genome,
    to_vector,
    width_bounds,
    width_step,
)
from moevolve.search.genomes.eep.space import EepSpace
from moevolve.workers.contract.edits import Calibration

LAYERS, EXPERTS = 5, 8


def space_of(
    retained: int = 2, width: int = 128, layers: int = LAYERS, experts: int = EXPERTS, seed: int = 0
) -> EepSpace:
    facts = replace(mixtral(layers, experts), expert_neurons=width)
    sums = np.random.default_rng(seed).uniform(0.1, 9, (layers, experts, 3, 3)).astype(np.float32)
    return eep_space(retained, layers, facts=facts).calibrated(Calibration({"importance_sums": sums}))


@many
@given(
    data=st.data(),
    layers=st.integers(1, 40),
    experts=st.integers(1, 64),
    width=st.integers(1, 300) | st.sampled_from([768, 1408, 14336]),
)
def test_widths_add_up_and_follow_capacities(data: st.DataObject, layers: int, experts: int, width: int) -> None:
    retained = data.draw(st.integers(1, experts))
    space = space_of(retained, width, layers, experts)
    capacities = np.array(data.draw(st.lists(st.floats(-20, 20), min_size=layers, max_size=layers)))
    widths, step, (least, most) = layer_widths(space, capacities), width_step(width), width_bounds(space)
    assert sum(widths) == layers * width and all(each % step == 0 for each in widths)
    assert all(least <= each <= most and retained * each <= experts * width for each in widths)
    order = np.argsort(capacities, kind="stable")
    assert (np.diff(np.array(widths)[order]) >= -step).all(), "a larger capacity has no smaller width, but for rounding"
    assert layer_widths(space, capacities + 0.5) == widths or np.abs(capacities).max() > 9


def test_equal_capacities_are_equal_widths_and_a_line_rises() -> None:
    assert even_genome(space_of()).widths == (128,) * LAYERS
    assert line_genome(space_of()).widths == (64, 96, 128, 160, 192)
    assert line_genome(space_of(4, 14336, layers=3)).widths == (7168, 14336, 21504)
    assert line_genome(space_of(8, 14336, layers=3)).widths == (14336,) * 3, "there are no more neurons than that"


@pytest.mark.parametrize(("width", "step"), [(14336, 64), (1408, 64), (128, 16), (48, 8), (100, 4), (7, 1)])
def test_widths_change_in_powers_of_two(width: int, step: int) -> None:
    assert width_step(width) == step


def tokens_of(experts: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Chosen expert, routing weight and output norm of 200 tokens; nobody chooses the last expert."""
    rng = np.random.default_rng(seed)
    return rng.integers(experts - 1, size=200), rng.uniform(0.1, 1, 200), rng.uniform(0.5, 5, 200)


@pytest.mark.parametrize("exponents", [(0, 0, 0), (1, 1, 1), (2, 1, 0), (1, 2, 0.5)])
def test_importance_at_measured_exponents_is_the_sum_over_tokens(exponents: tuple[float, ...]) -> None:
    chosen, weights, norms = tokens_of(EXPERTS, 3)
    sums, expected = np.zeros((1, EXPERTS, 3, 3)), np.zeros(EXPERTS)
    a, b, c = exponents
    for expert in range(EXPERTS - 1):
        own = chosen == expert
        for first in range(3):
            for second in range(3):
                sums[0, expert, first, second] = (weights[own] ** first * norms[own] ** second).sum()
        expected[expert] = (weights[own] ** a * norms[own] ** b).sum() / own.sum() ** c
    np.testing.assert_allclose(expert_importance(sums, np.array(exponents))[0], expected, rtol=1e-6)


def test_importance_between_measured_exponents_is_exact_for_equal_tokens() -> None:
    weight, norm, tokens = 0.3, 4.0, 7
    sums = np.array([[[[tokens * weight**a * norm**b for b in range(3)] for a in range(3)]]])
    for a, b, c in ((0.5, 1.5, 0.0), (1.25, 0.75, 1.0), (2.0, 2.0, 0.5)):
        found = expert_importance(sums, np.array([a, b, c]))
        np.testing.assert_allclose(found, tokens ** (1 - c) * weight**a * norm**b, rtol=1e-6)


def test_the_most_important_experts_are_kept() -> None:
    space = space_of(3)
    genome = from_vector(space, np.array([*np.zeros(LAYERS), 1, 1, 1]))
    sums = space.statistics["importance_sums"].astype(np.float64)
    reap = sums[:, :, 1, 1] / sums[:, :, 0, 0]
    kept = np.sort(np.argsort(-reap, axis=1)[:, :3], axis=1)
    edit = genome.express()
    assert np.array_equal(np.sort(edit.expert_merging.argmax(axis=2), axis=1), kept)
    assert np.array_equal(edit.router_mapping, edit.expert_merging) and edit.widths == (128,) * LAYERS
    assert genome.content_hash == even_genome(space).content_hash and tuple(genome.exponents) == REAP_EXPONENTS


@few
@given(seed=st.integers(0, 2**32 - 1))
def test_a_child_mixes_its_parents_and_changes_something(seed: int) -> None:
    space = space_of()
    first = from_vector(space, np.array([*np.full(LAYERS, -1.0), 0, 0, 0]))
    second = from_vector(space, np.array([*np.full(LAYERS, 1.0), 2, 2, 1]))
    still = ALLOCATE.model_copy(update={"sigma": 1e-9, "entry_rate": 0.0})
    child = to_vector(breed_allocation(np.random.default_rng(seed), still, (first, second)).genome)
    either = np.stack([to_vector(first), to_vector(second)])
    assert (np.abs(child - either).min(axis=0) < 1e-6).all()
    moved = breed_allocation(np.random.default_rng(seed), ALLOCATE, (first,)).genome
    assert not np.array_equal(to_vector(moved), to_vector(first)) or (first.exponents == 0).any()


def test_numbers_are_changed_as_often_and_as_far_as_settings_say() -> None:
    space, changed, steps = space_of(), Counter[int](), []
    start = from_vector(space, np.array([*np.zeros(LAYERS), 1, 1, 0.5]))
    for seed in range(3000):
        child = breed_allocation(np.random.default_rng(seed), ALLOCATE, (start,)).genome
        difference = to_vector(child) - to_vector(start)
        changed.update(np.flatnonzero(difference).tolist())
        steps.extend(difference[:LAYERS][difference[:LAYERS] != 0].tolist())
    # If none of the eight numbers is drawn, one is.
    rate = 0.4 + 0.6**8 / 8
    assert all(changed[number] / 3000 == pytest.approx(rate, abs=0.03) for number in range(LAYERS + 3))
    assert np.mean(steps) == pytest.approx(0, abs=0.02) and np.std(steps) == pytest.approx(0.3, abs=0.02)


def test_candidates_of_earlier_phases_begin_evenly() -> None:
    space = space_of()
    pruned = space.from_kept(np.tile([0, 1], (LAYERS, 1)))
    assert np.array_equal(space.flatten(pruned, ALLOCATE), [*np.zeros(LAYERS), 1, 1, 1])
    child = space.breed(np.random.default_rng(0), ALLOCATE, (pruned,))
    assert isinstance(child.genome, AllocationGenome) and child.operator == "mutation"


def test_foreign_bytes_are_refused() -> None:
    data = even_genome(space_of()).to_bytes()
    assert space_of().from_bytes(data) == even_genome(space_of())
    for wrong in (data[:-4], data + b"\0", b"EEPA" + b"\xff" * (len(data) - 4)):
        with pytest.raises(ValueError, match="no EEP genome"):
            space_of().from_bytes(wrong)
