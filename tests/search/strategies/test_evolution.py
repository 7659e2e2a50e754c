"""The strategy `evolution`: whom it breeds from, and that nothing but its history matters."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from search_samples import decided, eep_space

from moevolve.search.genomes.contract.base import Offspring
from moevolve.search.genomes.contract.operators import generator
from moevolve.search.genomes.eep.space import EepSpace
from moevolve.search.loop.search_loop import individual_record
from moevolve.search.settings.phases import START, MergePhase, PhaseConfig, PrunePhase, ThresholdParents, TopKParents
from moevolve.search.strategies.base import rank_key
from moevolve.search.strategies.evolution import Evolution
from moevolve.search.strategies.phased import PhasedStrategy
from moevolve.search.strategies.schedule import Schedule
from moevolve.store.records import FULL_MODEL, IndividualRecord

PHASES: tuple[PhaseConfig, ...] = (
    PrunePhase(evaluations=30, initial=10, parents=TopKParents(k=4)),
    MergePhase(evaluations=30, parents=TopKParents(k=4)),
)
Score = Callable[[IndividualRecord], tuple[float, float] | None]


def by_hash(proposal: IndividualRecord) -> tuple[float, float] | None:
    """Coarse, so that there are ties; one in five fails."""
    digest = hashlib.sha256(proposal.content_hash.encode()).digest()
    return None if digest[0] % 5 == 0 else (digest[1] % 8 / 8, -float(digest[2] % 4))


def schedule_of(phases: Sequence[PhaseConfig], window: int) -> Schedule:
    return Schedule.of([(phase.kind, phase.evaluations, phase.initial) for phase in phases], window)


def evolution(space: EepSpace, phases: tuple[PhaseConfig, ...], schedule: Schedule, seed: int) -> PhasedStrategy:
    return PhasedStrategy([Evolution(space, phase, seed) for phase in phases], schedule)


def evolve(
    phases: tuple[PhaseConfig, ...] = PHASES,
    window: int = 4,
    seed: int = 0,
    score: Score = by_hash,
    space: EepSpace | None = None,
) -> tuple[list[IndividualRecord], list[IndividualRecord]]:
    """Run the strategy as its caller promises to; an individual's phase is the position of its phase."""
    schedule = schedule_of(phases, window)
    space = space or eep_space(layers=4)
    strategy = evolution(space, phases, schedule, seed)
    proposals: list[IndividualRecord] = []
    members: list[IndividualRecord] = []
    taken: set[str] = set()
    told = 0
    for index in range(schedule.total):
        while told < schedule.visible(index):
            strategy.tell(members[told])
            told += 1
        offspring = strategy.ask(index, taken)
        position = str(schedule.span(index).position)
        proposal = individual_record(index, position, offspring, space.describe(offspring.genome), 0)
        taken.add(proposal.phenotype_hash)
        proposals.append(proposal)
        members.append(decided(proposal, score(proposal)))
    return proposals, members


def best_distinct(members: Sequence[IndividualRecord]) -> list[IndividualRecord]:
    first = {one.content_hash: one for one in reversed(members) if one.fitness is not None}
    return sorted(first.values(), key=rank_key)


@pytest.mark.parametrize("window", [1, 4, 13])
def test_parents_are_among_the_best_of_the_visible_history(window: int) -> None:
    proposals, members = evolve(window=window)
    schedule = schedule_of(PHASES, window)
    bred = 0
    for proposal in proposals:
        visible = members[: schedule.visible(proposal.index)]
        own = [one for one in visible if one.phase == proposal.phase]
        earlier = [one for one in visible if one.phase < proposal.phase]
        allowed = {one.index for one in best_distinct(own)[:4]} | {one.index for one in best_distinct(earlier)[:1]}
        assert set(proposal.parents) <= allowed
        assert len(set(proposal.parents)) == len(proposal.parents)
        bred += bool(proposal.parents)
    assert bred >= 40 - window


def test_a_failed_individual_is_never_a_parent() -> None:
    proposals, members = evolve()
    failed = {one.index for one in members if one.fitness is None}
    assert len(failed) > 5
    assert not failed & {parent for proposal in proposals for parent in proposal.parents}


