"""The driver on a real SQLite store: one population whatever the pool does, resume by replay, failures, reuse."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scripted_pool import ScriptedPool, Stopped
from search_lab import UnrulyPool, drive, make_lab_setup, population, repeated, run_config, scored, smooth, start
from store_samples import evaluation

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.yaml_files import read_yaml
from moevolve.search.config.files import presets
from moevolve.search.config.run import RunConfig
from moevolve.search.loop import search_loop
from moevolve.search.loop.evaluation_cache import EvaluationCache
from moevolve.search.loop.scores import ranking_of
from moevolve.search.loop.search_loop import SearchLoop
from moevolve.search.strategies.phased import make_strategy
from moevolve.store.errors import StoreError
from moevolve.store.records import FULL_MODEL, Progress
from moevolve.store.repository import Store
from moevolve.workers.contract.edits import Edit, IdentityEdit
from moevolve.workers.contract.messages import EvaluationRequest
from moevolve.workers.methods.repair.edit import RepairSettings

IN_MEMORY = "sqlite:///:memory:"
SIZES = {"evaluations": 30, "initial": 8}, {"evaluations": 30}
MODES: dict[str, dict[str, Any]] = {
    "steady": {},
    "two tasks": {"tasks": [{"name": "one", "weight": 2}, {"name": "two"}]},
    "authors": {
        "phases": [
            phase | size for phase, size in zip(read_yaml(presets()["authors"])["eep"]["phases"], SIZES, strict=True)
        ]
    },
    "nevergrad": {"strategy": "nevergrad:TwoPointsDE"},
    "surrogate": {"strategy": "surrogate"},
}


@pytest.fixture(scope="module", params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def calm(mode: str) -> list[tuple[Any, ...]]:
    """The population of a mode if nothing disturbs it."""
    with Store.open(IN_MEMORY) as store:
        return undisturbed(store, run_config(**MODES[mode]))


def undisturbed(store: Store, config: RunConfig) -> list[tuple[Any, ...]]:
    """The population with one worker, nothing repeated, nothing interrupted."""
    drive(store, start(store, config), UnrulyPool(0, workers=1, repeat=0.0))
    return population(store)


def test_order_and_number_of_completions_change_nothing(mode: str, calm: list[tuple[Any, ...]]) -> None:
    config = run_config(**MODES[mode])
    assert len(calm) == make_lab_setup(config).schedule.total
    assert len({content for _, _, _, _, content, *_ in calm}) > 15
    for workers in (2, 50):  # fewer than the window, and more
        with Store.open(IN_MEMORY) as store:
            setup = start(store, config)
            pool = UnrulyPool(seed=workers, workers=workers, repeat=0.5)
            drive(store, setup, pool)
            assert population(store) == calm
            # One more for the full model.
            assert pool.busiest <= setup.schedule.window + 1


def test_a_driver_that_is_stopped_again_and_again_comes_to_the_same_end(
    store: Store, mode: str, calm: list[tuple[Any, ...]]
) -> None:
    config, seed = run_config(**MODES[mode]), list(MODES).index(mode)
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


def test_a_search_ends_before_a_phase_that_isnt_needed(store: Store) -> None:
    expected = undisturbed(store, run_config(skip_phases_at=9.0))
    best = max(row.fitness for row in store.history("lab-1")[:30] if row.fitness is not None)
    reports = drive(store, make_lab_setup(run_config(skip_phases_at=9.0)), UnrulyPool(0))
    full = reports[-1].full
    assert full is not None and reports[-1].total == 60
    for share, count in ((best / full - 1e-9, 30), (best / full + 1e-9, 60)):
        config = run_config(skip_phases_at=share)
        with Store.open(IN_MEMORY) as other:
            start(other, config)
            for attempt in range(3):
                with pytest.raises(Stopped):
                    drive(other, make_lab_setup(config), UnrulyPool(10 * attempt, stop_at=4))
            reports = drive(other, make_lab_setup(config), UnrulyPool(50))
            assert reports[-1].done == reports[-1].total == count
            assert population(other) == expected[:count]


def test_a_full_model_that_gets_nothing_right_ends_no_search(store: Store) -> None:
    def score(edit: Edit) -> tuple[float, float] | None:
        return (0.0, -1.0) if isinstance(edit, IdentityEdit) else smooth(edit)

    reports = drive(store, start(store, run_config(skip_phases_at=0.99)), ScriptedPool(scored(score)))
    assert reports[-1].full == 0 and reports[-1].done == reports[-1].total == 60


def test_a_search_reports_its_progress_and_a_finished_one_asks_for_nothing(store: Store) -> None:
    reports = drive(store, start(store, run_config()), UnrulyPool(3))
    done = [report.done for report in reports]
    assert done == sorted(done) and done[-1] == reports[-1].total == 60
    assert [report.phase for report in reports] == sorted((r.phase for r in reports), key=("prune", "merge").index)
    found = [report.best[1] for report in reports if report.best is not None]
    assert found == sorted(found) and reports[-1].full == pytest.approx(0.9, abs=0.1)
    rows = store.history("lab-1")
    for row in rows:
        assert row.depth == max((rows[parent].depth + 1 for parent in row.parents), default=0)
    assert max(row.depth for row in rows) > 3
    failed = {row.index for row in rows if row.status == "failed"}
    assert len(failed) == reports[-1].failed >= 3
    assert {(row.failure, row.fitness) for row in rows if row.index in failed} == {("logits are not finite", None)}
    assert not failed & {parent for row in rows for parent in row.parents}
    best = reports[-1].best
    assert best is not None and best[0] not in failed
    assert best[1] == max(row.fitness for row in rows if row.fitness is not None)
    assert not failed & {row.index for row in store.best_of_search("lab-1", limit=100)}
    before, pool = population(store), UnrulyPool(1)
    assert drive(store, make_lab_setup(run_config()), pool)[-1].done == 60
    assert pool.submitted == [] and population(store) == before


def test_evolution_climbs(store: Store) -> None:
    phases = [
        {"kind": "prune", "evaluations": 100, "initial": 20, "replace_rate": 0.3},
        {"kind": "merge", "evaluations": 100},
    ]
    drive(store, start(store, run_config(phases=phases)), UnrulyPool(0))
    fitness = [row.fitness or 0.0 for row in store.history("lab-1")]
    assert max(fitness[:20]) < max(fitness[:100]) < max(fitness)


def test_the_full_models_failure_ends_the_search(store: Store) -> None:
    pool = UnrulyPool(0, lambda edit: None if isinstance(edit, IdentityEdit) else smooth(edit))
    setup = start(store, run_config())
    with pytest.raises(UserError, match=r"the unedited model can't be evaluated: logits are not finite"):
        drive(store, setup, pool)
    assert drive(store, setup, UnrulyPool(0))[-1].done == 60, "once it can be evaluated, the search goes on"


def test_no_phenotype_is_submitted_twice(store: Store) -> None:
    phases = [{"kind": "prune", "evaluations": 80, "initial": 60}]
    setup = start(store, run_config(genome={"experts": 2, "groups": 1}, phases=phases))
    pool = UnrulyPool(0)
    reports = drive(store, setup, pool)
    # 28 subsets of two out of eight, and the full model, which is no individual.
    assert len(pool.submitted) <= 29 and not repeated(pool.submitted)
    rows = store.history(setup.search_id)
    assert (reports[-1].evaluated, reports[-1].reused) == (len(pool.submitted), len(rows) - (len(pool.submitted) - 1))
    by_content = {row.content_hash: (row.status, row.fitness) for row in rows}
    assert all(by_content[row.content_hash] == (row.status, row.fitness) for row in rows)


def test_a_second_search_reuses_what_the_first_found_out(store: Store) -> None:
    drive(store, start(store, run_config()), UnrulyPool(0))
    twin = start(store, run_config(name="twin"), "lab-2")
    pool = UnrulyPool(1)
    reports = drive(store, twin, pool)
    assert pool.submitted == []
    assert population(store, "lab-2") == population(store, "lab-1")
    assert reports[-1].reused == 60 and reports[-1].evaluated == 0
    # Another task knows nothing of them.
    other, pool = start(store, run_config(name="other", tasks=[{"name": "two"}]), "lab-3"), UnrulyPool(1)
    drive(store, other, pool)
    assert len(pool.submitted) > 40


ANOTHER_SEED = ""
CHANGES = [
    ("delete from individuals where idx = 5", r"individual 5 is missing from the store"),
    (
        "update individuals set genome = (select genome from individuals where idx = 0) where status = 'pending'",
        r"individual \d+ can't be reproduced",
    ),
    # The best of what the pending ones were made from becomes the worst.
    ("update individuals set fitness = 1 - fitness where status = 'ok'", r"can't be reproduced from its configuration"),
    (
        "update individuals set status = 'pending', fitness = null, tie_break = null where idx = 0",
        r"individual 0 has no evaluation, though later ones were made from it",
    ),
    (ANOTHER_SEED, r"can't be reproduced from its configuration"),
]


@pytest.mark.parametrize(("change", "message"), CHANGES)
def test_a_search_whose_store_or_configuration_was_changed_is_not_continued(
    change: str, message: str, tmp_path: Path
) -> None:
    """Stopped half-way, and changed by SQL behind the driver's back, or resumed with another seed."""
    with Store.open(f"sqlite:///{tmp_path / 'changed.db'}") as store:
        with pytest.raises(Stopped):
            drive(store, start(store, run_config()), UnrulyPool(2, stop_at=25))
        assert len(store.history("lab-1")) > 15
        if change:
            with sqlite3.connect(tmp_path / "changed.db") as connection:
                connection.execute("pragma foreign_keys = off")
                assert connection.execute(change).rowcount > 0
            connection.close()
        with pytest.raises(StoreError, match=message):
            drive(store, make_lab_setup(run_config(seed=1 if change else 2)), UnrulyPool(3))


