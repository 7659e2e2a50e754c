"""Properties of repaired genomes beyond the contract, and the variation of settings."""

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
    repair_summary,
    repaired_space,
    vary_repair,
)
from moevolve.workers.contract.edits import Calibration, CombinedMeasurement, IdentityEdit
from moevolve.workers.contract.fitting import NeuronSettings, RowsMeasurement
from moevolve.workers.methods.repair.edit import RepairedEdit, RepairSettings

ROWS = rows_of([(1, 2, 3), (4, 5)])
REPAIR = RepairPhase(evaluations=20)
REPAIRING = PRUNE.model_copy(update={"repair": RepairSettings(tokens=100)})


def repaired(inner: GenomeSpace[Any], recombinable: bool = True) -> RepairedSpace:
    space = repaired_space(inner, [PRUNE, REPAIRING, REPAIR], recombinable)
    assert isinstance(space, RepairedSpace) and repaired_space(inner, [PRUNE, MERGE], recombinable) is inner
    return replace(space, rows=ROWS)


SETTINGS = (
    RepairSettings(),
    RepairSettings(
        (0.01, 2.0), "local", 500, 0.5, "kept", NeuronSettings(0.5, 2.0, 0.25, False, 3.0, "kept"), "matched"
    ),
    RepairSettings((1e-3,), answer_weight=20.0, neurons=NeuronSettings(), strength="scalar", gate=True, memory_mb=7),
)


@pytest.mark.parametrize("settings", SETTINGS)
def test_any_settings_comes_back_from_bytes(settings: RepairSettings) -> None:
    space, base = repaired(eep_space(4, 2, layers=2)), continuous(eep_space(4, 2, layers=2))
    genome = space.repaired(base, settings)
    copy = space.from_bytes(genome.to_bytes())
    assert copy == genome and isinstance(copy, RepairedGenome)
    assert copy.express().phenotype_hash == genome.express().phenotype_hash != base.express().phenotype_hash
    edit = copy.express()
    assert isinstance(edit, RepairedEdit)
    assert edit.base.phenotype_hash == base.express().phenotype_hash != edit.phenotype_hash
    assert edit.settings == settings and edit.rows is ROWS


def test_a_space_takes_bare_genomes_too_and_a_bare_one_no_repaired() -> None:
    inner = eep_space(4, 2, layers=2)
    space, base = repaired(inner), continuous(inner)
    assert space.from_bytes(base.to_bytes()) == base
    whole = space.repaired(base, RepairSettings())
    assert space.repaired(whole, RepairSettings()) == whole, "there is one repair at most"
    assert base_genome(whole) == base and base_genome(base) is base
    identity = repaired(eep_space(8, 2, layers=2)).sample(np.random.default_rng(0), REPAIRING).genome
    assert isinstance(identity, RepairedGenome) and isinstance(identity.express(), IdentityEdit)
    assert identity.express().phenotype_hash == identity.base.express().phenotype_hash, "there is nothing to repair"
    with pytest.raises(ValueError, match="genome"):
        inner.from_bytes(whole.to_bytes())


def test_settings_that_are_none_are_refused() -> None:
    space = repaired(eep_space(4, 2, layers=2))
    data = space.repaired(continuous(eep_space(4, 2, layers=2)), RepairSettings()).to_bytes()
    for old in (b'"global"', b'"tokens"', b"16384", b'"ridge_lambdas": [0.001'):
        assert old in data
        with pytest.raises(ValueError, match="no repaired genome"):
            space.from_bytes(data.replace(old, b"-" * len(old)))


def test_bases_settings_and_rows_make_edits_differ_and_rows_no_genomes() -> None:
    inner = eep_space(4, 2)
    space, other = repaired(inner), replace(repaired(inner), rows=rows_of([(1, 2), (3, 4, 5)]))
    both = RepairSettings(), RepairSettings(target="local")
    genomes = [space.repaired(continuous(inner, seed), settings) for seed in (0, 1) for settings in both]
    assert len({genome.express().phenotype_hash for genome in genomes}) == 4
    elsewhere = other.repaired(continuous(inner), RepairSettings())
    assert elsewhere.to_bytes() == genomes[0].to_bytes()
    assert elsewhere.express().phenotype_hash != genomes[0].express().phenotype_hash
    without = replace(space, rows=None)
    assert without.from_bytes(genomes[0].to_bytes()) == genomes[0]
    with pytest.raises(AssertionError, match="calibrated"):
        without.repaired(continuous(inner), RepairSettings()).express()


def test_rows_are_measured_beside_what_the_kind_needs() -> None:
    assert repaired(eep_space(4, 2)).measurement == RowsMeasurement(16384)
    inner = eep_space(4, 2, dynamic_skipping=True)
    both = repaired(inner).measurement
    assert isinstance(both, CombinedMeasurement) and RowsMeasurement(16384) in both.parts and len(both.parts) == 2
    rows = {"tokens": ROWS.tokens, "lengths": ROWS.lengths, "prompts": ROWS.prompts}
    arrays = {f"{use}_{name}": array for use in ("repair", "skipping") for name, array in rows.items()}
    space = replace(repaired(inner), rows=None).calibrated(Calibration(arrays))
    assert space.rows is not None and space.rows.fingerprint == ROWS.fingerprint
    assert space.inner.skip_rows is not None


