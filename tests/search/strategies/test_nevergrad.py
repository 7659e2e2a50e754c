"""The strategy `nevergrad:<Optimizer>`: exact replay whatever the optimiser draws from, and sensible starts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import nevergrad as ng
import numpy as np
import pytest
from search_lab import run_config
from search_samples import decided, eep_space, history_row

from moevolve.evaluators.errors import UserError
from moevolve.search.config.run import RunConfig
from moevolve.search.genomes.contract.base import Offspring
from moevolve.search.genomes.eep.genome import EepGenome
from moevolve.search.loop.search_loop import individual_record
from moevolve.search.settings.phases import MergePhase, NevergradSection, PrunePhase
from moevolve.search.strategies.base import Strategy, rank_key
from moevolve.search.strategies.nevergrad import NevergradPhase
from moevolve.search.strategies.phased import make_strategy
from moevolve.search.strategies.schedule import make_schedule
from moevolve.store.records import IndividualRecord

SPACE = eep_space(layers=4)
OPTIMIZERS = ["DiagonalCMA", "DiscreteLenglerOnePlusOne", "TBPSA", "TwoPointsDE", "NGOpt", "RandomSearch", "PSO"]
Score = Callable[[Offspring[Any]], tuple[float, float] | None]


def worth(proposal: Offspring[Any]) -> tuple[float, float] | None:
    """A smooth landscape over both matrices; one candidate in eleven fails."""
    genome: Any = proposal.genome
    if int(genome.content_hash[:4], 16) % 11 == 3:
        return None
    target = np.random.default_rng(5).random(genome.expert_merging.shape)
    distance = float(((genome.expert_merging - target) ** 2).mean() + ((genome.router_mapping - target) ** 2).mean())
    return round(float(np.exp(-distance)), 3), -distance


def run(
    config: RunConfig, score: Score = worth, resumed_at: int = 0
) -> tuple[list[Offspring[Any]], list[IndividualRecord]]:
    """Ask and tell as the driver does; what is before `resumed_at` is skipped by a second strategy."""
    schedule = make_schedule(config)
    first, second = (make_strategy(config, SPACE, schedule) for _ in range(2))
    proposals: list[Offspring[Any]] = []
    members: list[IndividualRecord] = []
    told = 0
    for index in range(schedule.total):
        while told < schedule.visible(index):
            _tell(first, second, members[told])
            told += 1
        proposals.append(_ask(first, second, index, index < resumed_at))
        made = individual_record(index, "", proposals[-1], SPACE.describe(proposals[-1].genome), 0)
        members.append(decided(made, score(proposals[-1])))
        np.random.random(index % 7)  # noqa: NPY002 - the global generator must not matter
    return proposals, members


def _tell(first: Strategy, second: Strategy, individual: IndividualRecord) -> None:
    first.tell(individual)
    second.tell(individual)


def _ask(first: Strategy, second: Strategy, index: int, skipped: bool) -> Offspring[Any]:
    proposal = first.ask(index, ())
    if skipped:
        second.skip(index)
    else:
        assert second.ask(index, ()) == proposal
    return proposal


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_replay_gives_the_same_individuals(optimizer: str) -> None:
    config = run_config(strategy=f"nevergrad:{optimizer}")
    proposals, _ = run(config, resumed_at=23)
    assert proposals == run(config, resumed_at=41)[0]
    assert proposals != run(run_config(strategy=f"nevergrad:{optimizer}", seed=9))[0]


def test_individuals_are_random_first_and_the_optimiser_s_then() -> None:
    proposals, members = run(run_config(strategy="nevergrad:DiagonalCMA"))
    assert {proposal.operator for proposal in proposals[:10]} == {"random"}
    assert {proposal.operator for proposal in proposals[10:]} == {"nevergrad:DiagonalCMA"}
    assert all(isinstance(proposal.genome, EepGenome) and proposal.genome.one_hot for proposal in proposals[:30])
    best = min((one for one in members[: 30 - 5] if one.fitness is not None), key=rank_key)
    assert {proposal.parents for proposal in proposals[30:]} == {(best.index,)}
    start = SPACE.from_bytes(best.genome)
    steps = [np.abs(p.genome.expert_merging - start.expert_merging).mean() for p in proposals[30:34]]  # type: ignore[attr-defined]
    assert 0 < max(steps) < 0.2, "the first steps stay near the best pruned one"


def test_one_phase_may_have_a_strategy_of_its_own() -> None:
    phases = [
        {"kind": "prune", "evaluations": 30, "initial": 10},
        {"kind": "merge", "evaluations": 30, "strategy": "nevergrad:CMA"},
    ]
    operators = [proposal.operator for proposal in run(run_config(phases=phases))[0]]
    assert set(operators[10:30]) <= {"mutation", "crossover+mutation"}
    assert set(operators[30:]) == {"nevergrad:CMA"}


@pytest.mark.parametrize("strategy", ["nevergrad:DiagonalCMA", "nevergrad:TwoPointsDE"])
def test_it_climbs(strategy: str) -> None:
    phases = [{"kind": "prune", "evaluations": 40, "initial": 10}, {"kind": "merge", "evaluations": 400}]
    _, members = run(run_config(phases=phases, strategy=strategy))
    fitness = [one.fitness or 0.0 for one in members]
    assert max(fitness[:10]) <= max(fitness[:40]) < max(fitness)


def test_a_search_where_everything_fails_goes_on() -> None:
    proposals, _ = run(run_config(strategy="nevergrad:CMA"), score=lambda _: None)
    assert len({proposal.genome.content_hash for proposal in proposals}) > 50


def test_points_beyond_float32_are_cut() -> None:
    wide = NevergradSection.model_construct(optimizer="CMA", sigma=1e30)  # as wide as CMA may make its steps by itself
    phase = NevergradPhase(SPACE, 0, MergePhase(evaluations=4), wide, 0, 1)
    genome: Any = phase.ask(0, False, None, ()).genome
    assert np.isfinite(genome.expert_merging).all()


def test_unknown_names_give_the_near_matches() -> None:
    config = run_config(strategy="nevergrad:DiagonalCNA")
    with pytest.raises(UserError, match=r"nevergrad:DiagonalCNA.*no such optimiser.*DiagonalCMA"):
        make_strategy(config, SPACE, make_schedule(config))


def test_one_at_a_time_needs_a_window_of_one() -> None:
    with pytest.raises(UserError, match=r"nevergrad:NelderMead.*set window: 1, not 6"):
        make_strategy(run_config(strategy="nevergrad:NelderMead"), SPACE, make_schedule(run_config()))
    one = run_config(strategy="nevergrad:NelderMead", window=1)
    assert len(run(one, resumed_at=20)[0]) == 60


class Sulking:
    """An optimiser that asks and won't be told."""

    no_parallelization = False

    def __init__(self, point: Any, budget: int, num_workers: int) -> None:
        self._point = point

    def ask(self) -> Any:
        return self._point

    def tell(self, candidate: Any, loss: float) -> None:
        raise RuntimeError("no more")


def test_an_optimiser_s_own_trouble_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ng.optimizers.registry, "Sulking", Sulking)
    section = NevergradSection(optimizer="Sulking")
    phase = NevergradPhase(SPACE, 0, PrunePhase(evaluations=4, initial=0), section, 0, 1)
    phase.ask(0, False, None, ())
    with pytest.raises(UserError, match="nevergrad:Sulking: tell failed: RuntimeError: no more"):
        phase.tell(history_row(0, "prune", 0.5))