@pytest.mark.parametrize("repairs", [False, True])
def test_pace_is_measured_from_the_first_evaluation_on(
    store: Store, monkeypatch: pytest.MonkeyPatch, repairs: bool
) -> None:
    """On a clock that only polls move: the model's loading, before anything arrives, is left out."""
    now = 100.0

    def after_a_while(waiting: Sequence[EvaluationRequest]) -> Sequence[EvaluationRequest]:
        nonlocal now
        now += 3.0
        return waiting[:2]

    monkeypatch.setattr(search_loop.time, "monotonic", lambda: now)
    setup, seen = start(store, run_config()), list[tuple[float, Progress]]()
    pool = ScriptedPool(scored(smooth), after_a_while)
    cache = EvaluationCache(store, pool, setup.search_id, setup.facts.fingerprint, "engine")
    strategy = make_strategy(setup.config, setup.space, setup.schedule)
    if repairs:
        first, last = setup.config.phases
        phases = (first, last.model_copy(update={"repair": RepairSettings((0.1,))}))
        setup = replace(setup, config=setup.config.model_copy(update={"phases": phases}))
    SearchLoop(setup, strategy, store, cache, lambda progress: seen.append((now, progress))).run()
    if repairs:  # the second phase's candidates take another time
        assert all(progress.left is None for _, progress in seen if progress.done < 30)
        (moment, at_first), *later = [each for each in seen if each[1].done >= 30]
        for now, progress in later[:-1]:
            elapsed, more = now - moment, progress.done - at_first.done
            assert progress.left == (pytest.approx((60 - progress.done) * elapsed / more) if more else None)
        return
    first = next(place for place, (_, progress) in enumerate(seen) if progress.evaluated)
    (begun, at_first), later = seen[first], seen[first + 1 :]
    assert all((progress.rate, progress.left) == (None, None) for _, progress in seen[: first + 1])
    for moment, progress in later:
        elapsed, more = moment - begun, progress.done - at_first.done
        if progress.evaluated > 1 and more and elapsed:
            assert progress.rate == pytest.approx((progress.evaluated - 1) / elapsed)
            assert progress.left == pytest.approx((progress.total - progress.done) * elapsed / more)
    assert later[-1][1].left == 0.0 and len(later) > 10