def test_a_search_where_everything_fails_goes_on_at_random() -> None:
    proposals, _ = evolve(score=lambda _: None)
    assert {proposal.operator for proposal in proposals} == {"random"}
    assert len({proposal.content_hash for proposal in proposals}) > 50


@pytest.mark.parametrize("seed", range(5))
def test_the_merge_phase_starts_from_the_best_of_the_prune_phase(seed: int) -> None:
    proposals, members = evolve(window=1, seed=seed)
    best = best_distinct(members[:30])[0]
    assert proposals[30].parents == (best.index,)
    assert proposals[30].operator == "mutation"


@pytest.mark.parametrize(
    "rule", [TopKParents(k=4), ThresholdParents(crossover_margin=0.2, crossover_least=1, mutation_margin=0.2)]
)
def test_pruned_individuals_that_merging_cannot_beat_stay_the_only_parent(rule: Any) -> None:
    phases = (PHASES[0], MergePhase(evaluations=20, parents=rule))

    def score(proposal: IndividualRecord) -> tuple[float, float]:
        return (1.0 - proposal.index / 100, -1.0) if proposal.phase == "0" else (0.1, -1.0)

    proposals, _ = evolve(phases, window=1, score=score)
    merged = [proposal.parents for proposal in proposals[30:]]
    if isinstance(rule, ThresholdParents):
        assert set(merged) == {(0,)}
    else:
        assert all(parents and (0 in parents or min(parents) >= 30) for parents in merged)


def test_tuning_starts_from_the_identity_and_mutants_of_it() -> None:
    """Without pruning there is one random genome only; the first of the window can't wait for its score."""
    phases = (MergePhase(evaluations=12),)
    tuned, _ = evolve(phases, space=eep_space(8, layers=4), score=lambda _: (0.5, -1.0))
    assert [proposal.operator for proposal in tuned[:5]] == ["identity", "mutation", "mutation", "mutation", "mutation"]
    assert [proposal.parents for proposal in tuned[:5]] == [(), (), (), (), (0,)]
    assert tuned[0].phenotype_hash == FULL_MODEL, "so that the full model's score is its own"
    for active in (1, 3):
        other, _ = evolve(phases, space=eep_space(8, layers=4, active=active), score=lambda _: (0.5, -1.0))
        assert other[0].phenotype_hash != FULL_MODEL


def test_merging_without_a_prune_phase_starts_at_random() -> None:
    pruned, _ = evolve((MergePhase(evaluations=12),), score=lambda _: (0.5, -1.0))
    assert [proposal.operator for proposal in pruned[:5]] == ["random"] * 4 + ["mutation"]


@pytest.mark.parametrize("window", [1, 8])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("retained", [2, 4])
def test_no_individual_repeats_an_earlier_one(retained: int, seed: int, window: int) -> None:
    """At EEP's rates a third of the children would; also those in flight count, which have no score yet."""
    phases = (PrunePhase(evaluations=150, initial=31), MergePhase(evaluations=50))
    proposals, _ = evolve(phases, window, seed, space=eep_space(retained, layers=8))
    assert len({proposal.phenotype_hash for proposal in proposals}) == len(proposals)


def test_a_space_without_anything_new_repeats() -> None:
    """One group of which 7 of 8 experts stay: 8 subsets in all."""
    proposals, _ = evolve((PrunePhase(evaluations=30, initial=10),), space=eep_space(7, groups=1, layers=4))
    phenotypes = [proposal.phenotype_hash for proposal in proposals]
    assert len(set(phenotypes)) == 8 and len(phenotypes) == 30


def test_a_phase_with_repeats_keeps_them_and_its_initial_ones_differ() -> None:
    phases = (PrunePhase(evaluations=150, initial=31, repeats=True), MergePhase(evaluations=50, repeats=True))
    proposals, _ = evolve(phases, 1, space=eep_space(2, layers=8))
    assert len({proposal.phenotype_hash for proposal in proposals[:31]}) == 31
    assert len({proposal.phenotype_hash for proposal in proposals}) < 120


