"""Parents by fresh subsets of the search rows: against plain numpy, and which rows are drawn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from search_lab import UnrulyPool, drive, population, run_config, start
from search_samples import decided, eep_space, history_row, many
from store_samples import evaluation

from moevolve.search.config.phases import PrunePhase, ThresholdParents, TopKParents
from moevolve.search.loop import history
from moevolve.search.loop.evaluation_cache import EvaluationCache
from moevolve.search.loop.history import FreshRows, Ranking, fresh_rows, rank_key
from moevolve.search.loop.schedule import Schedule
from moevolve.search.strategies.evolution import Evolution
from moevolve.store.errors import StoreError
from moevolve.store.records import EvaluationRecord, IndividualRecord
from moevolve.store.repository import Store

Rule = TopKParents | ThresholdParents
WEIGHTS = (1.0, 3.0)
SIZES = (16, 8)
"""Powers of two, as are the sums of the weights: means are exact in floats, and so are ties."""
RULES: tuple[Rule, ...] = (
    TopKParents(k=3, rows=0.5, generation=8),
    TopKParents(k=3, rows=0.25, generation=1),
    ThresholdParents(crossover_margin=0.02, mutation_margin=0.125, crossover_least=3, rows=0.5, generation=8),
)


@dataclass
class Told:
    """Sixty decided individuals and their outcomes; a few genomes repeat, one in six fails, some are penalised.

    Attributes:
        asked: phenotype hashes that were read, in order.
    """

    seed: int
    asked: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        self.outcomes = {
            f"p{genome}": [(rng.random(size) < rng.choice([0.5, 0.75])).astype(np.float32) for size in SIZES]
            for genome in range(45)
        }
        penalties = {key: int(rng.integers(3)) / 16 for key in self.outcomes}
        failed = {key for key in self.outcomes if rng.random() < 1 / 6}
        self.members = []
        for index, genome in enumerate(rng.integers(45, size=60)):
            key = f"p{genome}"
            fitness = self.mean(key, [np.arange(size) for size in SIZES]) - penalties[key]
            row = replace(history_row(index, "prune", None), content_hash=f"h{genome}", phenotype_hash=key)
            self.members.append(decided(row, None if key in failed else (fitness, -float(genome % 2))))
        self.penalties = penalties

    def mean(self, key: str, rows: Sequence[NDArray[np.int64]]) -> float:
        means = [
            found[chosen].astype(np.float64).mean() for found, chosen in zip(self.outcomes[key], rows, strict=True)
        ]
        return float(np.average(means, weights=WEIGHTS))

    def read(self, phenotypes: Sequence[str]) -> dict[str, list[EvaluationRecord]]:
        self.asked += phenotypes
        return {key: [_record(found) for found in self.outcomes[key]] for key in phenotypes}

    def oracle(self, rule: Rule, index: int, operator: Literal["crossover", "mutation"]) -> list[int]:
        """Indices of possible parents of `index`, from scratch; the phase begins at 5."""
        begin = 5 + (index - 5) // rule.generation * rule.generation
        assert rule.rows is not None
        rows = fresh_rows(7, begin, SIZES, rule.rows)
        first = {one.content_hash: one for one in reversed(self.members) if one.status == "ok"}
        on_rows = {
            one.index: self.mean(one.phenotype_hash, rows) - self.penalties[one.phenotype_hash]
            for one in first.values()
        }
        ranked = sorted(first.values(), key=lambda one: (-on_rows[one.index], *rank_key(one)))
        if isinstance(rule, TopKParents):
            return [one.index for one in ranked[: rule.k]]
        best, margins = max(on_rows.values()), {"crossover": rule.crossover_margin, "mutation": rule.mutation_margin}
        least = {"crossover": rule.crossover_least, "mutation": 0}[operator]
        return [
            one.index
            for place, one in enumerate(ranked)
            if place < least or on_rows[one.index] >= best - margins[operator] - 1e-9
        ]


def _record(outcomes: NDArray[np.float32], metric: str = "mean", score: float | None = None) -> EvaluationRecord:
    mean = float(outcomes.astype(np.float64).mean()) if score is None else score
    return evaluation("p", mean, metric=metric, outcomes=outcomes.astype("<f4").tobytes())


def evolution(told: Told, rule: Rule) -> Evolution:
    phase = PrunePhase(evaluations=200, parents=rule)
    return Evolution(eep_space(layers=4), phase, 7, 5, FreshRows(rule, WEIGHTS, 7, 5, told.read))


@many
@given(st.integers(0, 2**20), st.sampled_from(RULES), st.integers(60, 150))
def test_possible_parents_are_the_best_on_their_generations_rows(seed: int, rule: Rule, index: int) -> None:
    told = Told(seed)
    strategy = evolution(told, rule)
    for one in told.members[:40]:
        strategy.tell(one)
    strategy.pool(index - 1, None)
    for one in told.members[40:]:
        strategy.tell(one)
    pool = strategy.pool(index, None)
    assert pool is not None
    assert [one.index for one in pool.crossover] == told.oracle(rule, index, "crossover")
    assert [one.index for one in pool.mutation] == told.oracle(rule, index, "mutation")
    assert len(told.asked) == len(set(told.asked)), "nothing is read twice"


@pytest.mark.parametrize("seed", range(5))
def test_what_a_phase_starts_from_is_compared_on_the_same_rows(seed: int) -> None:
    told = Told(seed)
    rule = RULES[0]
    best = min((one for one in told.members if one.status == "ok"), key=rank_key)
    strategy = evolution(told, rule)
    for one in told.members:
        if one.content_hash != best.content_hash:
            strategy.tell(one)
    for index in range(60, 120, 8):
        pool = strategy.pool(index, best)
        assert pool is not None
        assert [one.index for one in pool.mutation] == told.oracle(rule, index, "mutation")


def test_who_leads_changes_with_the_generation_and_only_with_it() -> None:
    told = Told(1)
    strategy = evolution(told, RULES[0])
    for one in told.members:
        strategy.tell(one)
    pools = {index: strategy.pool(index, None) for index in range(61, 61 + 10 * 8)}
    leaders = [
        {tuple(one.index for one in pools[index].mutation) for index in range(begin, begin + 8)}  # type: ignore[union-attr]
        for begin in range(61, 61 + 10 * 8, 8)
    ]
    assert all(len(same) == 1 for same in leaders)
    assert len(set.union(*leaders)) > 4


def test_fitness_on_rows_is_the_tasks_own_metric() -> None:
    rng = np.random.default_rng(0)
    likely = rng.random(30).astype(np.float32)
    whole = float(np.exp(np.log(likely.astype(np.float64)).mean()))
    one = decided(history_row(0, "tune", None), (whole - 0.25, -1.0))
    rule = TopKParents(rows=0.4)
    fresh = FreshRows(rule, (2.0,), 3, 0, lambda _: {"p0": [_record(likely, "geometric_mean", whole)]})
    (rows,) = fresh_rows(3, 0, (30,), 0.4)
    expected = np.exp(np.log(likely[rows].astype(np.float64)).mean()) - 0.25
    assert fresh.fitness(20, [one])[0] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("size", "share", "drawn"), [(400, 0.5, 200), (7, 0.3, 2), (1, 0.5, 1), (2, 0.99, 1), (9, 1e-3, 1)]
)
def test_so_many_rows_are_drawn_and_none_of_them_twice(size: int, share: float, drawn: int) -> None:
    for begin in range(50):
        (rows,) = fresh_rows(0, begin, (size,), share)
        assert len(rows) == len(set(rows.tolist())) == drawn
        assert set(rows.tolist()) <= set(range(size))


def test_every_row_is_drawn_in_its_share_of_the_generations() -> None:
    sizes, share, draws = (20, 7), 0.3, 4000
    drawn = [fresh_rows(11, 32 * generation, sizes, share) for generation in range(draws)]
    for task, (size, count) in enumerate(zip(sizes, (6, 2), strict=True)):
        seen = np.bincount(np.concatenate([rows[task] for rows in drawn]), minlength=size)
        expected = count / size
        assert np.abs(seen / draws - expected).max() < 4.5 * np.sqrt(expected * (1 - expected) / draws)
    # One generation's rows say nothing of the next one's, nor one task's of the other's.
    has = np.array([[0 in rows[0], 0 in rows[1]] for rows in drawn], dtype=float)
    for one, other in ((has[:-1, 0], has[1:, 0]), (has[:, 0], has[:, 1])):
        assert abs(np.corrcoef(one, other)[0, 1]) < 4.5 / np.sqrt(draws)


def test_rows_are_a_function_of_seed_and_generation() -> None:
    def key(*where: int) -> tuple[int, ...]:
        (rows,) = fresh_rows(*where, (50,), 0.5)
        return tuple(rows.tolist())

    assert key(1, 32) == key(1, 32)
    assert len({key(seed, begin) for seed in range(5) for begin in range(0, 320, 32)}) == 50


@pytest.mark.parametrize(("rule", "kept"), [(TopKParents(k=1, rows=0.5), 10), (TopKParents(k=2, rows=0.5), 20)])
def test_the_best_on_all_rows_stay_possible_parents(monkeypatch: pytest.MonkeyPatch, rule: Rule, kept: int) -> None:
    monkeypatch.setattr(history, "FRESH", 10)
    ranking, told = Ranking(rule), Told(2)
    for count, one in enumerate(told.members, start=1):
        ranking.add(one)
        first = {each.content_hash: each for each in reversed(told.members[:count]) if each.status == "ok"}
        assert list(ranking) == sorted(first.values(), key=rank_key)[:kept]


PARENTS = {"k": 4, "rows": 0.5, "generation": 8}
PHASES = [
    {"kind": "prune", "evaluations": 43, "initial": 8, "parents": PARENTS},
    {"kind": "merge", "evaluations": 37, "entry_rate": 0.1, "parents": PARENTS},
]
TASKS = [{"name": "one", "weight": 2}, {"name": "two"}]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(f"sqlite:///{tmp_path / 's.db'}") as opened:
        yield opened


def test_a_searchs_parents_lead_on_the_outcomes_that_the_store_has(store: Store) -> None:
    setup = start(store, run_config(phases=PHASES, tasks=TASKS))
    drive(store, setup, UnrulyPool(0))
    rows = store.history("lab-1")
    fingerprints = [split.fingerprint for split in setup.splits("search")]
    outcomes: dict[str, NDArray[np.float64]] = {}
    for row in rows:
        found = {
            one.task_fingerprint: one
            for one in store.evaluations(row.phenotype_hash, "weights", "engine", fingerprints)
        }
        if row.status == "ok":
            of_tasks = [np.frombuffer(found[key].outcomes or b"", dtype="<f4") for key in fingerprints]
            outcomes[row.phenotype_hash] = np.stack(of_tasks).astype(np.float64)
    fresh = stale = 0
    for row in rows:
        possible = _four_best(rows, row, setup.schedule, outcomes, fresh_only=True)
        assert set(row.parents) <= possible
        fresh += bool(row.parents)
        stale += bool(set(row.parents) - _four_best(rows, row, setup.schedule, outcomes, fresh_only=False))
    assert fresh > 50 and stale > 10, "the rows matter"


def _four_best(
    rows: Sequence[IndividualRecord],
    child: IndividualRecord,
    schedule: Schedule,
    outcomes: dict[str, NDArray[np.float64]],
    fresh_only: bool,
) -> set[int]:
    """Indices of the four best that a child may see, on its generation's rows or on all."""
    span = schedule.span(child.index)
    visible = [one for one in rows[: schedule.visible(child.index)] if one.status == "ok"]
    own = [one for one in visible if one.index >= span.start]
    own += sorted((one for one in visible if one.index < span.start), key=rank_key)[:1]
    begin = span.start + (child.index - span.start) // 8 * 8
    drawn = fresh_rows(1, begin, (20, 20), 0.5) if fresh_only else [np.arange(20)] * 2

    def rank(one: IndividualRecord) -> tuple[float, ...]:
        first, second = (of[chosen].mean() for of, chosen in zip(outcomes[one.phenotype_hash], drawn, strict=True))
        return (-round((2 * first + second) / 3, 12), *rank_key(one))

    return {one.index for one in sorted(own, key=rank)[:4]}