def test_fitness_and_tie_break_are_weighted_means_task_aggregation() -> None:
    records = [replace(evaluation(0, score, "one"), gold_logprob=gold) for score, gold in ((0.5, -1.0), (0.8, -4.0))]
    assert ranking_of(run_config(), (2.0, 1.0), records, ()) == pytest.approx((0.6, -2.0))
    assert ranking_of(run_config(tie_break="index"), (2.0, 1.0), records, ()) == pytest.approx((0.6, 0.0))
    # Perplexities of 4 and 32, the first of twice the weight: their logarithms are averaged, 2 * 2 + 5 over 3.
    texts = [replace(evaluation(0, 1 / ppl, "one"), metric="inverse_perplexity") for ppl in (4, 32)]
    assert ranking_of(run_config(), (2.0, 1.0), texts, ())[0] == pytest.approx(1 / 8)


WORST = {"tasks": [{"name": "one"}, {"name": "two"}, {"name": "three"}], "task_aggregation": "worst"}


def test_the_fitness_may_be_the_worst_share_of_the_full_models_score(store: Store) -> None:
    config = run_config(**WORST)
    setup = start(store, config)
    # The full model is scored last, so all candidates of a window wait for its score.
    late = ScriptedPool(scored(smooth), lambda waiting: waiting[1:] or waiting)
    reports = drive(store, setup, late)
    assert reports[-1].full == 1.0
    tasks = [task.task_fingerprint for task in store.search_tasks("lab-1")]

    def scores(phenotype: str) -> NDArray[np.float64]:
        found = store.evaluations(phenotype, setup.facts.fingerprint, "engine", tasks)
        return np.array([one.score for one in sorted(found, key=lambda one: one.task)], float)

    compared = 0
    for row in store.history("lab-1"):
        if row.status == "ok":
            shares = scores(row.phenotype_hash) / scores(FULL_MODEL)
            assert len(set(shares)) == 3 and row.fitness == shares.min()
            compared += 1
    assert compared > 40


def test_no_share_is_left_of_a_full_model_that_gets_nothing_right(store: Store) -> None:
    pool = ScriptedPool(scored(lambda edit: (0.0, -1.0) if isinstance(edit, IdentityEdit) else smooth(edit)))
    with pytest.raises(UserError, match="task_aggregation: the unedited model scores 0 on one, "):
        drive(store, start(store, run_config(**WORST)), pool)