@pytest.mark.parametrize(("repeats", "expected"), [(True, 0.75), (False, 0.5)])
def test_a_repeat_counts_among_the_parents_if_it_may_be(repeats: bool, expected: float) -> None:
    """Three times one genome and once another: as often a parent as there are individuals, or genomes."""
    space = eep_space(layers=4)
    phase = MergePhase(evaluations=9, crossover_rate=0.0, repeats=repeats)
    strategy = Evolution(space, phase, 0)
    one, two = (space.sample(generator(seed, 0), PHASES[0]).genome for seed in range(2))
    for index, genome in enumerate((one, one, one, two)):
        record = individual_record(index, "0", Offspring(genome, "random", ()), space.describe(genome), 0)
        strategy.tell(decided(record, (0.5, -1.0)))
    draws = [strategy.ask(index, False, None, set()).parents for index in range(4, 1004)]
    assert abs(np.mean([parents != (3,) for parents in draws]) - expected) < 4 * np.sqrt(
        expected * (1 - expected) / 1000
    )


def test_the_crossover_rate_decides_on_the_second_parent() -> None:
    """Among draws; where repeats are drawn anew crossover is more frequent, since mutation alone repeats more often."""
    for rate in (0.0, 0.3, 1.0):
        phases = (PrunePhase(evaluations=600, initial=10, crossover_rate=rate, repeats=True),)
        proposals, _ = evolve(phases, window=1, score=lambda _: (0.5, -1.0), space=eep_space(layers=32))
        crossed = [len(proposal.parents) == 2 for proposal in proposals[10:]]
        assert abs(np.mean(crossed) - rate) <= 4 * np.sqrt(rate * (1 - rate) / len(crossed))
        assert [proposal.operator == "crossover+mutation" for proposal in proposals[10:]] == crossed


def test_each_operator_has_its_own_margin() -> None:
    """Scores of 0.90, 0.89 ... 0.80: three are within crossover's margin, which takes four, nine within mutation's."""
    rule = ThresholdParents(crossover_margin=0.02, crossover_least=4, mutation_margin=0.08)
    phases = (PrunePhase(evaluations=500, initial=11, parents=rule),)

    def score(proposal: IndividualRecord) -> tuple[float, float]:
        return (0.9 - proposal.index / 100 if proposal.index < 11 else 0.1), -1.0

    proposals, _ = evolve(phases, window=1, score=score)
    crossed = [proposal.parents for proposal in proposals[11:] if len(proposal.parents) == 2]
    mutated = [proposal.parents for proposal in proposals[11:] if len(proposal.parents) == 1]
    assert {parent for parents in crossed for parent in parents} == {0, 1, 2, 3}
    assert {parent for parents in mutated for parent in parents} == set(range(9))


@pytest.mark.parametrize("window", [1, 4])
def test_merging_may_start_from_all_that_pruning_left(window: int) -> None:
    """Those within the margin are parents from the first child on, as long as merging finds nothing better."""
    phases = (PHASES[0], MergePhase(evaluations=60, start="all", parents=ThresholdParents(mutation_margin=0.05)))

    def score(proposal: IndividualRecord) -> tuple[float, float]:
        return (0.9 - proposal.index / 100 if proposal.phase == "0" else 0.1), -1.0

    proposals, _ = evolve(phases, window=window, score=score)
    mutated = {proposal.parents[0] for proposal in proposals[30:] if len(proposal.parents) == 1}
    crossed = {parent for proposal in proposals[30:] if len(proposal.parents) == 2 for parent in proposal.parents}
    assert mutated <= set(range(6)) and len(mutated) > 3
    assert crossed <= set(range(6)) and len(crossed) > 3
    best_only = (PHASES[0], phases[1].model_copy(update={"start": "best"}))
    alone, _ = evolve(best_only, window=window, score=lambda one: score(one) if one.phase == "0" else None)
    assert {proposal.parents for proposal in alone[30:]} == {(0,)}


