"""ToMoE genomes beyond the contract: budget, start, regularisation terms, parameter counts, and static masks."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from search_samples import TUNE, dense_model, few, many, mixtral
from tomoe_samples import tomoe_space

from moevolve.evaluators.errors import UserError
from moevolve.search.genomes.tomoe.budget import WidthBudget
from moevolve.search.genomes.tomoe.kind import BASELINES, flap, saliency
from moevolve.search.genomes.tomoe.space import (
    FITTED,
    SEEDS,
    ToMoeGenome,
    ToMoeSection,
    ToMoeSpace,
    projection,
    regularisation_terms,
    standardised_log,
    top_mask,
)
from moevolve.workers.contract.edits import Calibration
from moevolve.workers.methods.tomoe.edit import ToMoeEdit

MODELS = {
    "llama": dense_model(layers=5, hidden=32, width=96, heads=4),
    "opt": dense_model(layers=3, gated=False, bias=True),
    "biased": dense_model(layers=2, bias=True, heads=2),
}


@pytest.mark.parametrize("name", MODELS)
@many
@given(share=st.floats(0.15, 1.0), spread=st.sampled_from([0.0, 0.3, 2.0, 50.0]), seed=st.integers(0, 2**32 - 1))
def test_the_budget_is_met_to_within_one_neuron(name: str, share: float, spread: float, seed: int) -> None:
    facts = MODELS[name]
    budget = WidthBudget.of(facts, facts.family == "llama", share)
    shares = np.random.default_rng(seed).normal(0, spread, (budget.layers, len(budget.full_widths))).astype(np.float32)
    widths = budget.widths(shares)
    assert (widths >= 1).all() and (widths <= budget.full_widths).all()
    assert 0 <= budget.total - budget.parameters(widths) < budget.unit_costs[0]
    if share == 1:
        assert (widths == budget.full_widths).all()


@few
@given(share=st.floats(0.15, 1.0), seed=st.integers(0, 2**32 - 1))
def test_equal_widths_are_the_largest_within_the_budget(share: float, seed: int) -> None:
    space = tomoe_space(MODELS["opt"], experts=1, budget=share, equal_widths=True)
    rng = np.random.default_rng(seed)
    random = space.sample(rng, TUNE).genome
    for genome in (random, space.breed(rng, TUNE, (random,)).genome, flap(space).genome, space.start(TUNE).genome):
        width = int(genome.widths[0, 0])
        assert (genome.express().widths == width).all()
        found = space.describe(genome)
        assert found.parameters == found.active_parameters == parameters_of(space, width)
        assert width == 96 or parameters_of(space, width + 1) - parameters_of(space, 0) > space.budget.total


def parameters_of(space: ToMoeSpace, width: int) -> int:
    """Parameters of a narrower dense model."""
    return space.facts.parameters - space.dense.layers * (space.dense.width - width) * space.dense.neuron_parameters


def test_costs_are_the_models_parameters() -> None:
    for facts in MODELS.values():
        attention = facts.family == "llama"
        budget = WidthBudget.of(facts, attention, 1.0)
        masked = [
            linear
            for linear in facts.linears
            if (attention and "self_attn" in linear.name) or "mlp" in linear.name or "fc" in linear.name
        ]
        counted = sum(linear.outputs * (linear.inputs + linear.bias) for linear in masked)
        # Output biases stay whatever is masked.
        kept = sum(
            linear.outputs for linear in masked if linear.bias and linear.name.endswith(("down_proj", "fc2", "o_proj"))
        )
        assert budget.total == counted - kept


def test_shares_move_widths_from_layer_to_layer() -> None:
    budget = WidthBudget.of(MODELS["llama"], True, 0.5)
    shares = np.zeros((5, 3), dtype=np.float32)
    assert np.array_equal(budget.widths(shares), np.tile([48, 2, 4], (5, 1)))
    shares[2, 0] = 0.5
    moved = budget.widths(shares)
    assert moved[2, 0] > 60 and (moved[[0, 1, 3, 4]] <= [48, 2, 4]).all() and (moved < [48, 2, 4]).any()
    shares[2, 0], shares[0, 2] = 0, -9
    assert budget.widths(shares)[0, 2] == 1


def test_every_candidate_meets_the_budget_and_its_description_says_what_it_costs() -> None:
    space = tomoe_space(MODELS["llama"], budget=0.4)
    rng = np.random.default_rng(0)
    pair = tuple(space.sample(rng, TUNE).genome for _ in range(2))
    genome = space.breed(rng, TUNE, pair).genome
    edit, found = genome.express(), space.describe(genome)
    assert edit.heads is not None
    dense = space.dense
    network = int(edit.widths.sum()) * 3 * dense.hidden
    kept = int(edit.kept.any(axis=1).sum()) * 3 * dense.hidden
    pairs = int(edit.heads.pairs.sum()) * 2 * (dense.heads + dense.key_value_heads) * dense.hidden
    values = (dense.heads + dense.key_value_heads) * dense.hidden
    whole = WidthBudget.of(space.facts, True, 1.0).total
    assert space.budget.total - 3 * dense.hidden < network + pairs + int(edit.heads.active.sum()) * values
    assert network + pairs + int(edit.heads.active.sum()) * values <= int(whole * 0.4)
    routers = sum(
        space.section.experts * dense.hidden * (width < dense.width)
        + (8 * dense.hidden + dense.head_dim * 9) * (active < dense.head_dim)
        for width, active in zip(edit.widths, edit.heads.active, strict=True)
    )
    rest = space.facts.parameters - whole + routers
    # A mask on finished values saves nothing, though the budget counts it.
    assert found.active_parameters == rest + network + pairs + dense.layers * dense.head_dim * values
    assert found.parameters == rest + kept + pairs + dense.layers * dense.head_dim * values


def test_values_that_all_tokens_keep_alike_are_run_alone() -> None:
    """The start's value masks are static; a step in one layer's router makes that layer compute all values."""
    space = tomoe_space(MODELS["llama"], budget=0.4)
    dense, start = space.dense, space.start(TUNE).genome
    heads = start.heads.copy()
    heads[1, 0, 2] = 1
    moved = space.genome(shares=start.shares, routers=start.routers, heads=heads)
    dropped = dense.head_dim - start.widths[:, 2]
    values = (dense.heads + dense.key_value_heads) * dense.hidden
    scores = 8 * dense.hidden + dense.head_dim * 9
    assert (dropped > 0).all()
    one, two = (space.describe(each).active_parameters for each in (start, moved))
    assert space.active_parameters(start.widths) - one == int(dropped.sum()) * values + dense.layers * scores
    assert two - one == int(dropped[1]) * values + scores


def test_without_coordinates_the_most_salient_of_everything_is_kept() -> None:
    space = tomoe_space()
    edit = space.genome().express()
    measured = space.statistics
    assert edit.heads is not None and not edit.router.any()
    assert np.array_equal(edit.widths, [12] * 4)
    for layer in range(4):
        best = np.argsort(-measured["neuron_saliency"][layer])[:12]
        assert all(set(np.flatnonzero(mask)) == set(best) for mask in edit.kept[layer])
        assert edit.heads.pairs[layer].argmax() == measured["pair_saliency"][layer].argmax()
        order = np.argsort(-edit.heads.value_bias[layer])
        assert np.array_equal(order, np.argsort(-measured["value_saliency"][layer]))
    assert not edit.heads.value_router.any()


def test_the_start_is_the_fitted_experts_with_widths_by_what_networks_write() -> None:
    space = tomoe_space(experts=5, budget=0.4, attention=False)
    offspring = space.start(TUNE)
    edit, measured = offspring.genome.express(), space.statistics
    assert offspring.operator == "start"
    wanted = 1 + 2 * measured["network_share"].astype(np.float64)
    free = edit.widths < edit.width
    np.testing.assert_allclose(
        edit.widths[free] / edit.widths[free].sum(), wanted[free] / wanted[free].sum(), atol=0.05
    )
    assert edit.widths.sum() == int(0.4 * 4 * edit.width) and len(set(edit.widths.tolist())) > 1
    for layer in range(4):
        fitted = measured["expert_rows"][layer] * np.float32(10)
        for router, kept in zip(edit.router[layer], edit.kept[layer], strict=True):
            (expert,) = np.flatnonzero((fitted == router).all(axis=1))
            best = np.argsort(-measured["expert_saliency"][layer, expert])[: edit.widths[layer]]
            assert set(np.flatnonzero(kept)) == set(best)


def test_random_masks_are_uniformly_random() -> None:
    """Compared with uniformly random subsets: binomial counts, and hypergeometric overlaps of w^2 / n."""
    space, rng, width = tomoe_space(budget=0.3), np.random.default_rng(11), tomoe_space().dense.width
    counts, chances, overlaps, variance = np.zeros((4, width)), [], 0.0, 0.0
    for _ in range(80):
        offspring = space.sample(rng, TUNE)
        edit = offspring.genome.express()
        assert offspring.operator == "random"
        counts += edit.kept.sum(axis=1)
        chances += [edit.widths / width] * edit.kept.shape[1]
        for kept, w in zip(edit.kept, edit.widths.tolist(), strict=True):
            for one, two in combinations(kept, 2):
                overlaps += int((one & two).sum()) - w**2 / width
                variance += w**2 * (width - w) ** 2 / (width**2 * (width - 1))
    assert abs(overlaps) < 4 * np.sqrt(variance)
    chance = np.array(chances)
    expected, variances = chance.sum(axis=0)[:, None], (chance * (1 - chance)).sum(axis=0)[:, None]
    assert np.abs((counts - expected) / np.sqrt(variances)).max() < 4.5


def test_random_draws_are_the_same_under_any_saliency() -> None:
    space = tomoe_space()
    other = {name: array[:, ::-1] if "sal" in name else -array for name, array in space.statistics.items()}
    flipped = space.calibrated(Calibration(other))
    genome, start = space.sample(np.random.default_rng(1), TUNE).genome, space.start(TUNE).genome
    one, two = genome.express(), flipped.from_bytes(genome.to_bytes()).express()
    assert one.heads is not None and two.heads is not None
    assert np.array_equal(one.kept, two.kept) and np.array_equal(one.router, two.router)
    for name in ("pairs", "active", "value_bias", "value_router"):
        assert np.array_equal(getattr(one.heads, name), getattr(two.heads, name)), name
    assert not np.array_equal(start.express().kept, flipped.from_bytes(start.to_bytes()).express().kept)


def test_zero_latents_score_nothing_and_small_ones_little() -> None:
    project = projection("neurons", 8, 128, 500)
    assert not project(np.zeros((3, 8), dtype=np.float32)).any()
    draws = np.random.default_rng(0).standard_normal((200, 8)).astype(np.float32)
    assert 0.3 < project(0.3 * draws).std() < 0.8
    assert project(0.01 * draws).std() < 0.03
    assert np.array_equal(project(draws), projection("neurons", 8, 128, 500)(draws))
    assert np.isfinite(project(np.float32(1e6) * draws)).all()
    assert standardised_log(np.array([1.0, np.e, np.e**2])) == pytest.approx([-1.2247449, 0, 1.2247449])
    assert np.isfinite(standardised_log(np.array([1.0, 0.0]))).all()
    assert standardised_log(np.zeros(3)).tolist() == [0, 0, 0]
    assert top_mask(np.array([[0.1, 0.1 + 1e-9, 0.1, 0.0]]), 2).tolist() == [[True, True, False, False]]


def test_terms_are_the_papers() -> None:
    kept = np.zeros((1, 2, 4), dtype=np.bool_)
    kept[0, 0, :2] = kept[0, 1, 1:3] = True
    router = np.array([[[1.0, 0.0], [-1.0, 0.0]]])
    edit = ToMoeEdit(kept, router, np.zeros((1, 2, 6)))
    sample = np.array([[[2.0, 0], [1.0, 0], [-1.0, 5], [3.0, 1]]], dtype=np.float32)
    terms = regularisation_terms(edit, sample, None)
    assert terms.unions.tolist() == [3] and terms.coverage.tolist() == [[0.75]]
    assert terms.union_term == pytest.approx(np.log(4 / 3))
    first = np.mean([1 / (1 + np.exp(-2 * x)) for x in (2.0, 1.0, -1.0, 3.0)])
    assert terms.balances[0] == pytest.approx(2 * (0.75 * first + 0.25 * (1 - first)))
    assert terms.balance_term == pytest.approx(terms.balances[0] - 1)


def test_terms_weigh_as_penalties() -> None:
    free, bound = tomoe_space(), tomoe_space(coverage=0.5, balance=0.25)
    genome = bound.sample(np.random.default_rng(1), TUNE).genome
    assert free.describe(free.from_bytes(genome.to_bytes())).penalty == 0
    expected = 0.5 * genome.terms.union_term + 0.25 * genome.terms.balance_term
    assert bound.describe(genome).penalty == pytest.approx(expected) and expected > 0
    assert genome.terms.coverage.shape == (4, 2) and genome.terms.balances.shape == (4,)


def test_small_steps_of_an_optimiser_leave_masks_by_what_is_measured() -> None:
    space, rng = tomoe_space(), np.random.default_rng(0)
    for genome in (saliency(space).genome, flap(space).genome, space.start(TUNE).genome):
        vector = space.flatten(genome, TUNE)
        for _ in range(8):
            near = space.unflatten(vector + 0.1 * rng.standard_normal(vector.size), TUNE)
            assert np.array_equal(near.seeds, genome.seeds)
    assert (space.unflatten(np.full(vector.size, 1e6), TUNE).seeds == SEEDS - 1).all()
    for seed in (0.5, -3, SEEDS, np.nan):
        with pytest.raises(ValueError, match="whole numbers from -2 to 16777215"):
            space.genome(seeds=np.full(space.shapes["seeds"], seed))


def test_redrawn_experts_keep_to_saliency_or_to_chance() -> None:
    space, rng = tomoe_space(dense_model(layers=6)), np.random.default_rng(0)
    informed, random = space.start(TUNE).genome, space.sample(rng, TUNE).genome
    still = TUNE.model_copy(update={"group_rate": 0.01, "entry_rate": 0.0, "swap_rate": 0.0})
    assert space.breed(rng, still, (informed,)).genome == informed
    child = space.breed(rng, still.model_copy(update={"swap_rate": 1.0}), (informed,)).genome
    changed = (child.latents != informed.latents).any(axis=(1, 2))
    assert changed.sum() == 1 and child.latents[changed].all() and child.routers[changed].all()
    assert np.array_equal(child.shares, informed.shares) and np.array_equal(child.heads, informed.heads)
    redraw = still.model_copy(update={"group_rate": 1.0, "swap_rate": 1.0})
    assert (space.breed(rng, redraw, (informed,)).genome.seeds == FITTED).all()
    seeds = space.breed(rng, redraw, (random,)).genome.seeds
    assert seeds.all() and (seeds[:, :4] != random.seeds[:, :4]).all()
    assert np.array_equal(seeds[:, 4], random.seeds[:, 4]), "the heads' mask is no expert's"


def test_crossover_takes_layers_whole() -> None:
    space = tomoe_space(dense_model(layers=12))
    still = TUNE.model_copy(update={"entry_rate": 0.0, "swap_rate": 0.0})
    rng, size = np.random.default_rng(3), space.flatten(space.start(TUNE).genome, TUNE).size
    one, two = (space.unflatten(1 + rng.standard_normal(size), TUNE) for _ in range(2))
    child = space.breed(rng, still, (one, two)).genome
    sources = {
        name: [np.array_equal(getattr(child, name)[i], getattr(two, name)[i]) for i in range(12)]
        for name in ("shares", "latents", "routers", "heads", "seeds")
    }
    assert len({tuple(each) for each in sources.values()}) == 1
    assert 0 < sum(sources["shares"]) < 12


def test_a_space_without_its_calibration_reads_genomes_and_no_more() -> None:
    space = tomoe_space()
    bare = ToMoeSpace.of(space.section, space.facts)
    genome = bare.from_bytes(space.start(TUNE).genome.to_bytes())
    assert isinstance(genome, ToMoeGenome) and genome.widths.shape == (4, 3)
    with pytest.raises(AssertionError, match="calibrated"):
        genome.express()


@pytest.mark.parametrize(
    ("facts", "settings", "message"),
    [
        (mixtral(), {}, r"genome.kind: tomoe needs dense .* not mixtral"),
        (MODELS["opt"], {}, r"genome.attention: heads of opt can't be masked"),
        (MODELS["llama"], {"budget": 0.01}, r"genome.budget: 0.01 of [\d,]+ parameters is less than"),
    ],
)
def test_settings_that_do_not_suit_the_model_are_refused(facts: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ToMoeSpace.of(ToMoeSection(kind="tomoe", **settings), facts)


def plainly_kept(metric: Any, total: int) -> list[set[int]]:
    """FLAP: the largest of all neurons' metrics, standardised per layer, and always the best neuron of every layer."""
    ranked = []
    for layer, values in enumerate(np.asarray(metric, dtype=np.float64)):
        mean = sum(values) / len(values)
        deviation = (sum((value - mean) ** 2 for value in values) / (len(values) - 1)) ** 0.5
        best = int(np.argmax(values))
        # Closer ones count as equal; of a layer's own the larger one stays in any case.
        scores = [round((value - mean) / deviation, 12) for value in values]
        ranked += [(neuron != best, -scores[neuron], layer, -v, neuron) for neuron, v in enumerate(values)]
    kept: list[set[int]] = [set() for _ in metric]
    for _, _, layer, _, neuron in sorted(ranked)[:total]:
        kept[layer].add(neuron)
    return kept


