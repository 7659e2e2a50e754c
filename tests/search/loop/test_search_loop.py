"""The driver on a real SQLite store: one population whatever the pool does, resume by replay, failures, reuse."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scripted_pool import ScriptedPool, Stopped
from search_lab import UnrulyPool, drive, make_lab_setup, population, repeated, run_config, scored, smooth, start

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.yaml_files import read_yaml
from moevolve.search.config.files import presets
from moevolve.search.config.run import RunConfig
from moevolve.search.loop import search_loop
from moevolve.search.loop.evaluation_cache import EvaluationCache
from moevolve.search.loop.scores import weighted_means
from moevolve.search.loop.search_loop import SearchLoop
from moevolve.search.strategies.phased import make_strategy
from moevolve.store.errors import StoreError
from moevolve.store.records import EvaluationRecord, Progress
from moevolve.store.repository import Store
from moevolve.workers.contract.edits import Edit, IdentityEdit
from moevolve.workers.contract.messages import EvaluationRequest

Opener = Callable[[str], Store]
WITHIN = {"rule": "threshold", "crossover_margin": 0.02, "mutation_margin": 0.05, "crossover_least": 3}
SIZES = {"evaluations": 35, "initial": 8}, {"evaluations": 40}
MODES: dict[str, dict[str, Any]] = {
    "steady": {},
    "generations": {"strategy": {"kind": "evolution", "mode": "generations", "generation": 7}},
    "threshold": {
        "phases": [
            {"kind": "prune", "evaluations": 30, "initial": 8, "parents": WITHIN},
            {"kind": "merge", "evaluations": 30, "crossover": "entries", "parents": WITHIN},
        ]
    },
    "authors": {
        "phases": [
            phase | size for phase, size in zip(read_yaml(presets()["authors"])["eep"]["phases"], SIZES, strict=True)
        ]
    },
    "nevergrad": {"strategy": "nevergrad:TwoPointsDE"},
    "surrogate": {"strategy": "surrogate"},
    "surrogate that forgets": {"strategy": {"kind": "surrogate", "memory": 20}},
    "two tasks": {"tasks": [{"name": "one", "weight": 2}, {"name": "two"}]},
    "phases one after the other": {"stop_at_recovery": 9.0},
    "tuning": {"genome": {"experts": 8, "active": 1}, "phases": [{"kind": "merge", "evaluations": 40}]},
}


@pytest.fixture(scope="module", params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def calm(mode: str, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Any, ...]]:
    """The population of a mode if nothing disturbs it."""
    with Store.open(f"sqlite:///{tmp_path_factory.mktemp('calm') / 'moevolve'}.db") as store:
        return undisturbed(store, run_config(**MODES[mode]))


@pytest.fixture
def open_store(tmp_path: Path) -> Iterator[Opener]:
    opened: list[Store] = []

    def open_one(name: str) -> Store:
        opened.append(Store.open(f"sqlite:///{tmp_path / name}.db"))
        return opened[-1]

    yield open_one
    for store in opened:
        store.close()


def undisturbed(store: Store, config: RunConfig) -> list[tuple[Any, ...]]:
    """The population with one worker, nothing repeated, nothing interrupted."""
    drive(store, start(store, config), UnrulyPool(0, workers=1, repeat=0.0))
    return population(store)


def test_order_and_number_of_completions_change_nothing(
    open_store: Opener, mode: str, calm: list[tuple[Any, ...]]
) -> None:
    config = run_config(**MODES[mode])
    assert len(calm) == make_lab_setup(config).schedule.total
    assert len({content for _, _, _, _, content, *_ in calm}) > 15
    for workers in (2, 50):  # fewer than the window, and more
        store = open_store(f"unruly-{workers}")
        setup = start(store, config)
        pool = UnrulyPool(seed=workers, workers=workers, repeat=0.5)
        drive(store, setup, pool)
        assert population(store) == calm
        # One more for the full model.
        assert pool.busiest <= setup.schedule.in_flight + 1


def test_a_driver_that_is_stopped_again_and_again_comes_to_the_same_end(
    open_store: Opener, mode: str, calm: list[tuple[Any, ...]]
) -> None:
    config, seed = run_config(**MODES[mode]), list(MODES).index(mode)
    store = open_store("stopped")
    start(store, config)
    rng = np.random.default_rng(seed)
    known: set[str] = set()
    stops, finished = 0, False
    while not finished:
        stop_at = int(rng.integers(12)) if stops < 8 else None
        pool = UnrulyPool(100 * seed + stops, workers=int(rng.integers(1, 8)), stop_at=stop_at)
        try:
            drive(store, make_lab_setup(config), pool)
            finished = True
        except Stopped:
            stops += 1
        # What was delivered before is in the store, whatever ended the driver.
        assert not known & set(pool.submitted)
        known |= set(pool.delivered)
    assert stops >= 3
    assert population(store) == calm


def test_a_search_ends_before_a_phase_that_isnt_needed(open_store: Opener) -> None:
    whole = open_store("whole")
    expected = undisturbed(whole, run_config(stop_at_recovery=9.0))
    best = max(row.fitness for row in whole.history("lab-1")[:30] if row.fitness is not None)
    reports = drive(whole, make_lab_setup(run_config(stop_at_recovery=9.0)), UnrulyPool(0))
    full = reports[-1].full
    assert full is not None and reports[-1].total == 60
    for share, count in ((best / full - 1e-9, 30), (best / full + 1e-9, 60)):
        config = run_config(stop_at_recovery=share)
        store, stops, finished = open_store(f"share {count}"), 0, False
        start(store, config)
        while not finished:
            pool = UnrulyPool(10 * stops, stop_at=4 if stops < 5 else None)
            try:
                reports, finished = drive(store, make_lab_setup(config), pool), True
            except Stopped:
                stops += 1
        assert stops == 5 and reports[-1].done == reports[-1].total == count
        assert population(store) == expected[:count]


def test_a_full_model_that_gets_nothing_right_is_reached_by_every_candidate(open_store: Opener) -> None:
    def score(edit: Edit) -> tuple[float, float] | None:
        return (0.0, -1.0) if isinstance(edit, IdentityEdit) else smooth(edit)

    config, store = run_config(stop_at_recovery=0.99), open_store("s")
    start(store, config)
    reports = drive(store, make_lab_setup(config), ScriptedPool(scored(score)))
    assert reports[-1].full == 0 and reports[-1].done == reports[-1].total == 30


def test_resuming_a_finished_search_asks_for_nothing(open_store: Opener) -> None:
    config = run_config()
    store = open_store("s")
    expected = undisturbed(store, config)
    pool = UnrulyPool(1)
    reports = drive(store, make_lab_setup(config), pool)
    assert pool.submitted == []
    assert population(store) == expected
    assert reports[-1].done == reports[-1].total == 60
    assert reports[-1].full == pytest.approx(0.9, abs=0.1)


def test_each_seed_has_a_population_of_its_own(open_store: Opener) -> None:
    one = undisturbed(open_store("one"), run_config(seed=1))
    two = undisturbed(open_store("two"), run_config(seed=2))
    assert one != two


def test_failed_candidates_are_recorded_and_never_parents_or_best(open_store: Opener) -> None:
    store = open_store("s")
    setup = start(store, run_config())
    reports = drive(store, setup, UnrulyPool(3))
    rows = store.history(setup.search_id)
    failed = {row.index for row in rows if row.status == "failed"}
    assert len(failed) >= 3
    assert {row.failure for row in rows if row.index in failed} == {"logits are not finite"}
    assert all(row.fitness is None for row in rows if row.index in failed)
    assert not failed & {parent for row in rows for parent in row.parents}
    best = reports[-1].best
    assert best is not None and best[0] not in failed
    assert best[1] == max(row.fitness for row in rows if row.fitness is not None)
    assert reports[-1].failed == len(failed)
    assert not failed & {row.index for row in store.best_of_search(setup.search_id, limit=100)}


def test_a_search_whose_candidates_all_fail_completes(open_store: Opener) -> None:
    def only_full(edit: Edit) -> tuple[float, float] | None:
        return (0.9, -0.1) if isinstance(edit, IdentityEdit) else None

    store = open_store("s")
    reports = drive(store, start(store, run_config()), UnrulyPool(3, only_full))
    assert reports[-1].failed == 60 and reports[-1].best is None
    assert {row.status for row in store.history("lab-1")} == {"failed"}


def test_evolution_climbs(open_store: Opener) -> None:
    store = open_store("s")
    phases = [
        {"kind": "prune", "evaluations": 200, "initial": 31, "row_rate": 0.3},
        {"kind": "merge", "evaluations": 200},
    ]
    drive(store, start(store, run_config(phases=phases)), UnrulyPool(0))
    fitness = [row.fitness or 0.0 for row in store.history("lab-1")]
    assert max(fitness[:31]) < max(fitness[:200]) < max(fitness)


def test_the_full_models_failure_ends_the_search(open_store: Opener) -> None:
    store = open_store("s")
    pool = UnrulyPool(0, lambda edit: None if isinstance(edit, IdentityEdit) else smooth(edit))
    setup = start(store, run_config())
    with pytest.raises(UserError, match=r"the unedited model can't be evaluated: logits are not finite"):
        drive(store, setup, pool)
    assert drive(store, setup, UnrulyPool(0))[-1].done == 60, "once it can be evaluated, the search goes on"


def test_no_phenotype_is_submitted_twice(open_store: Opener) -> None:
    store = open_store("s")
    phases = [{"kind": "prune", "evaluations": 120, "initial": 60}]
    config = run_config(genome={"experts": 2, "groups": 1}, phases=phases)
    setup = start(store, config)
    pool = UnrulyPool(0)
    reports = drive(store, setup, pool)
    # 28 subsets of two out of eight, and the full model.
    assert len(pool.submitted) <= 29
    assert not repeated(pool.submitted)
    rows = store.history(setup.search_id)
    assert reports[-1].evaluated == len(pool.submitted)
    # All but the full model are individuals.
    assert reports[-1].reused == len(rows) - (len(pool.submitted) - 1)
    by_content = {row.content_hash: (row.status, row.fitness) for row in rows}
    assert all(by_content[row.content_hash] == (row.status, row.fitness) for row in rows)


def test_a_second_search_reuses_what_the_first_found_out(open_store: Opener) -> None:
    store = open_store("s")
    drive(store, start(store, run_config()), UnrulyPool(0))
    twin = start(store, run_config(name="twin"), "lab-2")
    pool = UnrulyPool(1)
    reports = drive(store, twin, pool)
    assert pool.submitted == []
    assert population(store, "lab-2") == population(store, "lab-1")
    assert reports[-1].reused == 60 and reports[-1].evaluated == 0
    # Another task knows nothing of them.
    other = start(store, run_config(name="other", tasks=[{"name": "two"}]), "lab-3")
    pool = UnrulyPool(1)
    drive(store, other, pool)
    assert len(pool.submitted) > 40


def test_progress_counts_up_to_the_end(open_store: Opener) -> None:
    store = open_store("s")
    reports = drive(store, start(store, run_config()), UnrulyPool(5))
    done = [report.done for report in reports]
    assert done == sorted(done) and done[-1] == 60
    assert [report.phase for report in reports] == sorted((r.phase for r in reports), key=("prune", "merge").index)
    best = [report.best[1] for report in reports if report.best is not None]
    assert best == sorted(best)


def test_fitness_is_the_weighted_mean_over_tasks() -> None:
    def evaluation(score: float, gold: float) -> EvaluationRecord:
        return EvaluationRecord(
            phenotype_hash="p",
            model_fingerprint="m",
            engine_fingerprint="e",
            task_fingerprint="t",
            task="t",
            split="search",
            metric="accuracy",
            score=score,
            gold_logprob=gold,
        )

    found = weighted_means((evaluation(0.5, -1.0), evaluation(0.8, -4.0)), (2.0, 1.0))
    assert found == pytest.approx((0.6, -2.0))


class Tampered:
    """A search stopped half-way, and SQL to change it behind the driver's back."""

    def __init__(self, open_store: Opener, folder: Path) -> None:
        self.config = run_config()
        self.store = open_store("tampered")
        self._file = folder / "tampered.db"
        with pytest.raises(Stopped):
            drive(self.store, start(self.store, self.config), UnrulyPool(2, stop_at=25))
        rows = self.store.history("lab-1")
        self.pending = [row.index for row in rows if row.status == "pending"]
        assert len(rows) > 15 and self.pending

    def change(self, sql: str, *values: Any) -> None:
        with sqlite3.connect(self._file) as connection:
            connection.execute("pragma foreign_keys = off")
            assert connection.execute(sql, values).rowcount > 0
        connection.close()

    def resume(self) -> None:
        drive(self.store, make_lab_setup(self.config), UnrulyPool(3))