def test_equal_genomes_count_once_among_the_parents() -> None:
    phases = (MergePhase(evaluations=10, entry_rate=0.0, normalise_rate=0.0, crossover_rate=1.0),)
    proposals, members = evolve(phases, window=1, space=eep_space(8, layers=4), score=lambda _: (0.5, -1.0))
    assert len({one.content_hash for one in members}) == 1
    assert all(proposal.parents == (0,) for proposal in proposals[1:])


def test_two_runs_are_the_same_and_another_seed_is_not() -> None:
    def trace(seed: int) -> list[Any]:
        return [(p.genome, p.operator, p.parents) for p in evolve(seed=seed)[0]]

    assert trace(3) == trace(3)
    assert trace(3) != trace(4)


def test_skipping_what_is_stored_changes_no_later_answer() -> None:
    proposals, members = evolve()
    schedule = schedule_of(PHASES, 4)
    for start in (7, 25, 41):
        strategy = evolution(eep_space(layers=4), PHASES, schedule, 0)
        told = 0
        for index in range(schedule.total):
            while told < schedule.visible(index):
                strategy.tell(members[told])
                told += 1
            if index < start:
                strategy.skip(index)
            else:
                taken = {one.phenotype_hash for one in proposals[:index]}
                made, before = strategy.ask(index, taken), proposals[index]
                assert (made.genome.to_bytes(), made.parents) == (before.genome, before.parents)


def test_generators_are_apart_by_seed_index_and_stream() -> None:
    keys = [(seed, index, stream) for seed in (0, 1) for index in (0, 1, 2**40) for stream in ("individual", "x")]
    draws = {key: generator(*key).integers(2**63) for key in keys}
    assert len(set(draws.values())) == len(keys)
    np.random.seed(0)  # noqa: NPY002 - the global generator must not matter
    assert all(generator(*key).integers(2**63) == drawn for key, drawn in draws.items())


def test_generators_draw_the_same_on_every_platform_and_version() -> None:
    assert generator(7, 3).bit_generator.random_raw() == 13237616554134437946


def test_a_methods_own_start_is_where_a_phase_names_it() -> None:
    class Started(EepSpace):
        def start(self, phase: PhaseConfig) -> Any:
            return Offspring(self.from_kept(np.tile(np.arange(4), (4, 1))), "start", ())

    plain = eep_space(layers=4)
    space = Started(**{field.name: getattr(plain, field.name) for field in fields(plain)})
    first = PHASES[0].model_copy(update={"init": ("random", START)})
    proposals, _ = evolve((first, *PHASES[1:]), space=space)
    assert [proposal.index for proposal in proposals if proposal.operator == "start"] == [0]
    assert not any(proposal.operator == "start" for proposal in evolve(space=space)[0])
    assert proposals[0].genome == space.from_kept(np.tile(np.arange(4), (4, 1))).to_bytes()


THREE = (
    PrunePhase(evaluations=20, initial=8, parents=TopKParents(k=4)),
    MergePhase(evaluations=12, parents=TopKParents(k=4)),
    MergePhase(evaluations=12, parents=TopKParents(k=4), sigma=0.01),
)


@pytest.mark.parametrize("seed", range(5))
def test_a_third_phase_starts_from_the_best_of_the_second(seed: int) -> None:
    """Though the first phase's best scored more: what phases are compared by is their own kind."""

    def score(proposal: IndividualRecord) -> tuple[float, float] | None:
        found = by_hash(proposal)
        return None if found is None else (found[0] / (1 + int(proposal.phase)), found[1])

    proposals, members = evolve(THREE, window=1, seed=seed, score=score)
    second = best_distinct(members[20:32])[0]
    assert proposals[32].parents == (second.index,)
    assert {parent for proposal in proposals[32:] for parent in proposal.parents} <= {second.index, *range(32, 44)}


def test_a_third_phase_starts_from_the_first_where_the_second_failed() -> None:
    proposals, members = evolve(
        THREE, window=1, score=lambda one: None if one.phase == "1" else (0.5, -float(one.index))
    )
    assert proposals[32].parents == (best_distinct(members[:20])[0].index,)
