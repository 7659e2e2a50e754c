"""Properties of NanoMoE genomes beyond the contract: the paper's counts, the low-rank start, units of coordinates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from search_samples import TUNE, dense_model, mixtral

from moevolve.evaluators.errors import UserError
from moevolve.search.genomes.nanomoe.kind import BASELINES
from moevolve.search.genomes.nanomoe.space import NanoMoeSection, NanoMoeSpace
from moevolve.search.genomes.registry import check_baselines
from moevolve.workers.contract.edits import Calibration
from moevolve.workers.contract.facts import ModelFacts
from moevolve.workers.contract.fitting import RowsMeasurement
from moevolve.workers.methods.nanomoe.edit import BlockForm, NanoMoeEdit, Variant

VARIANTS: tuple[Variant, ...] = ("I", "II", "III", "low_rank")


def space_of(variant: Variant = "II", facts: ModelFacts | None = None, **settings: Any) -> NanoMoeSpace:
    section = NanoMoeSection(kind="nanomoe", variant=variant, **({"blocks": 2, "rank": 3} | settings))
    return NanoMoeSpace.of(section, facts or dense_model())


def test_parameters_are_the_papers() -> None:
    """Table 1, for the first fully connected layer of OPT-13B."""
    extras: dict[Variant, int] = {"low_rank": 0, "I": 8**2, "II": 8**2 * 640, "III": 3 * 8**2 * 640}
    for variant, extra in extras.items():
        form = BlockForm(variant, 1 if variant == "low_rank" else 8, 640)
        assert form.parameters(5120, 20480) == (5120 + 20480) * 640 + extra


@pytest.mark.parametrize(
    ("variant", "facts"),
    [("low_rank", dense_model()), ("III", dense_model()), ("I", dense_model(gated=False, bias=True))],
)
def test_costs_are_exact(variant: Variant, facts: ModelFacts) -> None:
    pattern = "*.mlp.*" if facts.family == "llama" else "*.fc?"
    space = space_of(variant, facts, layers=pattern, rank=4)
    found = space.describe(space.start(TUNE).genome)
    mixing = {"low_rank": 0, "I": 4, "III": 3 * 4 * 4}[variant]
    count = 12 if facts.family == "llama" else 8
    saved = count * (16 * 24 - (16 + 24) * 4 - mixing)
    assert found.parameters == found.active_parameters == facts.parameters - saved
    assert found.parameters_full == facts.parameters
    assert f"{count} layers" in found.summary and found.summary.startswith(variant)


def test_idle_experts_stay_idle() -> None:
    """Linear layers of MoE models, apart from experts, can be factorised too."""
    facts = replace(mixtral(layers=2), linears=dense_model(layers=2).linears)
    found = space_of(facts=facts, layers="*.q_proj", rank=3)
    description = found.describe(found.start(TUNE).genome)
    saved = 2 * (16 * 16 - (16 + 16) * 3 - 4 * 3)
    assert description.parameters == facts.parameters - saved
    assert description.active_parameters == facts.parameters - saved - 2 * 6 * facts.expert_parameters


def test_the_start_is_plain_low_rank() -> None:
    for variant in VARIANTS:
        offspring = space_of(variant).start(TUNE)
        edit = offspring.genome.express()
        assert (offspring.operator, offspring.parents) == ("start", ()) and isinstance(edit, NanoMoeEdit)
        ones, zeros = (edit.mixing[:, 0], edit.mixing[:, 1:]) if variant == "III" else (edit.mixing, edit.mixing[:0])
        assert (ones == 1).all() and not zeros.any()
        assert edit.layers == tuple(each.name for each in dense_model().linears if ".mlp." in each.name)


def test_plain_low_rank_is_a_single_point() -> None:
    space = space_of("low_rank", blocks=5, fit=3)
    start = space.start(TUNE).genome
    rng = np.random.default_rng(0)
    assert space.sample(rng, TUNE).operator == "start"
    genomes = [space.sample(rng, TUNE).genome, space.breed(rng, TUNE, (start, start)).genome]
    assert {genome.express().phenotype_hash for genome in genomes} == {start.express().phenotype_hash}
    assert space.flatten(start, TUNE).shape == (0,)
    assert start.express().phenotype_hash == space_of("low_rank").start(TUNE).genome.express().phenotype_hash


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layers": "*.experts.*"}, r"genome\.layers: no linear layer matches \*\.experts\.\*; .*mlp\.down_proj"),
        ({"blocks": 3}, r"genome\.blocks: 3 doesn't divide the 16 inputs of layers\.0\.mlp\.gate_proj"),
        ({"layers": "*.k_proj", "rank": 9}, r"genome\.rank: 9 is more than the 8 outputs of layers\.0\.self_attn"),
    ],
)
def test_settings_that_do_not_fit_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        space_of(**settings)


def test_mutation_touches_chosen_layers_at_the_phases_rates_and_crossover_takes_layers_whole() -> None:
    space, rng = space_of("II", rank=8, blocks=4), np.random.default_rng(0)
    parents = space.sample(rng, TUNE).genome, space.sample(rng, TUNE).genome
    phase = TUNE.model_copy(update={"group_rate": 0.0, "entry_rate": 0.5, "sigma": 0.2})
    for _ in range(4):
        child = space.breed(rng, phase, parents[:1]).genome
        changed = child.mixing != parents[0].mixing
        (layer,) = np.flatnonzero(changed.any(axis=(1, 2, 3)))
        assert 0.2 < changed[layer].mean() < 0.8
        assert 0.1 < (child.mixing - parents[0].mixing)[layer][changed[layer]].std() < 0.3
    crossed = space.breed(rng, TUNE.model_copy(update={"entry_rate": 0.0}), parents).genome
    own = [[np.array_equal(mixing, parent.mixing[i]) for parent in parents] for i, mixing in enumerate(crossed.mixing)]
    assert all(any(each) for each in own) and np.any(own, axis=0).all()


def test_a_step_moves_rank_one_parts_as_far_as_diagonals() -> None:
    """At every rank, so that one sigma suits all coordinates; random individuals step by it."""
    for rank in (2, 16):
        space = space_of("III", facts=dense_model(hidden=32, width=64), rank=rank, blocks=4)
        start = space.flatten(space.start(TUNE).genome, TUNE)
        moved = space.unflatten(start + 0.1, TUNE).mixing
        np.testing.assert_allclose(moved[:, 0], 1.1, rtol=1e-6)
        norms = np.linalg.norm(moved[:, 1], axis=-1) * np.linalg.norm(moved[:, 2], axis=-1)
        np.testing.assert_allclose(norms, 0.1, rtol=1e-6)
    steps = space.flatten(space.sample(np.random.default_rng(0), TUNE).genome, TUNE) - start
    assert steps.std() == pytest.approx(TUNE.sigma, rel=0.05) and abs(steps.mean()) < 0.01


def test_layers_can_be_fitted_to_their_outputs() -> None:
    plain, space = space_of(), space_of(fit_to="outputs", calibration_tokens=500)
    assert plain.measurement is None and space.measurement == RowsMeasurement(500)
    with pytest.raises(AssertionError, match="calibrated"):
        space.start(TUNE).genome.express()
    lengths = np.array([4, 5], dtype=np.int32)
    arrays = {"repair_tokens": np.arange(9, dtype=np.int32), "repair_lengths": lengths, "repair_prompts": lengths}
    genome = space.calibrated(Calibration(arrays)).start(TUNE).genome
    edit = genome.express()
    assert edit.rows is not None and edit.rows.first(9) == [(0, 1, 2, 3), (4, 5, 6, 7, 8)]
    unlike = plain.start(TUNE).genome
    assert genome.to_bytes() == unlike.to_bytes() and edit.phenotype_hash != unlike.express().phenotype_hash


def test_the_low_rank_baseline_mixes_nothing_and_is_fitted_to_outputs() -> None:
    lengths = np.array([2, 1], dtype=np.int32)
    rows = {"repair_tokens": np.arange(1, 4, dtype=np.int32), "repair_lengths": lengths, "repair_prompts": lengths}
    space = space_of("III", fit_to="outputs").calibrated(Calibration(rows))
    offspring = BASELINES["low_rank"].make(space)
    edit = offspring.genome.express()
    assert (offspring.operator, offspring.parents) == ("low_rank", ())
    assert np.array_equal(edit.mixing, np.broadcast_to(space.form.unmixed, space.shape))
    assert (edit.fit, edit.rows) == (0, space.rows)
    assert BASELINES["low_rank"].problem(space) is None
    phase = TUNE.model_copy(update={"init": ("low_rank",)})
    for settings in ({}, {"fit": 2}, {"fit": 2, "fit_to": "outputs"}):
        with pytest.raises(UserError, match=r"phases.0.init: low_rank is fitted to outputs, .* genome.fit_to: outputs"):
            check_baselines([phase], space_of("I", **settings))