@pytest.fixture
def tampered(open_store: Opener, tmp_path: Path) -> Tampered:
    return Tampered(open_store, tmp_path)


def test_a_gap_in_the_population_is_refused(tampered: Tampered) -> None:
    tampered.change("delete from individuals where idx = 5")
    with pytest.raises(StoreError, match=r"lab-1: individual 5 is missing from the store"):
        tampered.resume()


@pytest.mark.parametrize("column", ["content_hash", "genome"])
def test_a_changed_pending_individual_is_refused(tampered: Tampered, column: str) -> None:
    index = tampered.pending[-1]
    (other,) = (getattr(row, column) for row in tampered.store.history("lab-1") if row.index == 0)
    tampered.change(f"update individuals set {column} = ? where idx = ?", other, index)
    with pytest.raises(StoreError, match=rf"individual {index} can't be reproduced"):
        tampered.resume()


def test_a_changed_score_shows_in_the_individuals_bred_from_it(tampered: Tampered) -> None:
    # The best of what the pending ones were made from becomes the worst.
    tampered.change("update individuals set fitness = 1 - fitness where status = 'ok'")
    with pytest.raises(StoreError, match=r"can't be reproduced from its configuration"):
        tampered.resume()


def test_an_unfinished_ancestor_is_refused(tampered: Tampered) -> None:
    tampered.change("update individuals set status = 'pending', fitness = null, tie_break = null where idx = 0")
    with pytest.raises(StoreError, match=r"individual 0 has no evaluation, though later ones were made from it"):
        tampered.resume()


