"""FactorLLM genomes beyond the contract: equal experts, start, router coordinates, the paper's costs, baselines."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from factorllm_samples import factorllm_space, with_baselines
from numpy.typing import NDArray
from outline_samples import outline_of
from pydantic import ValidationError
from search_samples import TUNE, dense_model, mixtral

from moevolve.evaluators.errors import UserError
from moevolve.search.genomes.contract.phases import TunePhase
from moevolve.search.genomes.factorllm.kind import BASELINES
from moevolve.search.genomes.factorllm.space import ROUTERS, FactorLlmGenome, FactorLlmSection, FactorLlmSpace
from moevolve.search.genomes.registry import check_baselines, costs_of, make_space
from moevolve.workers.contract.edits import CombinedMeasurement
from moevolve.workers.methods.factorllm.edit import (
    CmoeMeasurement,
    FactorLlmEdit,
    FactorLlmMeasurement,
    MoeficationMeasurement,
)


def routed(edit: FactorLlmEdit, layer: int, x: NDArray[np.float32]) -> list[frozenset[int]]:
    """For each router, the neurons of an input's K experts."""
    size = edit.width // edit.experts
    logits = edit.router_weight[layer] @ x + edit.router_bias[layer]
    return [
        frozenset(int(n) for e in np.argsort(-row)[: edit.active] for n in edit.order[layer][e * size : (e + 1) * size])
        for row in logits
    ]


def test_the_start_is_the_calibration() -> None:
    space = factorllm_space(routers=3)
    offspring = space.start(TUNE)
    edit = offspring.genome.express()
    assert (offspring.operator, offspring.parents) == ("start", ())
    start = space.statistics
    for layer in range(4):
        for expert in range(4):
            neurons = np.flatnonzero(start["start_experts"][layer] == expert)
            (place,) = (i for i in range(4) if edit.order[layer][i * 6] == neurons[0])
            assert np.array_equal(edit.order[layer][place * 6 : place * 6 + 6], neurons)
            assert np.array_equal(edit.router_weight[layer, :, place], start["start_weight"][layer, :, expert])
            assert np.array_equal(edit.router_bias[layer, :, place], start["start_bias"][layer, :, expert])


def test_routers_are_what_the_module_says() -> None:
    space = factorllm_space(routers=3)
    rng = np.random.default_rng(0)
    phase = TUNE.model_copy(update={"group_rate": 1.0, "entry_rate": 1.0, "swap_rate": 0.2})
    genome = space.breed(rng, phase, (space.start(TUNE).genome, space.sample(rng, TUNE).genome)).genome
    edit, start = genome.express(), space.statistics
    x = rng.standard_normal(space.dense.hidden).astype(np.float32)
    for layer in range(4):
        anchor = start["start_weight"][layer] @ x + start["start_bias"][layer]
        steps = start["directions"][layer] @ x - start["offsets"][layer]
        logits = genome.base_router[layer] * anchor + genome.coordinates[layer] @ steps + genome.biases[layer]
        expected = [
            frozenset(np.flatnonzero(np.isin(genome.assignment[layer], np.argsort(-row)[:2])).tolist())
            for row in logits
        ]
        assert routed(edit, layer, x) == expected


def test_a_division_can_be_held_fixed() -> None:
    """Random routers with the start's partition, and children without swaps: a search of routers alone."""
    space = factorllm_space(random_division=False)
    start = space.start(TUNE).genome
    drawn = [space.sample(np.random.default_rng(seed), TUNE).genome for seed in range(2)]
    still = TUNE.model_copy(update={"swap_rate": 0.0, "group_rate": 1.0})
    child = space.breed(np.random.default_rng(0), still, (start, drawn[0])).genome
    assert all(np.array_equal(each.assignment, start.assignment) for each in (*drawn, child))
    assert not any(each.base_router.any() or each.biases.any() for each in drawn), "measured routers are ignored"
    anew = factorllm_space().sample(np.random.default_rng(0), TUNE).genome
    assert (anew.assignment != start.assignment).mean() > 0.5
    assert len({each.express().phenotype_hash for each in (start, *drawn, child)}) == 4


def test_layers_cross_over_whole_and_mutation_touches_those_selected() -> None:
    space, fields = factorllm_space(dense_model(layers=12)), ("assignment", "base_router", "coordinates", "biases")
    one, two = space.start(TUNE).genome, space.sample(np.random.default_rng(3), TUNE).genome
    still = TUNE.model_copy(update={"entry_rate": 0.0, "swap_rate": 0.0})
    child = space.breed(np.random.default_rng(0), still, (one, two)).genome
    sources = set()
    for layer in range(12):
        (source,) = (
            name
            for name, parent in (("one", one), ("two", two))
            if all(np.array_equal(getattr(child, field)[layer], getattr(parent, field)[layer]) for field in fields)
        )
        sources.add(source)
    assert sources == {"one", "two"}
    single = TUNE.model_copy(update={"group_rate": 0.01, "entry_rate": 1.0, "swap_rate": 1.0})
    mutant = space.breed(np.random.default_rng(0), single, (two,)).genome
    for name in ("assignment", "coordinates", "biases"):
        changed = getattr(mutant, name) != getattr(two, name)
        assert changed.reshape(12, -1).any(axis=1).sum() == 1


