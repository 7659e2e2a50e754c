"""The strategy `surrogate`: its posterior against the textbook's formula, what it learns, and what it may depend on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy.special import ndtri
from scipy.stats import rankdata
from search_samples import deepseek, eep_space, history_row
from store_samples import decided
from strategy_lab import Score, asked_and_told

from moevolve.search.genomes.contract.base import GenomeSpace
from moevolve.search.genomes.contract.phases import MergePhase, PhaseConfig, PrunePhase
from moevolve.search.genomes.eep.space import EepSpace
from moevolve.search.loop.search_loop import individual_record
from moevolve.search.strategies import surrogate
from moevolve.search.strategies.base import rank_key
from moevolve.search.strategies.phased import PhasedStrategy
from moevolve.search.strategies.schedule import Schedule
from moevolve.search.strategies.surrogate import LinearPosterior, Surrogate, targets_of
from moevolve.store.records import IndividualRecord
from moevolve.workers.contract.edits import Calibration

PRUNING = PrunePhase(evaluations=50, initial=12)
MERGING = MergePhase(evaluations=20)
EVOLUTION = {"random", "mutation", "crossover+mutation"}


def planted(space: EepSpace, failing: int = 11) -> Score:
    """Every expert of a group is worth something of its own; some candidates fail."""
    worth = np.random.default_rng(3).standard_normal((space.groups, space.experts))

    def score(made: IndividualRecord) -> tuple[float, float] | None:
        if failing and int(made.phenotype_hash[:4], 16) % failing == 3:
            return None
        total = float((space.from_bytes(made.genome).expert_merging.sum(axis=1) * worth).sum())
        return round(0.5 + total / 40, 2), round(total, 3)

    return score


def best_of(space: EepSpace) -> float:
    """The largest total of `planted`."""
    worth = np.random.default_rng(3).standard_normal((space.groups, space.experts))
    parts = np.sort(worth.reshape(space.groups, space.subsets.routing_groups, -1), axis=2)
    return float(parts[:, :, -space.retained // space.subsets.routing_groups :].sum())


def run(
    space: GenomeSpace[Any],
    phases: tuple[PhaseConfig, ...],
    score: Score,
    window: int = 4,
    seed: int = 0,
    resumed_at: int | None = None,
) -> list[IndividualRecord]:
    schedule = Schedule.of([(phase.kind, phase.evaluations, phase.initial) for phase in phases], window)

    def strategy() -> PhasedStrategy:
        firsts = [span.start for span in schedule.spans]
        pairs = zip(phases, firsts, strict=True)
        return PhasedStrategy([Surrogate(space, phase, seed, first) for phase, first in pairs], schedule)

    return asked_and_told(strategy, space, schedule, score, resumed_at)


@pytest.mark.parametrize("shape", [(60, 8), (8, 20)])
def test_the_posterior_is_the_textbook_s(shape: tuple[int, int]) -> None:
    """Bishop (2006), eqs. 3.53 and 3.54, inverted as they stand; draws have that mean and covariance."""
    rng = np.random.default_rng(shape[0])
    features = rng.standard_normal(shape)
    targets = features @ rng.standard_normal(shape[1]) / 2 + 0.3 * rng.standard_normal(shape[0])
    covariance = np.linalg.inv(4.0 * np.eye(shape[1]) + features.T @ features / 0.3**2)
    mean = covariance @ features.T @ targets / 0.3**2
    model = LinearPosterior(features, targets, precision=4.0, noise=0.3)
    assert np.allclose(model.mean, mean, rtol=0, atol=1e-10)
    draws = np.stack([model.draw(rng) for _ in range(5_000)])
    spread = np.sqrt(np.diag(covariance))
    assert np.abs((draws.mean(axis=0) - mean) / spread).max() < 5 / np.sqrt(len(draws))
    scaled = np.cov(draws.T) / np.outer(spread, spread)
    assert np.abs(scaled - covariance / np.outer(spread, spread)).max() < 0.1


def test_targets_are_normal_scores_of_fitness_and_tie_break() -> None:
    rng = np.random.default_rng(0)
    rows = [
        replace(history_row(index, "prune", float(rng.integers(4)) / 4), tie_break=float(rng.integers(9)))
        for index in range(50)
    ]
    values = np.array([(row.fitness, row.tie_break) for row in rows])
    expected = ndtri((rankdata(values, axis=0) - 0.5) / len(rows)).sum(axis=1)
    assert np.allclose(targets_of(rows), expected, atol=1e-12)
    off = replace(rows[0], tie_break=-1.0)
    far = replace(rows[0], tie_break=-1e9)
    assert np.array_equal(targets_of([off, *rows[1:]]), targets_of([far, *rows[1:]])), "how far off says nothing"
    level = [replace(row, fitness=0.5, tie_break=0.0) for row in rows]
    assert np.allclose(targets_of(level), 0.0)


def test_where_worth_adds_up_it_finds_the_best_choice_of_all() -> None:
    space = eep_space(2, 4, layers=6)
    members = run(space, (PrunePhase(evaluations=120, initial=31),), planted(space, failing=0))
    found = min(members, key=rank_key).tie_break
    assert found == pytest.approx(best_of(space), abs=1e-3)


def test_experts_of_every_routing_group_are_learned_apart() -> None:
    space = eep_space(8, 3, facts=deepseek())
    members = run(space, (PrunePhase(evaluations=90, initial=31),), planted(space, failing=0))
    for proposal in members:
        space.from_kept(space.kept(space.from_bytes(proposal.genome)))  # as many of each group, or it raises
    found = min(members, key=rank_key).tie_break
    assert found == pytest.approx(best_of(space), rel=0.02)


@pytest.mark.parametrize(("sign", "told"), [(1, True), (-1, True), (1, False)])
def test_what_the_calibration_says_of_experts_is_believed_as_far_as_scores_agree(
    sign: int, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """256 experts in eight layers, scores of 24 choices, and a statistic that is right or the reverse of right."""
    space = eep_space(8, "per_layer", layers=8, experts=32)
    worth = np.random.default_rng(3).standard_normal((8, 32))  # as in `planted`
    noise = np.random.default_rng(4).standard_normal((5, 8, 32))
    known = sign * worth + 0.5 * noise[0]
    sums = np.ones((8, 32, 3, 3))
    sums[:, :, 1, 1], sums[:, :, 0, 1], sums[:, :, 0, 2] = np.exp(noise[1:4])
    measured = {"counts": np.exp(known), "importance_sums": sums, "pair_norms": np.exp(noise[4])[:, :, None]}
    if told:
        space = space.calibrated(Calibration(measured))
    monkeypatch.setattr(surrogate, "_EVOLUTION_SHARE", 0.0)
    phase = PrunePhase(evaluations=32, initial=24)
    members = run(space, (phase,), planted(space, failing=0), window=1)
    made = np.mean([one.tie_break or 0.0 for one in members[24:]]) / best_of(space)
    assert made > 0.5 if told else made < 0.3


def test_who_makes_what() -> None:
    space = eep_space(layers=4)
    members = run(space, (PRUNING, MERGING), planted(space))
    assert {one.operator for one in members[:12]} == {"random"}
    learned = [one for one in members[12:] if one.operator.startswith("surrogate")]
    assert {one.operator for one in members[12:]} - {one.operator for one in learned} <= EVOLUTION
    assert {one.operator for one in learned} == {"surrogate"} and {one.phase for one in learned} == {"prune"}
    assert all(one.parents == () and "(learned from " in one.summary for one in learned)
    assert all(space.from_bytes(one.genome).one_hot for one in learned)
    best = min((one for one in members[: 50 - 3] if one.fitness is not None), key=rank_key)
    assert members[50].parents == (best.index,)
    failed = {one.index for one in members if one.fitness is None}
    assert failed and not failed & {parent for one in members for parent in one.parents}


def test_a_share_of_the_children_is_evolution_s(monkeypatch: pytest.MonkeyPatch) -> None:
    space = eep_space(groups="per_layer", layers=8)
    phases = (PrunePhase(evaluations=70, initial=10),)

    def bred() -> float:
        return float(np.mean([one.operator in EVOLUTION for one in run(space, phases, planted(space))[20:]]))

    assert bred() == pytest.approx(0.3, abs=0.15)
    for share in (0.0, 1.0):
        monkeypatch.setattr(surrogate, "_EVOLUTION_SHARE", share)
        assert bred() == share


def test_no_individual_repeats_an_earlier_one_while_there_are_others(monkeypatch: pytest.MonkeyPatch) -> None:
    space = eep_space(2, 2, layers=4)  # 784 in all
    with monkeypatch.context() as patch:
        patch.setattr(surrogate, "_EVOLUTION_SHARE", 0.0)
        members = run(space, (PrunePhase(evaluations=100, initial=20),), planted(space), 7)
    assert len({one.phenotype_hash for one in members}) == len(members)
    space = eep_space(7, 1, layers=4)
    members = run(space, (PrunePhase(evaluations=30, initial=10),), planted(space, failing=0))
    assert len({one.phenotype_hash for one in members}) == 8 and len(members) == 30
    for score in (lambda _: None, lambda _: (0.5, 0.0)):  # where everything fails, or scores the same
        members = run(eep_space(layers=4), (PRUNING,), score)
        assert len({one.phenotype_hash for one in members}) == len(members)


def test_skipping_what_is_stored_changes_no_later_answer() -> None:
    space = eep_space(layers=4)
    whole = run(space, (PRUNING, MERGING), planted(space), resumed_at=33)
    assert whole != run(space, (PRUNING, MERGING), planted(space), seed=1, resumed_at=61)


def test_only_the_newest_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """And failed ones are not among them."""
    space = eep_space(layers=4)
    rng = np.random.default_rng(0)
    made = [space.sample(rng, PRUNING) for _ in range(40)]
    rows = [individual_record(i, "prune", one, space.describe(one.genome), 0) for i, one in enumerate(made)]
    members = [decided(row, float(rng.random()), 0.0) for row in rows]
    members[38] = decided(rows[38], None)

    monkeypatch.setattr(surrogate, "_EVOLUTION_SHARE", 0.0)
    monkeypatch.setattr(surrogate, "_MEMORY", 10)

    def answer(told: list[IndividualRecord]) -> Any:
        strategy = Surrogate(space, PrunePhase(evaluations=50, initial=0), 0)
        for one in told:
            strategy.tell(one)
            strategy.ask(one.index, False, None, ())
        return strategy.ask(40, False, None, ()).genome

    changed = [replace(one, fitness=0.0) for one in members[:29]] + members[29:]
    assert answer(members) == answer(changed) == answer(members[29:])
    assert answer(members) != answer([*members[:29], replace(members[29], fitness=9.0), *members[30:]])
