"""The strategy `nevergrad:<Optimizer>`: exact replay whatever the optimiser draws from, and sensible starts."""

from __future__ import annotations

from typing import Any

import nevergrad as ng
import numpy as np
import pytest
from search_lab import run_config
from search_samples import eep_space
from strategy_lab import Score, asked_and_told

from moevolve.evaluators.errors import UserError
from moevolve.search.config.run import RunConfig
from moevolve.search.genomes.contract.phases import MergePhase
from moevolve.search.strategies import nevergrad
from moevolve.search.strategies.base import rank_key
from moevolve.search.strategies.nevergrad import NevergradPhase
from moevolve.search.strategies.phased import make_strategy
from moevolve.search.strategies.schedule import make_schedule
from moevolve.store.records import IndividualRecord

SPACE = eep_space(layers=4)
OPTIMIZERS = ["DiagonalCMA", "DiscreteLenglerOnePlusOne", "TwoPointsDE", "NGOpt"]


def worth(one: IndividualRecord) -> tuple[float, float] | None:
    """A smooth landscape over both matrices; one candidate in eleven fails."""
    if int(one.phenotype_hash[:4], 16) % 11 == 3:
        return None
    genome = SPACE.from_bytes(one.genome)
    target = np.random.default_rng(5).random(genome.expert_merging.shape)
    distance = float(((genome.expert_merging - target) ** 2).mean() + ((genome.router_mapping - target) ** 2).mean())
    return round(float(np.exp(-distance)), 3), -distance


def run(config: RunConfig, score: Score = worth, resumed_at: int | None = None) -> list[IndividualRecord]:
    schedule = make_schedule(config)
    return asked_and_told(lambda: make_strategy(config, SPACE, schedule), SPACE, schedule, score, resumed_at)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_replay_gives_the_same_individuals(optimizer: str) -> None:
    config = run_config(strategy=f"nevergrad:{optimizer}")
    assert run(config, resumed_at=23) == run(config, resumed_at=41)


def test_individuals_are_random_first_and_the_optimiser_s_then() -> None:
    members = run(run_config(strategy="nevergrad:DiagonalCMA"))
    assert {proposal.operator for proposal in members[:10]} == {"random"}
    assert {proposal.operator for proposal in members[10:]} == {"nevergrad:DiagonalCMA"}
    genomes = [SPACE.from_bytes(one.genome) for one in members]
    assert all(genome.one_hot for genome in genomes[:30])
    best = min((one for one in members[: 30 - 5] if one.fitness is not None), key=rank_key)
    assert {proposal.parents for proposal in members[30:]} == {(best.index,)}
    start = genomes[best.index].expert_merging
    steps = [np.abs(genome.expert_merging - start).mean() for genome in genomes[30:34]]
    assert 0 < max(steps) < 0.2, "the first steps stay near the best pruned one"


def test_it_climbs() -> None:
    phases = [{"kind": "prune", "evaluations": 30, "initial": 10}, {"kind": "merge", "evaluations": 150}]
    members = run(run_config(phases=phases, strategy="nevergrad:DiagonalCMA"))
    fitness = [one.fitness or 0.0 for one in members]
    assert max(fitness[:10]) <= max(fitness[:30]) < max(fitness)
    assert members != run(run_config(phases=phases, strategy="nevergrad:DiagonalCMA", seed=9))


def test_points_beyond_float32_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(nevergrad._SIGMA, "merge", 1e30)  # as wide as CMA may make its steps by itself
    phase = NevergradPhase(SPACE, 0, MergePhase(evaluations=4), "CMA", 0, 1)
    genome: Any = phase.ask(0, False, None, ()).genome
    assert np.isfinite(genome.expert_merging).all()


def test_every_optimiser_begins_or_is_refused_for_a_missing_package_at_once() -> None:
    small, phase, refused = eep_space(2, 1, experts=2, layers=1), MergePhase(evaluations=9), {}
    for name in sorted(ng.optimizers.registry):
        try:
            made = NevergradPhase(small, 0, phase, name, 0, 1)
        except UserError as error:
            refused[name] = str(error)
        else:
            made.ask(0, False, None, ())
    assert len(refused) <= 31
    assert all(f"nevergrad:{name} requires the package" in message for name, message in refused.items())


def test_unknown_names_give_the_near_matches_and_one_at_a_time_needs_a_window_of_one() -> None:
    config = run_config(strategy="nevergrad:DiagonalCNA")
    with pytest.raises(UserError, match=r"nevergrad:DiagonalCNA.*no such optimiser.*DiagonalCMA"):
        make_strategy(config, SPACE, make_schedule(config))
    with pytest.raises(UserError, match=r"nevergrad:NelderMead.*set window: 1, not 6"):
        make_strategy(run_config(strategy="nevergrad:NelderMead"), SPACE, make_schedule(run_config()))
    one = run_config(strategy="nevergrad:NelderMead", window=1)
    # Where everything fails, it goes on.
    assert len({made.phenotype_hash for made in run(one, lambda _: None, resumed_at=20)}) > 10
