"""Properties of repaired genomes beyond the contract."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from factorllm_samples import factorllm_space
from repair_samples import rows_of
from search_samples import MERGE, PRUNE, continuous, dense_model, eep_space

from moevolve.search.genomes.contract.base import GenomeSpace
from moevolve.search.genomes.contract.phases import RepairPhase
from moevolve.search.genomes.repaired import (
    RepairedGenome,
    RepairedSpace,
    base_genome,
    repair_summary,
    repaired_space,
)
from moevolve.workers.contract.edits import Calibration, CombinedMeasurement, IdentityEdit
from moevolve.workers.contract.fitting import RowsMeasurement
from moevolve.workers.methods.repair.edit import RepairedEdit, RepairSettings

ROWS = rows_of([(1, 2, 3), (4, 5)])
REPAIR = RepairPhase(evaluations=20)
REPAIRING = PRUNE.model_copy(update={"repair": RepairSettings(tokens=100)})


def repaired(inner: GenomeSpace[Any]) -> RepairedSpace:
    space = repaired_space(inner, [PRUNE, REPAIRING, REPAIR])
    assert isinstance(space, RepairedSpace) and repaired_space(inner, [PRUNE, MERGE]) is inner
    return replace(space, rows=ROWS)


SETTINGS = (
    RepairSettings(),
    RepairSettings((0.01, 2.0), 500, 0.5, True),
    RepairSettings((1e-3,), answer_weight=20.0, neurons=True, tokens=7),
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
    for old in (b'"tokens"', b"16384", b'"ridge_lambdas": [0.001'):
        assert old in data
        with pytest.raises(ValueError, match="no repaired genome"):
            space.from_bytes(data.replace(old, b"-" * len(old)))


def test_bases_settings_and_rows_make_edits_differ_and_rows_no_genomes() -> None:
    inner = eep_space(4, 2)
    space, other = repaired(inner), replace(repaired(inner), rows=rows_of([(1, 2), (3, 4, 5)]))
    both = RepairSettings(), RepairSettings(answer_weight=1.0)
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
    found = space.describe(space.repaired(base, RepairSettings(neurons=True)))
    assert replace(found, summary="") == replace(plain, summary="")
    assert found.summary == f"{plain.summary}, repaired, lambda 0.001 to 1, neurons of all experts"
    assert space.describe(base) == plain
    short = RepairSettings((0.05,), 8, 1.0)
    assert repair_summary(short) == "repaired, lambda 0.05"


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