def test_another_configuration_is_not_continued(tampered: Tampered) -> None:
    tampered.config = run_config(seed=2)
    with pytest.raises(StoreError, match=r"can't be reproduced from its configuration"):
        tampered.resume()


def test_depth_is_one_more_than_the_deepest_parents(open_store: Opener) -> None:
    store = open_store("s")
    undisturbed(store, run_config())
    rows = store.history("lab-1")
    for row in rows:
        assert row.depth == max((rows[parent].depth + 1 for parent in row.parents), default=0)
    assert max(row.depth for row in rows) > 3


def test_pace_is_measured_from_the_first_evaluation_on(open_store: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that only polls move: the model's loading, before anything arrives, is left out."""
    now = 100.0

    def after_a_while(waiting: Sequence[EvaluationRequest]) -> Sequence[EvaluationRequest]:
        nonlocal now
        now += 3.0
        return waiting[:2]

    monkeypatch.setattr(search_loop.time, "monotonic", lambda: now)
    store = open_store("s")
    setup = start(store, run_config())
    seen: list[tuple[float, Progress]] = []
    cache = EvaluationCache(
        store, ScriptedPool(scored(smooth), after_a_while), setup.search_id, setup.facts.fingerprint, "engine"
    )
    strategy = make_strategy(setup.config, setup.space, setup.schedule)
    SearchLoop(setup, strategy, store, cache, lambda progress: seen.append((now, progress))).run()
    first = next(place for place, (_, progress) in enumerate(seen) if progress.evaluated)
    (begun, at_first), later = seen[first], seen[first + 1 :]
    assert all((progress.rate, progress.left) == (None, None) for _, progress in seen[: first + 1])
    for moment, progress in later:
        elapsed, more = moment - begun, progress.done - at_first.done
        if progress.evaluated < 2 or not more or not elapsed:
            assert (progress.rate, progress.left) == (None, None)
            continue
        assert progress.rate == pytest.approx((progress.evaluated - 1) / elapsed)
        assert progress.left == pytest.approx((progress.total - progress.done) * elapsed / more)
    assert later[-1][1].left == 0.0 and len(later) > 10
