"""Whole searches whose candidates share passes: the store holds what it holds without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moevolve.evaluators.errors import UserError
from moevolve.search.config import RunConfig
from moevolve.search.config_files import load_run_config, parse_run_config
from moevolve.search.local_pool import LocalPool
from moevolve.search.plan import Plan
from moevolve.search.pool import Completion
from moevolve.search.service import Observer, execute, new_plan, register
from moevolve.store.repository import Store
from moevolve.workers.actor import EvaluationWorker

RUNS = Path(__file__).parents[2] / "configs" / "runs"
TASKS = ("demo-span", "demo-entail@rank", "demo-sense@perplexity", "demo-compare@kl", "demo-relation@agreement")


def settings(population: int) -> RunConfig:
    """All kinds of fitness at once, a prune and a merge phase."""
    counts = {"search": 12, "dev": 6, "test": 6}
    data = load_run_config(RUNS / "demo.yaml").model_dump(mode="json") | {
        "tasks": [{"name": name, "counts": counts} for name in TASKS],
        "phases": [{"kind": "prune", "evaluations": 14, "initial": 5}, {"kind": "merge", "evaluations": 8}],
        "engine": {"batch_tokens": 512, "population": population},
        "final": {"rerank": 3},
        "window": 6,
    }
    return parse_run_config(data, "test")


class WatchedPool(LocalPool):
    """Notes how many complete at once."""

    def __init__(self, plan: Plan) -> None:
        model, engine = plan.config.model.to_worker(), plan.config.engine.to_worker()
        super().__init__(lambda: EvaluationWorker(model, engine), plan.all_prepared, engine.population)
        self.sizes: list[int] = []

    def poll(self, timeout: float) -> list[Completion]:
        completions = super().poll(timeout)
        self.sizes.append(len(completions))
        return completions


def searched(folder: Path, population: int) -> tuple[list[Any], list[int]]:
    """All individuals and their evaluations, and how many were evaluated together."""
    plan = new_plan(settings(population))
    pool = WatchedPool(plan)
    with Store.open(f"sqlite:///{folder / str(population)}.db") as store:
        register(plan, store)
        report = execute(plan, store, Observer(), lambda _: pool)
        found: list[Any] = [report.winner and report.winner.split(":")[1]]
        for row in store.history(plan.search_id):
            found.append(
                (row.index, row.genome, row.phenotype_hash, row.status, row.fitness, row.tie_break, row.parents)
            )
            for one in store.individual(f"{plan.search_id}:{row.index}").evaluations:
                kept = (one.task, one.split, one.score, one.gold_logprob, one.outcomes, one.examples_seen, one.failure)
                found.append(kept)
    return found, pool.sizes


def test_the_store_holds_the_same(tmp_path: Path) -> None:
    """On a CPU with the demo model, bit for bit."""
    one, sizes = searched(tmp_path, 1)
    four, shared = searched(tmp_path, 4)
    assert four == one
    assert max(sizes) == 1 and max(shared) == 4
    assert len(one) > 22 * 6


def test_a_population_is_part_of_what_a_search_is() -> None:
    hashes = [settings(population).config_hash for population in (1, 2, 4)]
    assert len(set(hashes)) == 3
    whole = settings(1).model_dump(mode="json")
    del whole["engine"]["population"], whole["engine"]["population_memory_mb"]
    assert parse_run_config(whole, "older").config_hash == hashes[0]


def test_only_experts_candidates_share_passes() -> None:
    with pytest.raises(UserError, match=r"engine\.population: only eep candidates share a pass; use 1 for tomoe"):
        load_run_config(RUNS / "tomoe-demo.yaml", ("engine.population=2",))
