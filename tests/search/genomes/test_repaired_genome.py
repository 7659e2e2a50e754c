"""Properties of repaired genomes beyond the contract, and the variation of recipes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from factorllm_samples import factorllm_space
from repair_samples import rows_of
from search_samples import MERGE, PRUNE, continuous, dense_model, eep_space

from moevolve.search.genomes.contract.base import GenomeSpace, Offspring
from moevolve.search.genomes.contract.phases import RepairPhase
from moevolve.search.genomes.repaired import (
    RepairedGenome,
    RepairedSpace,
    base_genome,
    recipe_summary,
    repaired_space,
    vary_recipe,
)
from moevolve.workers.contract.edits import Calibration, CombinedRecipe, IdentityEdit
from moevolve.workers.contract.fitting import NeuronRecipe, RowsRecipe
from moevolve.workers.methods.repair.edit import RepairedEdit, RepairRecipe

ROWS = rows_of([(1, 2, 3), (4, 5)])
REPAIR = RepairPhase(evaluations=20)
REPAIRING = PRUNE.model_copy(update={"repair": RepairRecipe(tokens=100)})


def repaired(inner: GenomeSpace[Any], recombinable: bool = True) -> RepairedSpace:
    space = repaired_space(inner, [PRUNE, REPAIRING, REPAIR], recombinable)
    assert isinstance(space, RepairedSpace) and repaired_space(inner, [PRUNE, MERGE], recombinable) is inner
    return replace(space, rows=ROWS)


RECIPES = (
    RepairRecipe(),
    RepairRecipe((0.01, 2.0), "local", 500, 0.5, "kept", NeuronRecipe(0.5, 2.0, 0.25, False, 3.0, "kept"), "matched"),
    RepairRecipe((1e-3,), answer_weight=20.0, neurons=NeuronRecipe(), strength="scalar", gate=True, memory_mb=7),
)


@pytest.mark.parametrize("recipe", RECIPES)
def test_any_recipe_comes_back_from_bytes(recipe: RepairRecipe) -> None:
    space, base = repaired(eep_space(4, 2, layers=2)), continuous(eep_space(4, 2, layers=2))
    genome = space.repaired(base, recipe)
    copy = space.from_bytes(genome.to_bytes())
    assert copy == genome and isinstance(copy, RepairedGenome)
    assert copy.express().phenotype_hash == genome.express().phenotype_hash != base.express().phenotype_hash
    edit = copy.express()
    assert isinstance(edit, RepairedEdit)
    assert edit.base.phenotype_hash == base.express().phenotype_hash != edit.phenotype_hash
    assert edit.recipe == recipe and edit.rows is ROWS


def test_a_space_takes_bare_genomes_too_and_a_bare_one_no_repaired() -> None:
    inner = eep_space(4, 2, layers=2)
    space, base = repaired(inner), continuous(inner)
    assert space.from_bytes(base.to_bytes()) == base
    whole = space.repaired(base, RepairRecipe())
    assert space.repaired(whole, RepairRecipe()) == whole, "there is one repair at most"
    assert base_genome(whole) == base and base_genome(base) is base
    identity = repaired(eep_space(8, 2, layers=2)).sample(np.random.default_rng(0), REPAIRING).genome
    assert isinstance(identity, RepairedGenome) and isinstance(identity.express(), IdentityEdit)
    assert identity.express().phenotype_hash == identity.base.express().phenotype_hash, "there is nothing to repair"
    with pytest.raises(ValueError, match="genome"):
        inner.from_bytes(whole.to_bytes())


def test_recipes_that_are_none_are_refused() -> None:
    space = repaired(eep_space(4, 2, layers=2))
    data = space.repaired(continuous(eep_space(4, 2, layers=2)), RepairRecipe()).to_bytes()
    for old in (b'"global"', b'"tokens"', b"16384", b'"ridge_lambdas": [0.001'):
        assert old in data
        with pytest.raises(ValueError, match="no repaired genome"):
            space.from_bytes(data.replace(old, b"-" * len(old)))


def test_bases_recipes_and_rows_make_edits_differ_and_rows_no_genomes() -> None:
    inner = eep_space(4, 2)
    space, other = repaired(inner), replace(repaired(inner), rows=rows_of([(1, 2), (3, 4, 5)]))
    recipes = RepairRecipe(), RepairRecipe(target="local")
    genomes = [space.repaired(continuous(inner, seed), recipe) for seed in (0, 1) for recipe in recipes]
    assert len({genome.express().phenotype_hash for genome in genomes}) == 4
    elsewhere = other.repaired(continuous(inner), RepairRecipe())
    assert elsewhere.to_bytes() == genomes[0].to_bytes()
    assert elsewhere.express().phenotype_hash != genomes[0].express().phenotype_hash
    without = replace(space, rows=None)
    assert without.from_bytes(genomes[0].to_bytes()) == genomes[0]
    with pytest.raises(AssertionError, match="calibrated"):
        without.repaired(continuous(inner), RepairRecipe()).express()


def test_rows_are_measured_beside_what_the_kind_needs() -> None:
    assert repaired(eep_space(4, 2)).recipe == RowsRecipe(16384)
    inner = eep_space(4, 2, dynamic_skipping=True)
    both = repaired(inner).recipe
    assert isinstance(both, CombinedRecipe) and RowsRecipe(16384) in both.parts and len(both.parts) == 2
    rows = {"tokens": ROWS.tokens, "lengths": ROWS.lengths, "prompts": ROWS.prompts}
    arrays = {f"{use}_{name}": array for use in ("repair", "skipping") for name, array in rows.items()}
    space = replace(repaired(inner), rows=None).calibrated(Calibration(arrays))
    assert space.rows is not None and space.rows.fingerprint == ROWS.fingerprint
    assert space.inner.skip_rows is not None


def test_descriptions_say_how() -> None:
    inner = eep_space(4, 2)
    space, base = repaired(inner), continuous(inner)
    plain = inner.describe(base)
    found = space.describe(space.repaired(base, RepairRecipe(neurons=NeuronRecipe(0.5, shared=False))))
    assert replace(found, summary="") == replace(plain, summary="")
    assert found.summary == f"{plain.summary}, repaired, global, ridge, lambda 0.001 to 1, neurons of all experts"
    assert space.describe(base) == plain
    short = RepairRecipe((0.05,), "local", 8, 1.0, gate=True)
    assert recipe_summary(short) == "repaired, local, gated, up to ridge, lambda 0.05"


def test_a_phase_that_repairs_nothing_brings_forth_bare_genomes() -> None:
    space, rng = repaired(eep_space(4, 2)), np.random.default_rng(0)
    parent = space.sample(rng, REPAIRING).genome
    assert isinstance(parent, RepairedGenome) and parent.recipe == REPAIRING.repair
    for phase in (PRUNE, MERGE):
        child = space.breed(rng, phase, (parent,))
        assert not isinstance(child.genome, RepairedGenome)
        assert space.unflatten(space.flatten(parent, phase), phase) == parent.base
    child = space.breed(rng, REPAIRING, (parent.base,))
    assert isinstance(child.genome, RepairedGenome)


def test_a_space_chooses_where_what_it_wraps_does() -> None:
    inner = eep_space(1, 1, layers=2, experts=3).calibrated(Calibration({"counts": np.array([[1, 2, 1], [0, 30, 10]])}))
    choosing = repaired(inner)
    assert [choosing.selects_subset(phase) for phase in (PRUNE, REPAIRING, MERGE, REPAIR)] == [True, True, False, False]
    assert choosing.importance(REPAIRING).tolist() == inner.importance(PRUNE).tolist() != []
    dense = repaired(factorllm_space(dense_model()))
    assert not any(dense.selects_subset(phase) for phase in (PRUNE, REPAIR))


@pytest.mark.parametrize("recombinable", [True, False])
def test_a_varied_recipe_is_another_one_within_range(recombinable: bool) -> None:
    for seed in range(60):
        recipe = RECIPES[seed % 3] if recombinable else replace(RECIPES[seed % 3], neurons=None)
        phase = RepairRecipe(tokens=64, neurons=NeuronRecipe(routing=7.0) if recombinable else None)
        varied = vary_recipe(np.random.default_rng(seed), recipe, phase, recombinable)
        assert varied != recipe and (varied.memory_mb, varied.gate) == (recipe.memory_mb, recipe.gate)
        assert varied.answer_weight == recipe.answer_weight or 0.25 <= varied.answer_weight <= 64
        assert varied.ridge_lambdas == recipe.ridge_lambdas or 1e-6 <= varied.ridge_lambdas[0] <= 1e2
        assert varied.tokens in (recipe.tokens, 64, 32, 16)
        assert recombinable or varied.neurons is None
        if recipe.neurons is None and varied.neurons is not None:
            assert replace(varied.neurons, shared=False) == NeuronRecipe(routing=7.0)
        if recipe.neurons is not None and varied.neurons is not None:
            assert sum(getattr(recipe.neurons, name) != getattr(varied.neurons, name) for name in NAMES) <= 1
        assert vary_recipe(np.random.default_rng(seed), recipe, phase, recombinable) == varied


NAMES = ("routing", "activation", "output", "shared", "candidates", "router")


def test_every_part_of_a_recipe_is_varied_as_often_as_it_should() -> None:
    start, counts, draws = RepairRecipe((0.1,), tokens=1024), Counter[str](), 1500
    steps, octaves = [], []
    names = ("ridge_lambdas", "target", "tokens", "answer_weight", "strength", "neurons")
    for seed in range(draws):
        varied = vary_recipe(np.random.default_rng(seed), start, start, True)
        counts.update(name for name in names if getattr(start, name) != getattr(varied, name))
        if varied.ridge_lambdas != start.ridge_lambdas:
            steps.append(np.log10(varied.ridge_lambdas[0] / 0.1))
        if varied.answer_weight != start.answer_weight:
            octaves.append(np.log2(varied.answer_weight / start.answer_weight))
    # At least one is changed; a third of the draws of tokens and of strengths are what they were.
    rates = dict(zip(names, (0.5, 0.25, 0.25 * 2 / 3, 0.5, 0.15 * 2 / 3, 0.5), strict=True))
    any_of_them = 1 - np.prod([1 - rate for rate in rates.values()])
    for name, rate in rates.items():
        assert counts[name] / draws == pytest.approx(rate / any_of_them, abs=0.05), name
    assert np.mean(steps) == pytest.approx(0, abs=0.1) and np.std(steps) == pytest.approx(0.7, abs=0.08)
    assert np.mean(octaves) == pytest.approx(0, abs=0.15) and np.std(octaves) == pytest.approx(1, abs=0.1)


def test_neurons_are_dropped_only_in_phases_without_them() -> None:
    filled = RepairRecipe((0.1,), neurons=NeuronRecipe())
    for phase in (RepairRecipe((0.1,)), filled):
        found = [vary_recipe(np.random.default_rng(seed), filled, phase, True).neurons for seed in range(300)]
        assert (found.count(None) > 15) == (phase.neurons is None)
        changed = [each for each in found if each is not None and each != filled.neurons]
        for name in NAMES:
            assert sum(getattr(each, name) != getattr(filled.neurons, name) for each in changed) > 5, name


def test_a_child_has_one_parents_base_and_the_others_recipe() -> None:
    inner = eep_space(4, 2, layers=4)
    space, (one, two) = repaired(inner), (continuous(inner, 1), continuous(inner, 2))
    donor = space.repaired(two, RepairRecipe((7.0,), "local", 4))

    def child(*parents: Any) -> Offspring[Any]:
        return space.breed(np.random.default_rng(0), REPAIR, parents)

    single, crossed = child(donor), child(one, donor)
    assert single.genome.base == two and crossed.genome.base == one
    assert single.genome.recipe == crossed.genome.recipe != donor.recipe
    assert (single.parents, crossed.parents, crossed.operator) == ((0,), (0, 1), "repair")
    first = replace(REPAIR.repair, tokens=5)  # as many as there are
    assert child(two).genome.recipe == vary_recipe(np.random.default_rng(0), first, first, True)


def test_no_child_differs_by_tokens_that_are_not_there() -> None:
    """The rows have five tokens, so 16,384 and 8,192 would fit the same ones."""
    inner = eep_space(4, 2, layers=4)
    space, found = repaired(inner), set()
    for seed in range(40):
        child = space.breed(np.random.default_rng(seed), REPAIR, (space.repaired(continuous(inner), REPAIR.repair),))
        found.add(child.genome.recipe.tokens)
        assert (
            replace(child.genome.recipe, tokens=5) != replace(REPAIR.repair, tokens=5) or child.genome.recipe.tokens < 5
        )
    assert found == {5, 2}
    three = RepairRecipe(tokens=3)
    varied = {vary_recipe(np.random.default_rng(seed), three, three, True).tokens for seed in range(40)}
    assert varied == {2, 3}, "tokens never fall below two"