def test_without_router_biases_there_are_none() -> None:
    space = factorllm_space(router_bias=False)
    rng = np.random.default_rng(0)
    phase = TUNE.model_copy(update={"group_rate": 1.0, "entry_rate": 1.0})
    child = space.breed(rng, phase, (space.start(TUNE).genome, space.sample(rng, TUNE).genome)).genome
    point = space.unflatten(rng.standard_normal(space.flatten(child, TUNE).size), TUNE)
    for genome in (child, point):
        assert not genome.biases.any()
        assert not genome.express().router_bias.any()


def test_numbering_of_anchored_experts_matters() -> None:
    """Measured routers belong to particular experts, so other numbers make another candidate."""
    space = factorllm_space()
    genome = space.start(TUNE).genome
    other = FactorLlmGenome(space, (genome.assignment + 1) % 4, genome.base_router, genome.coordinates, genome.biases)
    assert other.express().phenotype_hash != genome.express().phenotype_hash


def test_small_steps_of_an_optimiser_move_few_neurons() -> None:
    space = factorllm_space(dense_model(width=1024))
    genome = space.start(TUNE).genome
    vector = space.flatten(genome, TUNE)
    step = np.random.default_rng(0).standard_normal(vector.size) * 0.1
    moved = (space.unflatten(vector + step, TUNE).assignment != genome.assignment).mean()
    assert 0 < moved < 0.05


@pytest.mark.parametrize("gated", [True, False])
def test_costs_are_the_papers(gated: bool) -> None:
    """Fig. 3: the networks' FLOPs fall to K / N, apart from routers; no parameters are removed."""
    facts = dense_model(gated=gated, bias=not gated)
    space = factorllm_space(facts)
    cost = space.describe(space.start(TUNE).genome)
    matrices = 3 if gated else 2
    router = 4 * (16 + 1)
    idle = matrices * 16 * 12 + (0 if gated else 12)
    assert cost.parameters == facts.parameters + 4 * router
    assert cost.active_parameters == cost.parameters - 4 * idle
    assert (cost.experts, cost.active, cost.parameters_full) == (4, 2, facts.parameters)
    share = 100 * (0.5 + 4 * 16 / (matrices * 16 * 24))
    assert cost.summary == f"1R4E2K, {share:.1f}% of the FFN FLOPs, closed-form routers in 4 of 4"


def test_tinyllamas_networks_cost_what_the_paper_says() -> None:
    """TinyLlama, 1R4E1K: about three quarters of the networks' FLOPs are saved (Sec. 4.3)."""
    tiny = dense_model(layers=2, hidden=2048, width=5632, heads=32)
    space = FactorLlmSpace.of(FactorLlmSection(kind="factorllm", experts=4, active=1), tiny)
    genome = space.unflatten(np.zeros(2 * (5632 + 1 + 4 * 8 + 4)), TUNE)
    assert space.describe(genome).summary.startswith("1R4E1K, 25.0% of the FFN FLOPs")
    three = FactorLlmSpace.of(FactorLlmSection(kind="factorllm", experts=4, active=2, routers=3), tiny)
    genome = three.unflatten(np.zeros(2 * (5632 + 1 + 12 * 8 + 12)), TUNE)
    assert three.describe(genome).summary.startswith("3R4E2K, 50.1% of the FFN FLOPs")


