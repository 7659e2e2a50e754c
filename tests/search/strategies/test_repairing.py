"""Repair phases: whom they repair, and that nothing but the history they see matters."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
from repair_samples import rows_of
from scripted_pool import Stopped
from search_lab import UnrulyPool, drive, make_lab_setup, population, run_config, smooth
from strategy_lab import Score, asked_and_told, by_hash

from moevolve.search.config.run import RunConfig
from moevolve.search.genomes.repaired import RepairedGenome, RepairedSpace
from moevolve.search.loop.setup import SearchSetup
from moevolve.search.running.launch import register
from moevolve.search.strategies.base import rank_key
from moevolve.search.strategies.phased import make_strategy
from moevolve.search.strategies.schedule import make_schedule
from moevolve.store.records import IndividualRecord
from moevolve.store.repository import Store
from moevolve.workers.contract.edits import Calibration, Edit
from moevolve.workers.methods.repair.edit import RepairedEdit, RepairSettings

ROWS = rows_of([(1, 2, 3), (4, 5)])
CALIBRATION = Calibration(
    {"repair_tokens": ROWS.tokens, "repair_lengths": ROWS.lengths, "repair_prompts": ROWS.prompts}
)
PRUNE = {"kind": "prune", "evaluations": 20, "initial": 8}
MERGE = {"kind": "merge", "evaluations": 10}
REPAIR = {"kind": "repair", "evaluations": 4, "repair": {"ridge_lambdas": [0.01], "tokens": 64}}


def lab(*phases: dict[str, Any], **changes: Any) -> SearchSetup:
    """A calibrated search."""
    setup = make_lab_setup(run_config(phases=list(phases), **changes))
    assert isinstance(setup.space, RepairedSpace)
    return replace(setup, space=setup.space.calibrated(CALIBRATION))


@dataclass
class Run:
    """What a strategy made, and how it was scored."""

    config: RunConfig
    space: RepairedSpace
    members: list[IndividualRecord]

    def genome(self, index: int) -> Any:
        return self.space.from_bytes(self.members[index].genome)

    @property
    def repairs(self) -> list[IndividualRecord]:
        return [one for one in self.members if one.phase == "repair"]

    def visible(self, index: int) -> list[IndividualRecord]:
        """What came before the repair phase and is seen by an individual of it, best first, each genome once."""
        seen = self.members[: make_schedule(self.config).visible(index)]
        ranked = sorted((one for one in seen if one.phase != "repair" and one.status == "ok"), key=rank_key)
        return list({one.phenotype_hash: one for one in reversed(ranked)}.values())[::-1]


def evolve(setup: SearchSetup, score: Score = by_hash, resumed_at: int | None = None) -> Run:
    assert isinstance(setup.space, RepairedSpace)
    config, space, schedule = setup.config, setup.space, setup.schedule
    members = asked_and_told(lambda: make_strategy(config, space, schedule), space, schedule, score, resumed_at)
    return Run(config, space, members)


@pytest.mark.parametrize("window", [1, 2, 15])
def test_the_best_of_all_phases_before_are_repaired(window: int) -> None:
    """Whatever the window is, all before is seen; a merged genome may be better than pruned ones, or not."""
    for seed in range(2):
        run = evolve(lab(PRUNE, MERGE, REPAIR, window=window, seed=seed))
        first = run.repairs[0].index
        assert make_schedule(run.config).visible(first) == first
        best = run.visible(first)[:4]
        for one, base in zip(run.repairs, best, strict=True):
            assert one.parents == (base.index,) and one.operator == "repair"
            genome = run.genome(one.index)
            assert genome.base == run.genome(base.index) and genome.settings == RepairSettings((0.01,), tokens=64)


def test_random_genomes_are_repaired_where_there_are_too_few() -> None:
    run = evolve(lab(PRUNE, REPAIR, window=1), lambda one: (0.5, -1.0) if one.index in (3, 7) else None)
    found = [(one.parents, one.operator) for one in run.repairs]
    assert found == [((3,), "repair"), ((7,), "repair"), ((), "random"), ((), "random")]
    run = evolve(lab(PRUNE, REPAIR, window=3), lambda one: None)
    assert all((one.parents, one.operator) == ((), "random") for one in run.repairs)
    assert all(run.genome(one.index).settings == RepairSettings((0.01,), tokens=64) for one in run.repairs)
    assert len({one.phenotype_hash for one in run.members}) == len(run.members)


def test_what_is_repaired_alike_already_is_not_repaired_again() -> None:
    settings = REPAIR["repair"]
    run = evolve(lab(PRUNE | {"repair": settings}, REPAIR, window=1))
    assert all(isinstance(run.genome(one.index), RepairedGenome) for one in run.members)
    assert all(one.operator == "random" for one in run.repairs)
    assert len({one.phenotype_hash for one in run.members}) == len(run.members)
    other = evolve(lab(PRUNE | {"repair": {"tokens": 32}}, REPAIR, window=1))
    best = other.visible(other.repairs[0].index)[:4]
    for one, base in zip(other.repairs, best, strict=True):
        assert one.parents == (base.index,) and other.genome(one.index).base == other.genome(base.index).base


def test_the_best_of_what_was_repaired_more_cheaply_are_repaired_anew() -> None:
    settings = REPAIR["repair"]
    formulas, cheap = PRUNE | {"repair": settings}, PRUNE | {"repair": {"tokens": 32}}
    run = evolve(lab(formulas, cheap, REPAIR, window=1), lambda one: (1.0 if one.index < 20 else one.index / 99, -1.0))
    # The later ones are better, but some of them are what the first phase repaired alike.
    alike = {run.genome(one.index).base for one in run.members[:20]}
    best = [place for place in range(39, 19, -1) if run.genome(place).base not in alike][:4]
    assert [one.parents for one in run.repairs] == [(place,) for place in best]
    assert all(run.genome(one.index).base == run.genome(*one.parents).base for one in run.repairs)


def test_runs_are_functions_of_seed_and_history() -> None:
    whole, other = (evolve(lab(PRUNE, MERGE, REPAIR, window=4, seed=seed), resumed_at=19).members for seed in (3, 4))
    assert whole != other
    for stop in (31, 33):
        assert evolve(lab(PRUNE, MERGE, REPAIR, window=4, seed=3), resumed_at=stop).members == whole


def test_a_driver_that_is_stopped_comes_to_the_same_population() -> None:
    def score(edit: Edit) -> tuple[float, float] | None:
        return smooth(edit.base if isinstance(edit, RepairedEdit) else edit)

    setup, found = lab(PRUNE | {"repair": {"tokens": 32}}, MERGE, REPAIR, window=5), []
    for stops in ([], [20, 4, 3]):
        with Store.open("sqlite:///:memory:") as store:
            register(setup, store)
            for attempt, stop in enumerate(stops):
                with pytest.raises(Stopped):
                    drive(store, setup, UnrulyPool(attempt, score, stop_at=stop))
            drive(store, setup, UnrulyPool(9, score, workers=9))
            found.append(population(store))
    assert found[0] == found[1] and {row[2] for row in found[0] if row[1] == "repair"} == {"repair"}
