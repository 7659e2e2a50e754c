"""The strategy `evolution`: whom it breeds from, and that nothing but its history matters."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from search_samples import eep_space
from store_samples import decided
from strategy_lab import Score, asked_and_told, by_hash

from moevolve.search.genomes.contract.base import Offspring
from moevolve.search.genomes.contract.operators import generator
from moevolve.search.genomes.contract.phases import MergePhase, PhaseConfig, PrunePhase
from moevolve.search.genomes.eep.space import EepSpace
from moevolve.search.loop.search_loop import individual_record
from moevolve.search.strategies.base import rank_key
from moevolve.search.strategies.evolution import Evolution
from moevolve.search.strategies.phased import PhasedStrategy
from moevolve.search.strategies.schedule import Schedule
from moevolve.store.records import FULL_MODEL, IndividualRecord

PHASES: tuple[PhaseConfig, ...] = (
    PrunePhase(evaluations=30, initial=10, parents=4),
    MergePhase(evaluations=30, parents=4),
)


def schedule_of(phases: Sequence[PhaseConfig], window: int) -> Schedule:
    return Schedule.of([(phase.kind, phase.evaluations, phase.initial) for phase in phases], window)


def evolve(
    phases: tuple[PhaseConfig, ...] = PHASES,
    window: int = 4,
    seed: int = 0,
    score: Score = by_hash,
    space: EepSpace | None = None,
    resumed_at: int | None = None,
) -> list[IndividualRecord]:
    """An individual's phase is the position of its phase."""
    schedule, found = schedule_of(phases, window), space or eep_space(layers=4)

    def strategy() -> PhasedStrategy:
        return PhasedStrategy([Evolution(found, phase, seed) for phase in phases], schedule)

    return asked_and_told(strategy, found, schedule, score, resumed_at, by_position=True)


def best_distinct(members: Sequence[IndividualRecord]) -> list[IndividualRecord]:
    first = {one.phenotype_hash: one for one in reversed(members) if one.fitness is not None}
    return sorted(first.values(), key=rank_key)


@pytest.mark.parametrize("window", [1, 13])
def test_parents_are_among_the_best_of_the_visible_history_and_never_failed(window: int) -> None:
    members = evolve(window=window)
    schedule = schedule_of(PHASES, window)
    bred = 0
    for proposal in members:
        visible = members[: schedule.visible(proposal.index)]
        own = [one for one in visible if one.phase == proposal.phase]
        earlier = [one for one in visible if one.phase < proposal.phase]
        allowed = {one.index for one in best_distinct(own)[:4]} | {one.index for one in best_distinct(earlier)[:1]}
        assert set(proposal.parents) <= allowed
        assert len(set(proposal.parents)) == len(proposal.parents)
        bred += bool(proposal.parents)
    assert bred >= 40 - window
    failed = {one.index for one in members if one.fitness is None}
    assert len(failed) > 5
    assert not failed & {parent for proposal in members for parent in proposal.parents}


def test_pruned_individuals_that_merging_cannot_beat_stay_the_only_parent() -> None:
    def score(proposal: IndividualRecord) -> tuple[float, float]:
        return (1.0 - proposal.index / 100, -1.0) if proposal.phase == "0" else (0.1, -1.0)

    members = evolve((PHASES[0], MergePhase(evaluations=20, parents=1)), window=1, score=score)
    assert {proposal.parents for proposal in members[30:]} == {(0,)}


def test_tuning_starts_from_the_identity_and_mutants_of_it() -> None:
    """Without pruning there is one random genome only; the first of the window can't wait for its score."""
    phases = (MergePhase(evaluations=12),)
    tuned = evolve(phases, space=eep_space(8, layers=4), score=lambda _: (0.5, -1.0))
    assert [proposal.operator for proposal in tuned[:5]] == ["identity", "mutation", "mutation", "mutation", "mutation"]
    assert [proposal.parents for proposal in tuned[:5]] == [(), (), (), (), (0,)]
    assert tuned[0].phenotype_hash == FULL_MODEL, "so that the full model's score is its own"
    pruned = evolve(phases, score=lambda _: (0.5, -1.0))
    assert [proposal.operator for proposal in pruned[:5]] == ["random"] * 4 + ["mutation"], "where not all are kept"
    for active in (1, 3):
        other = evolve(phases, space=eep_space(8, layers=4, active=active), score=lambda _: (0.5, -1.0))
        assert other[0].phenotype_hash != FULL_MODEL


@pytest.mark.parametrize(("retained", "window"), [(2, 1), (4, 8)])
def test_no_individual_repeats_an_earlier_one(retained: int, window: int) -> None:
    """At EEP's rates a third of the children would; also those in flight count, which have no score yet."""
    phases = (PrunePhase(evaluations=150, initial=31), MergePhase(evaluations=30))
    members = evolve(phases, window, space=eep_space(retained, layers=8))
    assert len({proposal.phenotype_hash for proposal in members}) == len(members)


def test_a_space_without_anything_new_repeats() -> None:
    """One group of which 7 of 8 experts stay: 8 subsets in all; and where everything fails, it goes on at random."""
    failing = evolve(score=lambda _: None)
    assert {proposal.operator for proposal in failing} == {"random"}
    members = evolve((PrunePhase(evaluations=30, initial=10),), space=eep_space(7, groups=1, layers=4))
    phenotypes = [proposal.phenotype_hash for proposal in members]
    assert len(set(phenotypes)) == 8 and len(phenotypes) == 30


