"""Genomes of kind `capacity`: widths by a share, importance by exponents, active experts, and their operators."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from search_samples import CAPACITY, PRUNE, capacity_space, deepseek, many, mixtral

from moevolve.evaluators.errors import UserError
from moevolve.search.genomes.capacity.budget import even_width
from moevolve.search.genomes.capacity.kind import ENERGY_EXPONENTS, equal, fewest, middle
from moevolve.search.genomes.capacity.space import SUMS, CapacitySection, CapacitySpace, expert_importance
from moevolve.search.genomes.contract.phases import RepairPhase
from moevolve.search.genomes.registry import make_space
from moevolve.workers.contract.edits import Calibration
from moevolve.workers.methods.repair.edit import RepairSettings

LAYERS, EXPERTS = 5, 8


def space_of(
    retained: int | None = 2,
    width: int = 128,
    layers: int = LAYERS,
    experts: int = EXPERTS,
    share: float | None = None,
    active: float | None = None,
) -> CapacitySpace:
    facts = replace(mixtral(layers, experts), expert_neurons=width)
    return capacity_space(retained, facts=facts, neuron_share=share, mean_active=active)


@many
@given(
    share=st.floats(0.03, 1),
    model=st.sampled_from(
        [
            (48, 128, 768),  # Qwen3-30B
            (16, 64, 1024),  # OLMoE
            (32, 8, 14336),  # Mixtral
            (24, 60, 1408),  # Qwen1.5-MoE
            (4, 32, 48),  # the demo's text model
        ]
    ),
)
def test_equal_layers_keep_nearly_all_that_was_asked_for_and_never_more(
    share: float, model: tuple[int, int, int]
) -> None:
    layers, experts, width = model
    space = space_of(None, width, layers, experts, share=share)
    kept = [each.kept_share for each in map(space.keeping, space.counts)]
    assert 0.95 * max(kept) <= min(kept) and max(kept) <= share + 1e-9
    # A width loses less than one step, of which a wide enough one has at least 32, and a narrow one has 8 neurons.
    widest = share * experts * width / space.fewest
    assert max(kept) > share * (1 - max(1 / 32, 8 / widest)) - 1e-9
    assert max(kept) > 0.95 * share or width == 48


@pytest.mark.parametrize(
    ("share", "found"),
    [
        (0.25, {16: 24, 8: 48}),  # 32 experts could only have 8 neurons each, a sixth
        (1 / 3, {32: 16, 16: 32}),
        (0.5, {32: 24, 16: 48}),
        (0.01, {1: 8}),
    ],
)
def test_numbers_of_experts_that_divide_too_little_of_a_share_evenly_are_left_out(
    share: float, found: dict[int, int]
) -> None:
    space = space_of(None, 48, 4, 32, share=share)
    assert {count: space.keeping(count).width for count in space.counts} == found


def test_networks_keep_whole_steps_of_a_share() -> None:
    assert [even_width(share, 1024) for share in (0.5, 0.4, 0.007, 1)] == [512, 408, 0, 1024]
    assert even_width(0.33, 11008) == 3584 and even_width(0.5, 100) == 48


@many
@given(data=st.data(), layers=st.integers(1, 40), experts=st.integers(1, 64))
def test_active_experts_add_up_and_follow_activity(data: st.DataObject, layers: int, experts: int) -> None:
    retained = data.draw(st.integers(1, experts))
    mean = data.draw(st.floats(1, retained))
    budget = space_of(retained, layers=layers, experts=experts, active=mean).actives
    assert -1e-6 <= layers * mean - budget.total < 1 + 1e-6 and budget.most <= min(retained, max(2, mean + 1))
    activity = np.array(data.draw(st.lists(st.floats(-20, 20), min_size=layers, max_size=layers)))
    numbers = budget.sizes(activity)
    assert sum(numbers) == budget.total and all(1 <= each <= budget.most for each in numbers)
    order = np.argsort(activity, kind="stable")
    assert (np.diff(np.array(numbers)[order]) >= -1).all(), "more activity has no fewer experts, but for rounding"
    assert set(budget.sizes(np.zeros(layers))) <= {int(mean), int(mean) + 1}


def test_parameters_of_a_token_are_those_of_the_layers_active_experts() -> None:
    four = replace(mixtral(LAYERS, EXPERTS), expert_neurons=128, active=4)
    space = capacity_space(4, facts=four, mean_active=2)
    size = space.facts.expert_parameters
    genome = space.unflatten(np.array([*np.log([1, 4, 1, 1, 3]), *ENERGY_EXPONENTS]), CAPACITY)
    assert genome.active == (1, 4, 1, 1, 3) and genome.width == 128
    idle = sum((4 - k) * size for k in genome.active)
    found = space.describe(genome)
    assert found.active == 2 and found.parameters - found.active_parameters == idle
    assert found.parameters == space.parameters()[0]
    assert "keep 4 of 8, active 1 4 1 1 3" in found.summary
    assert genome.express().active == (1, 4, 1, 1, 3)
    assert not found.stock and space_of(4).describe(equal(space_of(4))).stock, "layers differ, or not"
    same, usual = equal(space), equal(space_of(4))
    assert same.express().phenotype_hash == usual.express().phenotype_hash, "the model has two active experts"
    assert space.describe(same).active_parameters == space_of(4).describe(usual).active_parameters


@pytest.mark.parametrize(
    ("share", "width", "counts"),
    [
        (0.125, 128, (8, 4, 2, 1)),
        (0.3, 128, (4,)),  # two of eight have a quarter, and all eight 83 % of the share
        (1.0, 128, (8,)),
        (0.01, 1024, (2, 1)),  # less than one whole expert, and steps of 8 neurons
        (0.1, 24, (2, 1)),  # widths are multiples of 8: a tenth of 192 neurons is 2 x 8
    ],
)
def test_searched_numbers_of_experts_are_halves_that_hold_the_share(
    share: float, width: int, counts: tuple[int, ...]
) -> None:
    space = space_of(None, width, share=share)
    assert space.counts == counts and (space.retained, space.fewest) == (counts[0], counts[-1])
    assert equal(space).retained == counts[0] and fewest(space).retained == counts[-1]
    assert middle(space).retained == counts[(len(counts) - 1) // 2]
    neurons = share * EXPERTS * width * LAYERS
    for count in counts:
        kept = count * LAYERS * space.keeping(count).width
        assert neurons - 8 * count * LAYERS < kept <= neurons + 1e-6, "all have the share, but for one step"


def test_routing_groups_and_active_experts_limit_searched_numbers() -> None:
    facts = replace(deepseek(3, 16, 4, 2), expert_neurons=128)
    section = CapacitySection(neuron_share=0.125)
    assert CapacitySpace.of(section, facts).counts == (16, 8), "each of four groups is ranked by its two best experts"
    four = CapacitySection(neuron_share=0.125, active=4)
    assert CapacitySpace.of(four, replace(mixtral(5, 8), expert_neurons=128)).counts == (8, 4)


def test_a_search_of_the_number_of_experts_meets_all_of_them() -> None:
    space = space_of(None, share=0.125)
    drawn = Counter(space.sample(np.random.default_rng(seed), CAPACITY).genome.retained for seed in range(200))
    assert all(drawn[count] == pytest.approx(50, abs=25) for count in (8, 4, 2, 1))
    genome, met = equal(space), set()
    for seed in range(40):
        genome = space.breed(np.random.default_rng(seed), CAPACITY, (genome,)).genome
        met.add(genome.retained)
        assert genome.express().active == min(2, genome.retained)
    assert met == {8, 4, 2, 1}


def test_settings_that_cannot_be_met_are_refused() -> None:
    narrow = replace(mixtral(5, 8), expert_neurons=128)
    share = CapacitySection(experts=2, neuron_share=0.125)
    filling = RepairPhase(evaluations=4, repair=RepairSettings(neurons=True))
    make_space(share, mixtral(5, 8), (CAPACITY, filling))
    mends = (CAPACITY, RepairPhase(evaluations=4))
    refused: list[tuple[str, Callable[[], Any]]] = [
        (r"phases\.0\.kind: a prune phase doesn't suit", lambda: make_space(share, mixtral(5, 8), (PRUNE,))),
        (r"genome\.neuron_share: 0\.01 of the", lambda: capacity_space(4, facts=narrow, neuron_share=0.01)),
        (r"genome\.neuron_share: 0\.01 of the neurons can't be divided", lambda: space_of(None, 24, share=0.01)),
        (r"phases\.1\.repair\.neurons: kept experts", lambda: make_space(share, mixtral(5, 8), mends)),
        ("mean_active 2.5 is more than the 2", lambda: CapacitySection(experts=2, mean_active=2.5)),
        ("active, mean_active: give active", lambda: CapacitySection(experts=4, mean_active=2, active=2)),
        ("mean_active: dynamic_skipping", lambda: CapacitySection(experts=4, mean_active=2, dynamic_skipping=True)),
    ]
    for message, make in refused:
        with pytest.raises((UserError, ValidationError), match=message):
            make()


@pytest.mark.parametrize("exponents", [(0, 0, 0), (1, 1, 1), (1, 2, 0.5)])
def test_importance_at_measured_exponents_is_the_sum_over_tokens(exponents: tuple[float, ...]) -> None:
    rng, (a, b, c) = np.random.default_rng(3), exponents
    chosen, weights, norms = rng.integers(EXPERTS - 1, size=200), rng.uniform(0.1, 1, 200), rng.uniform(0.5, 5, 200)
    sums, expected = np.zeros((1, EXPERTS, 3, 3)), np.zeros(EXPERTS)
    for expert in range(EXPERTS - 1):  # nobody chooses the last one
        own = chosen == expert
        for first, second in product(range(3), repeat=2):
            sums[0, expert, first, second] = (weights[own] ** first * norms[own] ** second).sum()
        expected[expert] = (weights[own] ** a * norms[own] ** b).sum() / own.sum() ** c
    np.testing.assert_allclose(expert_importance(sums, np.array(exponents))[0], expected, rtol=1e-6)


def test_importance_between_measured_exponents_is_exact_for_equal_tokens() -> None:
    sums = np.array([[[[7 * 0.3**a * 4.0**b for b in range(3)] for a in range(3)]]])
    found = expert_importance(sums, np.array([1.25, 0.75, 0.5]))
    np.testing.assert_allclose(found, 7**0.5 * 0.3**1.25 * 4.0**0.75, rtol=1e-6)


def test_the_most_important_experts_are_kept() -> None:
    space = space_of(3)
    genome = space.unflatten(np.array([2.0, 2, 0]), CAPACITY)
    energy = space.statistics[SUMS][0, :, :, 2, 2].astype(np.float64)
    kept = np.sort(np.argsort(-energy, axis=1)[:, :3], axis=1)
    edit = genome.express()
    assert np.array_equal(np.sort(edit.expert_merging.argmax(axis=2), axis=1), kept)
    assert np.array_equal(edit.router_mapping, edit.expert_merging)
    assert edit.widths is None and genome.width == 128, "widths of original experts are no edit"
    assert (
        genome.express().phenotype_hash == equal(space).express().phenotype_hash
        and tuple(genome.exponents) == ENERGY_EXPONENTS
    )


def test_weights_of_tasks_decide_which_experts_are_kept() -> None:
    # Tokens of one task choose the first half of the experts, those of the other the second half.
    sums = np.full((2, LAYERS, EXPERTS, 3, 3), 1e-3, dtype=np.float32)
    sums[0, :, : EXPERTS // 2] = np.arange(2, 2 + EXPERTS // 2)[:, None, None]
    sums[1, :, EXPERTS // 2 :] = np.arange(2, 2 + EXPERTS // 2)[:, None, None]
    space = space_of(2).calibrated(Calibration({SUMS: sums}))

    def kept(*tasks: float) -> list[int]:
        genome = space.unflatten(np.array([*tasks, 1, 1, 0]), CAPACITY)
        return sorted(genome.express().expert_merging[0].argmax(axis=1).tolist())

    assert kept(1, -1) == [2, 3] and kept(-1, 1) == [6, 7] and kept(0, 0) == [3, 7]
    genome = space.unflatten(np.array([0.5, -0.5, 1, 1, 0]), CAPACITY)
    np.testing.assert_allclose(genome.task_weights, np.exp([1.5, -1.5]))
    assert space.from_bytes(genome.to_bytes()) == genome
    with pytest.raises(ValueError, match="tasks has shape"):
        space_of(2).from_bytes(genome.to_bytes())  # which has one task


def test_random_candidates_differ_in_importance_alone() -> None:
    space = space_of(3)
    genomes = [space.sample(np.random.default_rng(seed), CAPACITY).genome for seed in range(8)]
    assert {genome.width for genome in genomes} == {128}
    assert {genome.express().widths for genome in genomes} == {None}
    assert len({genome.express().phenotype_hash for genome in genomes}) > 4
    assert all(len(space.flatten(genome, CAPACITY)) == 3 for genome in genomes), "the three exponents"
    assert space.from_bytes(genomes[0].to_bytes()) == genomes[0]


def test_a_child_mixes_its_parents_and_changes_something() -> None:
    space = space_of(active=1.5)
    first = space.unflatten(np.array([*np.full(LAYERS, -1.0), 0, 0, 0]), CAPACITY)
    second = space.unflatten(np.array([*np.full(LAYERS, 1.0), 2, 2, 1]), CAPACITY)
    still = CAPACITY.model_copy(update={"sigma": 1e-9, "entry_rate": 0.0})
    child = space.breed(np.random.default_rng(0), still, (first, second)).genome
    either = np.stack([space.flatten(each, CAPACITY) for each in (first, second)])
    assert (np.abs(space.flatten(child, CAPACITY) - either).min(axis=0) < 1e-6).all()
    moved = space.breed(np.random.default_rng(0), CAPACITY, (first,)).genome
    assert moved != first


def test_numbers_are_changed_as_often_and_as_far_as_settings_say() -> None:
    space, changed, steps = space_of(active=1.5), Counter[int](), []
    start = space.unflatten(np.array([*np.zeros(LAYERS), 1, 1, 0.5]), CAPACITY)
    for seed in range(1500):
        child = space.breed(np.random.default_rng(seed), CAPACITY, (start,)).genome
        difference = space.flatten(child, CAPACITY) - space.flatten(start, CAPACITY)
        changed.update(np.flatnonzero(difference).tolist())
        steps.extend(difference[:LAYERS][difference[:LAYERS] != 0].tolist())
    # If none of the eight numbers is drawn, one is.
    rate = 0.4 + 0.6**8 / 8
    assert all(changed[number] / 1500 == pytest.approx(rate, abs=0.05) for number in range(LAYERS + 3))
    assert np.mean(steps) == pytest.approx(0, abs=0.02) and np.std(steps) == pytest.approx(0.3, abs=0.03)