def test_descriptions_say_how() -> None:
    inner = eep_space(4, 2)
    space, base = repaired(inner), continuous(inner)
    plain = inner.describe(base)
    found = space.describe(space.repaired(base, RepairSettings(neurons=NeuronSettings(0.5, shared=False))))
    assert replace(found, summary="") == replace(plain, summary="")
    assert found.summary == f"{plain.summary}, repaired, global, ridge, lambda 0.001 to 1, neurons of all experts"
    assert space.describe(base) == plain
    short = RepairSettings((0.05,), "local", 8, 1.0, gate=True)
    assert repair_summary(short) == "repaired, local, gated, up to ridge, lambda 0.05"


def test_a_phase_that_repairs_nothing_brings_forth_bare_genomes() -> None:
    space, rng = repaired(eep_space(4, 2)), np.random.default_rng(0)
    parent = space.sample(rng, REPAIRING).genome
    assert isinstance(parent, RepairedGenome) and parent.settings == REPAIRING.repair
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
def test_a_varied_settings_is_another_one_within_range(recombinable: bool) -> None:
    for seed in range(60):
        settings = SETTINGS[seed % 3] if recombinable else replace(SETTINGS[seed % 3], neurons=None)
        phase = RepairSettings(tokens=64, neurons=NeuronSettings(routing=7.0) if recombinable else None)
        varied = vary_repair(np.random.default_rng(seed), settings, phase, recombinable)
        assert varied != settings and (varied.memory_mb, varied.gate) == (settings.memory_mb, settings.gate)
        assert varied.answer_weight == settings.answer_weight or 0.25 <= varied.answer_weight <= 64
        assert varied.ridge_lambdas == settings.ridge_lambdas or 1e-6 <= varied.ridge_lambdas[0] <= 1e2
        assert varied.tokens in (settings.tokens, 64, 32, 16)
        assert recombinable or varied.neurons is None
        if settings.neurons is None and varied.neurons is not None:
            assert replace(varied.neurons, shared=False) == NeuronSettings(routing=7.0)
        if settings.neurons is not None and varied.neurons is not None:
            assert sum(getattr(settings.neurons, name) != getattr(varied.neurons, name) for name in NAMES) <= 1
        assert vary_repair(np.random.default_rng(seed), settings, phase, recombinable) == varied


NAMES = ("routing", "activation", "output", "shared", "candidates", "router")


def test_every_part_of_a_settings_is_varied_as_often_as_it_should() -> None:
    start, counts, draws = RepairSettings((0.1,), tokens=1024), Counter[str](), 1500
    steps, octaves = [], []
    names = ("ridge_lambdas", "target", "tokens", "answer_weight", "strength", "neurons")
    for seed in range(draws):
        varied = vary_repair(np.random.default_rng(seed), start, start, True)
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
    filled = RepairSettings((0.1,), neurons=NeuronSettings())
    for phase in (RepairSettings((0.1,)), filled):
        found = [vary_repair(np.random.default_rng(seed), filled, phase, True).neurons for seed in range(300)]
        assert (found.count(None) > 15) == (phase.neurons is None)
        changed = [each for each in found if each is not None and each != filled.neurons]
        for name in NAMES:
            assert sum(getattr(each, name) != getattr(filled.neurons, name) for each in changed) > 5, name


def test_a_child_has_one_parents_base_and_the_others_settings() -> None:
    inner = eep_space(4, 2, layers=4)
    space, (one, two) = repaired(inner), (continuous(inner, 1), continuous(inner, 2))
    donor = space.repaired(two, RepairSettings((7.0,), "local", 4))

    def child(*parents: Any) -> Offspring[Any]:
        return space.breed(np.random.default_rng(0), REPAIR, parents)

    single, crossed = child(donor), child(one, donor)
    assert single.genome.base == two and crossed.genome.base == one
    assert single.genome.settings == crossed.genome.settings != donor.settings
    assert (single.parents, crossed.parents, crossed.operator) == ((0,), (0, 1), "repair")
    first = replace(REPAIR.repair, tokens=5)  # as many as there are
    assert child(two).genome.settings == vary_repair(np.random.default_rng(0), first, first, True)


def test_no_child_differs_by_tokens_that_are_not_there() -> None:
    """The rows have five tokens, so 16,384 and 8,192 would fit the same ones."""
    inner = eep_space(4, 2, layers=4)
    space, found = repaired(inner), set()
    for seed in range(40):
        child = space.breed(np.random.default_rng(seed), REPAIR, (space.repaired(continuous(inner), REPAIR.repair),))
        found.add(child.genome.settings.tokens)
        assert (
            replace(child.genome.settings, tokens=5) != replace(REPAIR.repair, tokens=5)
            or child.genome.settings.tokens < 5
        )
    assert found == {5, 2}
    three = RepairSettings(tokens=3)
    varied = {vary_repair(np.random.default_rng(seed), three, three, True).tokens for seed in range(40)}
    assert varied == {2, 3}, "tokens never fall below two"
