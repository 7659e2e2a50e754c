"""Candidates whose experts have a share of the neurons: their widths, how many may share them, and their operators."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from search_samples import MERGE, PRUNE, deepseek, eep_space, many, mixtral

from moevolve.evaluators.errors import UserError
from moevolve.search.genomes.contract.phases import RepairPhase
from moevolve.search.genomes.eep.baselines import BASELINES
from moevolve.search.genomes.eep.section import EepSection
from moevolve.search.genomes.eep.space import EepSpace
from moevolve.search.genomes.eep.subsets import even_width
from moevolve.search.genomes.registry import make_space
from moevolve.workers.contract.edits import Calibration
from moevolve.workers.methods.repair.edit import RepairSettings

LAYERS, EXPERTS = 5, 8
FILLING = RepairSettings(neurons=True)


def space_of(share: float, width: int = 128, layers: int = LAYERS, experts: int = EXPERTS) -> EepSpace:
    facts = replace(mixtral(layers, experts), expert_neurons=width)
    sums = np.random.default_rng(0).uniform(0.1, 9, (layers, experts, 3, 3))
    space = eep_space(None, "per_layer", facts=facts, neuron_share=share)
    return space.calibrated(Calibration({"importance_sums": sums}))


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
def test_all_numbers_keep_nearly_all_that_was_asked_for_and_never_more(
    share: float, model: tuple[int, int, int]
) -> None:
    layers, experts, width = model
    space = space_of(share, width, layers, experts)
    kept = [each.kept_share for each in map(space.keeping, space.counts)]
    assert 0.95 * max(kept) <= min(kept) and max(kept) <= share + 1e-9
    # A width loses less than one step: 1/32 or less of a wide expert, 8 neurons of a narrow one.
    widest = share * experts * width / space.counts[-1]
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
    space = space_of(share, 48, 4, 32)
    assert {count: space.keeping(count).width for count in space.counts} == found


def test_networks_keep_whole_steps_of_a_share() -> None:
    assert [even_width(share, 1024) for share in (0.5, 0.4, 0.007, 1)] == [512, 408, 0, 1024]
    assert even_width(0.33, 11008) == 3584 and even_width(0.5, 100) == 48


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
def test_numbers_of_experts_are_halves_that_hold_the_share_and_have_one_shot_choices(
    share: float, width: int, counts: tuple[int, ...]
) -> None:
    space = space_of(share, width)
    assert space.counts == counts
    energy = space.statistics["importance_sums"][:, :, 2, 2]
    middle = counts[(len(counts) - 1) // 2]
    for name, count in {"most": counts[0], "middle": middle, "fewest": counts[-1], "energy": counts[0]}.items():
        genome = BASELINES[name].make(space).genome
        edit, described = genome.express(), space.describe(genome)
        assert edit.phenotype_hash == "full" or (edit.retained, edit.active) == (count, min(2, count))
        own, facts = space.keeping(count), space.facts
        assert edit.phenotype_hash == "full" or edit.width == (None if own.width == width else own.width)
        kept = np.sort(np.argsort(-energy, axis=1)[:, :count], axis=1)
        assert np.array_equal(np.sort(space.kept(genome), axis=1), kept)
        idle = (count - described.active) * LAYERS
        lost = (facts.expert_neurons - own.width) * facts.neuron_parameters
        assert described.parameters - described.active_parameters == idle * (facts.expert_parameters - lost)
        assert described.experts == count and described.stock
        linked = replace(space, facts=replace(facts, width_linked=True))
        assert linked.describe(genome).stock == (own.width == width), "other parts would be narrower, too"
        assert (f"width {own.width}" in described.summary) == (own.width != width)
        assert space.from_bytes(genome.to_bytes()) == genome


def test_routing_groups_and_active_experts_limit_the_numbers() -> None:
    facts = replace(deepseek(3, 16, 4, 2), expert_neurons=128)
    assert EepSpace.of(EepSection(neuron_share=0.125, groups=1), facts).counts == (16, 8), "two experts rank a group"
    four = EepSection(neuron_share=0.125, active=4)
    assert EepSpace.of(four, replace(mixtral(5, 8), expert_neurons=128)).counts == (8, 4)


def test_children_keep_as_many_experts_as_their_first_parent() -> None:
    space = space_of(0.125)
    genomes = [space.sample(np.random.default_rng(seed), PRUNE).genome for seed in range(200)]
    drawn = Counter(genome.retained for genome in genomes)
    assert all(drawn[count] == pytest.approx(50, abs=25) for count in (8, 4, 2, 1))
    for seed, parents in enumerate(pairwise(genomes[:40])):
        child = space.breed(np.random.default_rng(seed), PRUNE, parents).genome
        assert child.retained == parents[0].retained and child.express().active == min(2, child.retained)
    assert not space.selects_subset(PRUNE) and not space.flatten(genomes[0], PRUNE).size
    with pytest.raises(ValueError, match="can't keep 3 experts"):
        space.from_kept(np.tile(np.arange(3), (LAYERS, 1)))


def test_settings_that_cannot_be_met_are_refused() -> None:
    share, narrow = EepSection(experts=2, neuron_share=0.125), replace(mixtral(5, 8), expert_neurons=128)
    filling = RepairPhase(evaluations=4, repair=FILLING)
    prune, merge = (phase.model_copy(update={"repair": FILLING}) for phase in (PRUNE, MERGE))
    make_space(share, mixtral(5, 8), (prune, filling))
    mends = (prune, RepairPhase(evaluations=4))
    refused: list[tuple[str, Callable[[], Any]]] = [
        ("experts: give the number", EepSection),
        (r"genome\.neuron_share: 0\.01 of the", lambda: eep_space(4, facts=narrow, neuron_share=0.01)),
        (r"genome\.neuron_share: 0\.01 of the neurons can't be divided", lambda: space_of(0.01, 24)),
        (r"phases\.0\.repair\.neurons: kept experts", lambda: make_space(share, mixtral(5, 8), (PRUNE,))),
        (r"phases\.1\.repair\.neurons: kept experts", lambda: make_space(share, mixtral(5, 8), mends)),
        (r"phases\.1\.kind: a merge phase merges whole", lambda: make_space(share, mixtral(5, 8), (prune, merge))),
    ]
    for message, make in refused:
        with pytest.raises((UserError, ValidationError), match=message):
            make()