def test_a_phase_with_repeats_keeps_them_and_its_initial_ones_differ() -> None:
    phases = (
        PrunePhase(evaluations=120, initial=31, allow_duplicates=True),
        MergePhase(evaluations=20, allow_duplicates=True),
    )
    members = evolve(phases, 1, space=eep_space(2, layers=8))
    assert len({proposal.phenotype_hash for proposal in members[:31]}) == 31
    assert len({proposal.phenotype_hash for proposal in members}) < 100


@pytest.mark.parametrize(("repeats", "expected"), [(True, 0.75), (False, 0.5)])
def test_a_repeat_counts_among_the_parents_if_it_may_be(repeats: bool, expected: float) -> None:
    """Three times one genome and once another: as often a parent as there are individuals, or genomes."""
    space = eep_space(layers=4)
    phase = MergePhase(evaluations=9, crossover_rate=0.0, allow_duplicates=repeats)
    strategy = Evolution(space, phase, 0)
    one, two = (space.sample(generator(seed, 0), PHASES[0]).genome for seed in range(2))
    for index, genome in enumerate((one, one, one, two)):
        record = individual_record(index, "0", Offspring(genome, "random", ()), space.describe(genome), 0)
        strategy.tell(decided(record, 0.5))
    draws = [strategy.ask(index, False, None, set()).parents for index in range(4, 404)]
    assert abs(np.mean([parents != (3,) for parents in draws]) - expected) < 4 * np.sqrt(
        expected * (1 - expected) / 400
    )


def test_the_crossover_rate_decides_on_the_second_parent() -> None:
    """Among draws; where repeats are drawn anew crossover is more frequent, since mutation alone repeats more often."""
    for rate in (0.0, 0.3, 1.0):
        phases = (PrunePhase(evaluations=210, initial=10, crossover_rate=rate, allow_duplicates=True),)
        members = evolve(phases, window=1, score=lambda _: (0.5, -1.0), space=eep_space(layers=8))
        crossed = [len(proposal.parents) == 2 for proposal in members[10:]]
        assert abs(np.mean(crossed) - rate) <= 4 * np.sqrt(rate * (1 - rate) / len(crossed))
        assert [proposal.operator == "crossover+mutation" for proposal in members[10:]] == crossed


def test_each_operator_has_its_own_margin() -> None:
    """Scores of 0.900, 0.896 ...: three are within crossover's margin, which takes six, eight within mutation's."""
    phases = (PrunePhase(evaluations=250, initial=11, parents="threshold"),)

    def score(proposal: IndividualRecord) -> tuple[float, float]:
        return (0.9 - proposal.index / 250 if proposal.index < 11 else 0.1), -1.0

    members = evolve(phases, window=1, score=score)
    crossed = [proposal.parents for proposal in members[11:] if len(proposal.parents) == 2]
    mutated = [proposal.parents for proposal in members[11:] if len(proposal.parents) == 1]
    assert {parent for parents in crossed for parent in parents} == set(range(6))
    assert {parent for parents in mutated for parent in parents} == set(range(8))


def test_merging_may_start_from_all_that_pruning_left() -> None:
    """Those within the margin are parents from the first child on, as long as merging finds nothing better."""
    phases = (PHASES[0], MergePhase(evaluations=60, start="all", parents="threshold"))

    def score(proposal: IndividualRecord) -> tuple[float, float]:
        return (0.9 - proposal.index / 200 if proposal.phase == "0" else 0.1), -1.0

    members = evolve(phases, window=4, score=score)
    mutated = {proposal.parents[0] for proposal in members[30:] if len(proposal.parents) == 1}
    crossed = {parent for proposal in members[30:] if len(proposal.parents) == 2 for parent in proposal.parents}
    assert mutated <= set(range(7)) and len(mutated) > 3
    assert crossed <= set(range(6)) and len(crossed) > 3
    best_only = (PHASES[0], phases[1].model_copy(update={"start": "best"}))
    alone = evolve(best_only, window=4, score=lambda one: score(one) if one.phase == "0" else None)
    assert {proposal.parents for proposal in alone[30:]} == {(0,)}


def test_skipping_what_is_stored_changes_no_later_answer() -> None:
    whole = evolve(resumed_at=0)
    assert evolve(resumed_at=25) == evolve(resumed_at=41) == whole != evolve(seed=1)


def test_generators_are_apart_by_seed_index_and_stream_and_the_same_everywhere() -> None:
    keys = [(seed, index, stream) for seed in (0, 1) for index in (0, 1, 2**40) for stream in ("individual", "x")]
    draws = {key: generator(*key).integers(2**63) for key in keys}
    assert len(set(draws.values())) == len(keys)
    assert generator(7, 3).bit_generator.random_raw() == 13237616554134437946


THREE = (
    PrunePhase(evaluations=20, initial=8, parents=4),
    MergePhase(evaluations=12, parents=4),
    MergePhase(evaluations=12, parents=4, sigma=0.01),
)


def test_every_phase_starts_from_the_best_of_the_one_before() -> None:
    """Though the first phase's best scored more: what phases are compared by is their own kind."""

    def score(proposal: IndividualRecord) -> tuple[float, float] | None:
        found = by_hash(proposal)
        return None if found is None else (found[0] / (1 + int(proposal.phase)), found[1])

    failing = evolve(THREE, window=1, score=lambda one: None if one.phase == "1" else (0.5, -float(one.index)))
    assert failing[32].parents == (best_distinct(failing[:20])[0].index,), "or of an earlier one, where that failed"
    members = evolve(THREE, window=1, score=score)
    assert members[20].parents == (best_distinct(members[:20])[0].index,) and members[20].operator == "mutation"
    second = best_distinct(members[20:32])[0]
    assert members[32].parents == (second.index,)
    assert {parent for proposal in members[32:] for parent in proposal.parents} <= {second.index, *range(32, 44)}
