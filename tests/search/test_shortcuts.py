"""Whole searches on the demo's model with and without shortcuts: the stores hold the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moevolve.search.config import RunConfig
from moevolve.search.config_files import load_run_config, parse_run_config
from moevolve.search.local_pool import LocalPool
from moevolve.search.plan import Plan
from moevolve.search.pool import Completion
from moevolve.search.service import Observer, execute, new_plan, register
from moevolve.store.repository import Store
from moevolve.workers.actor import EvaluationWorker
from moevolve.workers.config import ALL_SHORTCUTS, Shortcuts

DEMO = Path(__file__).parents[2] / "configs" / "runs" / "demo.yaml"
TASKS = ("demo-span", "demo-entail@rank", "demo-sense@perplexity", "demo-compare@kl", "demo-relation@agreement")


def settings() -> RunConfig:
    """All kinds of fitness at once, a prune and a merge phase."""
    counts = {"search": 12, "dev": 6, "test": 6}
    data = load_run_config(DEMO).model_dump(mode="json") | {
        "tasks": [{"name": name, "counts": counts} for name in TASKS],
        "phases": [{"kind": "prune", "evaluations": 14, "initial": 5}, {"kind": "merge", "evaluations": 8}],
        "final": {"rerank": 2},
        "window": 2,
    }
    return parse_run_config(data, "test")


class WatchedPool(LocalPool):
    """Notes the share of work that was spared of each task."""

    def __init__(self, plan: Plan, reuse_bytes: int, shortcuts: Shortcuts) -> None:
        config = plan.config
        model, engine = config.model.to_worker(), config.engine.to_worker()
        super().__init__(lambda: EvaluationWorker(model, engine, shortcuts, reuse_bytes), plan.all_prepared)
        self.spared: dict[str, list[float]] = {}

    def poll(self, timeout: float) -> list[Completion]:
        completions = super().poll(timeout)
        for completion in completions:
            for result in completion.reply.results:
                self.spared.setdefault(result.task, []).append(result.spared)
        return completions


def searched(
    folder: Path, reuse_bytes: int, shortcuts: Shortcuts = ALL_SHORTCUTS
) -> tuple[list[Any], dict[str, list[float]]]:
    """All individuals and their evaluations, and the shares spared."""
    plan = new_plan(settings())
    pool = WatchedPool(plan, reuse_bytes, shortcuts)
    with Store.open(f"sqlite:///{folder / f'{reuse_bytes}-{shortcuts.draft}'}.db") as store:
        register(plan, store)
        report = execute(plan, store, Observer(), lambda _: pool)
        found: list[Any] = [report.winner and report.winner.split(":")[1]]
        for row in store.history(plan.search_id):
            found.append((row.index, row.genome, row.phenotype_hash, row.fitness, row.tie_break, row.parents))
            for one in store.individual(f"{plan.search_id}:{row.index}").evaluations:
                kept = (one.task, one.split, one.score, one.gold_logprob, one.examples_seen, one.failure)
                found.append(kept)
    return found, pool.spared


def test_the_store_holds_the_same(tmp_path: Path) -> None:
    whole, nothing = searched(tmp_path, 0)
    roomy, spared = searched(tmp_path, 1 << 26)
    tight, less = searched(tmp_path, 3 << 20)
    assert roomy == whole and tight == whole
    assert len(whole) > 22 * 6
    sums = [[sum(shares[task]) for task in TASKS] for shares in (nothing, less, spared)]
    assert not any(sums[0])
    assert all(sums[2]), sums
    assert 0 < sum(sums[1]) < sum(sums[2]), sums


def test_the_store_holds_the_same_without_any_shortcut(tmp_path: Path) -> None:
    on, _ = searched(tmp_path, 1 << 26)
    off, _ = searched(tmp_path, 0, Shortcuts(draft=False, lean=False, share=False))
    assert on == off