@pytest.mark.parametrize(
    ("settings", "facts", "message"),
    [
        ({"experts": 5}, dense_model(), r"genome\.experts: 24 neurons can't be divided among 5"),
        ({"routers": 2}, dense_model(), r"genome\.routers: 2 is neither 1 nor 3"),
        ({}, mixtral(), r"genome\.kind: factorllm needs dense"),
    ],
)
def test_settings_a_model_does_not_allow_are_named(settings: dict[str, Any], facts: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        factorllm_space(facts, **settings)


def test_unequal_or_too_many_active_experts_are_refused() -> None:
    with pytest.raises(ValidationError, match="active 5 is more than the 4 experts"):
        FactorLlmSection(kind="factorllm", experts=4, active=5)
    space = factorllm_space()
    genome = space.start(TUNE).genome
    experts = genome.assignment.copy()
    experts[0, experts[0] == 1] = 0
    with pytest.raises(ValueError, match="equally many neurons"):
        FactorLlmGenome(space, experts, genome.base_router, genome.coordinates, genome.biases)


@pytest.mark.parametrize("name", BASELINES)
def test_a_baseline_expresses_what_was_measured(name: str) -> None:
    space = with_baselines(routers=3, experts=8, active=3)
    offspring = BASELINES[name].make(space)
    edit, genome = offspring.genome.express(), offspring.genome
    assert (offspring.operator, offspring.parents) == (name, ())
    size = space.dense.width // space.experts
    for layer, experts in enumerate(space.statistics[f"{name}_experts"]):
        for place, neurons in enumerate(edit.order[layer].reshape(space.experts, size)):
            (expert,) = {int(experts[neuron]) for neuron in neurons}
            for router in range(space.routers):
                own = (layer, router, expert) if name == "kmeans" else (layer, expert)
                expected = space.statistics[f"{name}_weight"][own]
                np.testing.assert_array_equal(edit.router_weight[layer, router, place], expected)
                assert edit.router_bias[layer, router, place] == space.statistics[f"{name}_bias"][own]
    assert space.describe(genome).active_parameters == space.active_parameters
    assert space.from_bytes(genome.to_bytes()) == genome == space.unflatten(space.flatten(genome, TUNE), TUNE)
    assert genome.express().phenotype_hash != space.start(TUNE).genome.express().phenotype_hash


def test_children_of_baselines_and_of_the_start_have_routers_of_both() -> None:
    space, rng = with_baselines(), np.random.default_rng(0)
    parents = [space.start(TUNE).genome, *(each.make(space).genome for each in BASELINES.values())]
    children = [space.breed(rng, TUNE, (parents[0], parents[place])).genome for place in (1, 2, 3) for _ in range(4)]
    assert {router for child in children for router in child.base_router.tolist()} == {1, 2, 3, 4}
    assert all(child.express().finite for child in children)


def test_routers_that_were_not_measured_are_the_starts() -> None:
    space, rich = factorllm_space(), with_baselines()
    vector = rich.flatten(BASELINES["cmoe"].make(rich).genome, TUNE)
    assert (space.unflatten(vector, TUNE).base_router == 1).all()
    assert (rich.unflatten(np.full(vector.size, 1e6), TUNE).base_router == len(ROUTERS)).all()
    with pytest.raises(ValueError, match="none or one of start, kmeans, moefication, cmoe"):
        space.genome(
            assignment=space.statistics["start_experts"], base_router=np.full(space.dense.layers, len(ROUTERS) + 1)
        )


def test_only_what_is_needed_is_measured() -> None:
    def measurement(*init: str, **section: Any) -> Any:
        chosen = FactorLlmSection(kind="factorllm", **({"experts": 8, "active": 5} | section))
        return make_space(chosen, dense_model(), [TunePhase(evaluations=9, init=init)]).measurement

    assert isinstance(measurement("start", "random"), FactorLlmMeasurement)
    all_of_them = measurement("cmoe", "moefication", "kmeans", calibration_tokens=99)
    assert isinstance(all_of_them, CombinedMeasurement) and isinstance(all_of_them.parts[0], FactorLlmMeasurement)
    (added,) = all_of_them.parts[1:]
    kmeans = replace(all_of_them.parts[0], partition="kmeans")
    assert added.parts == (CmoeMeasurement(8, 2, 10, 1e-3, 99), MoeficationMeasurement(8, 99), kmeans)


def test_memory_for_cmoes_counts_is_planned() -> None:
    """Float32 counts of every pair of neurons, of both networks at once, and the product that is added to one.

    On the host, three copies of a network's input weights for k-means.
    """
    facts = dense_model(layers=2, width=1024)
    section = FactorLlmSection(kind="factorllm", experts=4, active=2)
    needed, host = {}, {}
    for name in ("start", *BASELINES):
        space = make_space(section, facts, [TunePhase(evaluations=9, init=(name,))])
        costs = costs_of(space, outline_of(facts))
        needed[name], host[name] = costs.calibration_bytes(longest=1), costs.calibration_host_bytes()
    assert host == {"start": 0, "cmoe": 0, "kmeans": 3 * 4 * 16 * 1024, "moefication": 3 * 4 * 16 * 1024}
    assert needed["start"] == needed["moefication"] < 3 * 4 * 1024**2 <= needed["cmoe"]


def test_shared_experts_need_a_bias_and_routed_ones_beside_them() -> None:
    for section in ({"router_bias": False}, {"active": 1}, {"active": 4}):
        chosen = FactorLlmSection(kind="factorllm", **({"experts": 4, "active": 2} | section))
        space = make_space(chosen, dense_model(), ())
        check_baselines([TunePhase(evaluations=9, init=("moefication", "start"))], space)
        with pytest.raises(UserError, match=r"phases.0.init: cmoe has shared experts, which needs genome.router_bias"):
            check_baselines([TunePhase(evaluations=9, init=("cmoe",))], space)
    check_baselines([TunePhase(evaluations=9, init=("cmoe",))], replace(factorllm_space(), baseline_measurement=None))