@pytest.mark.parametrize("name", ["llama", "opt"])
@few
@given(budget=st.floats(0.15, 1.0), spread=st.sampled_from([0.01, 1.0, 3.0]), seed=st.integers(0, 2**32 - 1))
def test_flap_lets_layers_compete(name: str, budget: float, spread: float, seed: int) -> None:
    space = tomoe_space(MODELS[name], budget=round(budget, 3))
    metric = np.exp(np.random.default_rng(seed).normal(0, spread, space.statistics["neuron_fluctuation"].shape))
    space = space.calibrated(Calibration({**space.statistics, "neuron_fluctuation": metric.astype(np.float32)}))
    genome, even = flap(space).genome, space.even_widths
    edit, expected = genome.express(), plainly_kept(metric.astype(np.float32), int(even[:, 0].sum()))
    assert [set(np.flatnonzero(masks[0])) for masks in edit.kept] == expected
    assert (edit.kept == edit.kept[:, :1]).all(), "all tokens have the same mask"
    assert np.array_equal(genome.widths[:, 1:], even[:, 1:]), "heads are as at the start"
    assert 0 <= space.budget.total - space.budget.parameters(genome.widths) < space.budget.unit_costs[0]
    assert space.from_bytes(genome.to_bytes()) == genome == space.unflatten(space.flatten(genome, TUNE), TUNE)


def test_saliency_keeps_the_same_share_of_every_layer() -> None:
    space = tomoe_space(MODELS["llama"])
    edit = saliency(space).genome.express()
    assert np.array_equal(edit.widths, space.even_widths[:, 0])
    for masks, values in zip(edit.kept, space.statistics["neuron_saliency"], strict=True):
        best = set(np.argsort(-values)[: masks[0].sum()])
        assert all(set(np.flatnonzero(mask)) == best for mask in masks)


@pytest.mark.parametrize("name", BASELINES)
def test_children_keep_to_what_their_parents_masks_are_by(name: str) -> None:
    space = tomoe_space()
    offspring = BASELINES[name].make(space)
    assert (offspring.operator, offspring.parents) == (name, ())
    wild = TUNE.model_copy(update={"group_rate": 1.0, "entry_rate": 1.0, "swap_rate": 1.0})
    child = space.breed(np.random.default_rng(0), wild, (offspring.genome,)).genome
    assert np.array_equal(child.seeds, offspring.genome.seeds)
    assert child.express().phenotype_hash != offspring.genome.express().phenotype_hash