def test_only_the_option_makes_the_difference(tmp_path: Path) -> None:
    """The same initial individuals, other children; and a generation that is the whole phase has one set of rows."""

    def searched(name: str, **parents: Any) -> list[tuple[Any, ...]]:
        with Store.open(f"sqlite:///{tmp_path / name}.db") as opened:
            phases = [phase | {"parents": {"k": 4} | parents} for phase in PHASES]
            drive(opened, start(opened, run_config(phases=phases)), UnrulyPool(0))
            return population(opened)

    plain, half, long = searched("plain"), searched("half", rows=0.5), searched("long", rows=0.5, generation=99)
    assert plain[:8] == half[:8] == long[:8]
    assert plain != half and half != long


def test_a_resumed_search_reads_its_possible_parents_at_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    config = run_config(phases=PHASES)
    setup = start(store, config)
    drive(store, setup, UnrulyPool(0))
    expected = population(store)
    # As if it had been killed with the last window under evaluation.
    store.retry("lab-1", 77)
    reads: list[int] = []
    real = EvaluationCache.stored

    def counted(cache: EvaluationCache, phenotypes: Sequence[str], splits: Any) -> Any:
        reads.append(len(phenotypes))
        return real(cache, phenotypes, splits)

    monkeypatch.setattr(EvaluationCache, "stored", counted)
    drive(store, setup, UnrulyPool(1))
    assert population(store) == expected
    assert reads[0] > 20 and sum(reads[1:]) <= 3


def test_outcomes_that_are_gone_are_missed_by_name(store: Store) -> None:
    setup = start(store, run_config())
    drive(store, setup, UnrulyPool(0))
    cache = EvaluationCache(store, UnrulyPool(0), "lab-1", "weights", "engine")
    read = partial(cache.stored, splits=setup.splits("search"))
    row = next(row for row in store.history("lab-1") if row.status == "ok")
    ((found,),) = read([row.phenotype_hash]).values()
    assert found.outcomes is not None and found.phenotype_hash == row.phenotype_hash
    with pytest.raises(StoreError, match=r"phenotype nobody has no outcomes on task one, split search"):
        read(["nobody"])
