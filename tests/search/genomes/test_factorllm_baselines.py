"""MoEfication's and CMoE's partitions as FactorLLM genomes; their measurements are tested with the workers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from factorllm_samples import factorllm_space, with_baselines
from search_samples import TUNE, dense_model

from moevolve.evaluators.errors import UserError
from moevolve.search.genomes.factorllm.baselines import BASELINES
from moevolve.search.genomes.factorllm.genome import ROUTERS
from moevolve.search.genomes.factorllm.space import FactorLlmSection
from moevolve.search.genomes.registry import check_baselines, make_space
from moevolve.search.settings.phases import TunePhase
from moevolve.workers.contract.edits import CombinedRecipe
from moevolve.workers.methods.factorllm.edit import CmoeRecipe, FactorLlmRecipe, MoeficationRecipe


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
                expected = space.statistics[f"{name}_weight"][layer, expert]
                np.testing.assert_array_equal(edit.router_weight[layer, router, place], expected)
                assert edit.router_bias[layer, router, place] == space.statistics[f"{name}_bias"][layer, expert]
    assert space.describe(genome).active_parameters == space.active_parameters
    assert space.from_bytes(genome.to_bytes()) == genome == space.unflatten(space.flatten(genome, TUNE), TUNE)
    assert genome.content_hash != space.start(TUNE).genome.content_hash


def test_children_of_baselines_and_of_the_start_have_routers_of_both() -> None:
    space, rng = with_baselines(), np.random.default_rng(0)
    parents = [space.start(TUNE).genome, *(each.make(space).genome for each in BASELINES.values())]
    children = [space.breed(rng, TUNE, (parents[0], parents[place])).genome for place in (1, 2) for _ in range(4)]
    assert {router for child in children for router in child.base_router.tolist()} == {1, 2, 3}
    assert all(child.express().finite for child in children)


def test_routers_that_were_not_measured_are_the_starts() -> None:
    space, rich = factorllm_space(), with_baselines()
    vector = rich.flatten(BASELINES["cmoe"].make(rich).genome, TUNE)
    assert (space.unflatten(vector, TUNE).base_router == 1).all()
    assert (rich.unflatten(np.full(vector.size, 1e6), TUNE).base_router == len(ROUTERS)).all()
    with pytest.raises(ValueError, match="none or one of router, moefication, cmoe"):
        space.genome(assignment=space.statistics["experts"], base_router=np.full(space.dense.layers, len(ROUTERS) + 1))


def test_only_what_is_needed_is_measured() -> None:
    def recipe(*init: str, **section: Any) -> Any:
        chosen = FactorLlmSection(kind="factorllm", **({"experts": 8, "active": 5} | section))
        return make_space(chosen, dense_model(), [TunePhase(evaluations=9, init=init)]).recipe

    assert isinstance(recipe("start", "random"), FactorLlmRecipe)
    both = recipe("cmoe", "moefication", calibration_tokens=99, ridge=0.5)
    assert isinstance(both, CombinedRecipe) and isinstance(both.parts[0], FactorLlmRecipe)
    (added,) = both.parts[1:]
    assert added.parts == (CmoeRecipe(8, 2, 10, 0.5, 99), MoeficationRecipe(8, 99))


def test_shared_experts_need_a_bias_and_routed_ones_beside_them() -> None:
    for section in ({"router_bias": False}, {"active": 1}, {"active": 4}):
        chosen = FactorLlmSection(kind="factorllm", **({"experts": 4, "active": 2} | section))
        space = make_space(chosen, dense_model(), ())
        check_baselines([TunePhase(evaluations=9, init=("moefication", "start"))], space)
        with pytest.raises(UserError, match=r"phases.0.init: cmoe has shared experts, which needs genome.router_bias"):
            check_baselines([TunePhase(evaluations=9, init=("cmoe",))], space)
    check_baselines([TunePhase(evaluations=9, init=("cmoe",))], replace(factorllm_space(), baseline_recipe=None))
