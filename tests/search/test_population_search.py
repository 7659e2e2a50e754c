"""Whole searches whose candidates share passes: the store holds what it holds without."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.types import PreparedSplit
from moevolve.search.config import RunConfig
from moevolve.search.config_files import load_run_config, parse_run_config, parse_stored_config
from moevolve.search.kept_choices import described
from moevolve.search.local_pool import LocalPool
from moevolve.search.plan import Plan
from moevolve.search.pool import Completion
from moevolve.search.service import Observer, execute, new_plan, register, resume_plan
from moevolve.search.sharing import Sharing
from moevolve.store.repository import Store
from moevolve.workers.actor import EvaluationWorker, WorkerInfo
from moevolve.workers.config import PopulationSize
from moevolve.workers.messages import EvaluationRequest, PopulationChoice

RUNS = Path(__file__).parents[2] / "configs" / "runs"
TASKS = ("demo-span", "demo-entail@rank", "demo-sense@perplexity", "demo-compare@kl", "demo-relation@agreement")


def settings(population: PopulationSize) -> RunConfig:
    """All kinds of fitness at once, a prune and a merge phase."""
    counts = {"search": 8, "dev": 4}
    data = load_run_config(RUNS / "demo.yaml").model_dump(mode="json") | {
        "tasks": [{"name": name, "counts": counts} for name in TASKS],
        "phases": [{"kind": "prune", "evaluations": 10, "initial": 5}, {"kind": "merge", "evaluations": 6}],
        "engine": {"batch_tokens": 256, "population": population},
        "final": {"rerank": 2, "test": False},
        "window": 6,
    }
    return parse_run_config(data, "test")


class OnDevice(EvaluationWorker):
    """Says that it measured four to be the best, on hardware that CPUs aren't."""

    def info(self, node: str = "") -> WorkerInfo:
        return replace(super().info(node), hardware="a device")

    def choose_population(
        self, request: EvaluationRequest, splits: tuple[PreparedSplit, ...], most: int
    ) -> PopulationChoice:
        return PopulationChoice(4, "a device", ((1, 0.0121), (2, 0.005), (4, 0.002), (8, 0.002)))


class OnTheSameDevice(OnDevice):
    """One that needn't measure."""

    def choose_population(self, *_: Any) -> PopulationChoice:
        raise AssertionError("it was measured before")


class WatchedPool(LocalPool):
    """Notes how many complete at once."""

    def __init__(self, plan: Plan, worker: type[EvaluationWorker]) -> None:
        model, engine = plan.config.model.to_worker(), plan.config.engine.to_worker()
        super().__init__(lambda: worker(model, engine), plan.all_prepared, engine.population)
        self.sizes: list[int] = []

    def poll(self, timeout: float) -> list[Completion]:
        completions = super().poll(timeout)
        self.sizes.append(len(completions))
        return completions


class StoppedPool(WatchedPool):
    """Is interrupted after a few."""

    def poll(self, timeout: float) -> list[Completion]:
        if len(self.sizes) == 4:
            raise KeyboardInterrupt
        return super().poll(timeout)


def contents(store: Store, plan: Plan) -> list[Any]:
    """All individuals and their evaluations."""
    found: list[Any] = []
    for row in store.history(plan.search_id):
        found.append((row.index, row.genome, row.phenotype_hash, row.status, row.fitness, row.tie_break, row.parents))
        for one in store.individual(f"{plan.search_id}:{row.index}").evaluations:
            kept = (one.task, one.split, one.score, one.gold_logprob, one.outcomes, one.examples_seen, one.failure)
            found.append(kept)
    return found


def test_the_store_holds_the_same(tmp_path: Path) -> None:
    """One by one, and four together since that was measured before the search was interrupted: bit for bit."""
    plan = new_plan(settings(1))
    one = WatchedPool(plan, OnDevice)
    with Store.open(f"sqlite:///{tmp_path / 'one'}.db") as store:
        register(plan, store)
        report = execute(plan, store, Observer(), lambda _: one)
        expected = contents(store, plan)
    assert max(one.sizes) == 1 and report.population is None
    assert len(expected) > 16 * 6

    plan, lines = new_plan(settings("auto")), list[str]()
    with Store.open(f"sqlite:///{tmp_path / 'auto'}.db") as store:
        register(plan, store)
        stopped = StoppedPool(plan, OnDevice)
        with pytest.raises(KeyboardInterrupt):
            execute(plan, store, Observer(), lambda _: stopped)
        pool = WatchedPool(plan, OnTheSameDevice)
        report = execute(resume_plan(store, "demo"), store, Observer(lines.append), lambda _: pool)
        assert contents(store, plan) == expected
    assert max(stopped.sizes) == max(pool.sizes) == 4
    assert report.population == stopped.sharing.choice == pool.sharing.choice
    line = "4 candidates share a pass (ms per candidate: 12.1 with 1, 5.0 with 2, 2.0 with 4, 2.0 with 8)"
    assert lines.count(line) == 1


def test_a_population_is_part_of_what_a_search_is() -> None:
    hashes = [settings(population).config_hash for population in (1, 2, 4)]
    assert len(set(hashes)) == 3
    assert settings("auto").config_hash == hashes[0], "what is measured is no setting"


def test_searches_from_before_the_setting_go_on_one_by_one() -> None:
    older = json.loads(settings("auto").canonical_json())
    del older["engine"]["population"]
    assert parse_run_config(older, "new").engine.population == "auto"
    stored = parse_stored_config(json.dumps(older))
    assert stored.engine.population == 1 and stored.config_hash == settings("auto").config_hash
    for population in (1, 4, "auto"):
        assert parse_stored_config(settings(population).canonical_json()) == settings(population)


def test_on_a_cpu_nothing_is_measured() -> None:
    sharing = Sharing("auto")
    assert (sharing.is_open, sharing.size, sharing.chosen) == (True, 1, None)
    sharing.settle("", lambda: pytest.fail("measured"))
    assert (sharing.is_open, sharing.size, sharing.chosen) == (False, 1, 1)
    assert (Sharing(4).is_open, Sharing(4).size, Sharing(4).chosen) == (False, 4, None)
    assert described(PopulationChoice()) == "candidates don't share passes"


def test_only_experts_candidates_share_passes() -> None:
    with pytest.raises(
        UserError, match=r"engine\.population: only eep candidates share a pass; use auto or 1 for tomoe"
    ):
        load_run_config(RUNS / "tomoe-demo.yaml", ("engine.population=2",))
    assert load_run_config(RUNS / "tomoe-demo.yaml").engine.population == "auto"
