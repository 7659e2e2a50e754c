"""Early stopping with a real model, from launch to the final pick, and what people are shown of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from report_lab import local_pool
from typer.testing import CliRunner

from moevolve.search import service
from moevolve.search.cli.app import app
from moevolve.search.config import RunConfig
from moevolve.search.config_files import load_run_config
from moevolve.search.standings import Standings
from moevolve.store.repository import Store

PARENTS = {"rule": "top_k", "k": 2}
PHASES = [
    {"kind": "prune", "evaluations": 22, "initial": 6, "parents": PARENTS},
    {"kind": "merge", "evaluations": 12, "sigma": 0.2, "parents": PARENTS},
]


def settings(tiny: Any, folder: Path, task: str, name: str = "tiny", **changes: Any) -> RunConfig:
    tasks = [str(tiny.task) + task]
    final = {"rerank": 2, "random_draws": 4}
    engine = {"batch_tokens": 24}
    run = tiny.write_run(folder / f"{name}.yaml", name, phases=PHASES, tasks=tasks, final=final, engine=engine)
    return load_run_config(run).model_copy(update=changes)


def finish(store: Store, config: RunConfig) -> Standings:
    plan = service.new_plan(config)
    service.register(plan, store)
    return service.execute(plan, store, service.Observer(), local_pool)


@pytest.mark.parametrize("task", ["", "@generate"])
def test_a_real_search_ends_alike_with_and_without(tiny: Any, tmp_path: Path, task: str) -> None:
    ends = {}
    for mode in ("off", "exact"):
        url = f"sqlite:///{tmp_path / mode}.db"
        with Store.open(url) as store:
            report = finish(store, settings(tiny, tmp_path, task, early_stopping=mode))
            (summary,) = store.searches()
            ends[mode] = report, store.history(summary.search.id), summary, store.costs(summary.search)
    (off, whole, _, all_costs), (exact, rows, summary, costs) = ends["off"], ends["exact"]
    assert [(r.genome, r.parents, r.operator) for r in rows] == [(r.genome, r.parents, r.operator) for r in whole]
    for row, other in zip(rows, whole, strict=True):
        if row.status != "stopped":
            assert (row.status, row.fitness, row.tie_break) == (other.status, other.fitness, other.tie_break)
        else:
            assert row.bound is not None and other.fitness is not None and other.fitness <= row.bound
    assert exact == off
    stopped = [row for row in rows if row.status == "stopped"]
    assert stopped and summary.stopped == len(stopped) and summary.pending == 0
    searched, before = costs.splits[0], all_costs.splits[0]
    assert searched.stopped == len({row.phenotype_hash for row in stopped})
    assert searched.evaluations + searched.stopped == before.evaluations and searched.examples < before.examples
    _check_listings(f"sqlite:///{tmp_path / 'exact.db'}", str(tiny.task) + task, stopped[0].index, rows[0].index)


def _check_listings(url: str, task: str, stopped: int, scored: int) -> None:
    def said(*arguments: str) -> str:
        result = CliRunner().invoke(app, [*arguments, "--store", url], env={"COLUMNS": "200"})
        assert result.exit_code == 0, result.output
        return result.output

    shown = said("show", f"tiny:{stopped}")
    assert "stopped after" in shown and "of 40 examples: at most" in shown and "<=" in shown
    found = json.loads(said("show", f"tiny:{stopped}", "--json"))
    assert found["status"] == "stopped" and found["fitness"] is None
    assert found["bounds"][0]["examples_seen"] < found["bounds"][0]["examples"] == 40
    assert found["bound"] == found["bounds"][0]["bound"]
    assert json.loads(said("show", f"tiny:{scored}", "--json"))["bounds"] == []
    listed = {row["id"] for row in json.loads(said("best", "--limit", "100", "--by", "search", "--json"))}
    assert f"tiny:{stopped}" not in listed
    assert "stopped" in said("lineage", f"tiny:{stopped}", "--dot")
    assert json.loads(said("searches", "--json"))[0]["stopped"] >= 1
    # Whoever asks for its score gets it.
    said("evaluate", f"tiny:{stopped}", "--task", task, "--split", "search")
    now = json.loads(said("show", f"tiny:{stopped}", "--json"))
    assert now["evaluations"][0]["score"] <= found["bound"] and now["bounds"] == []
    assert now["status"] == "stopped" and now["fitness"] is None


def test_resume_may_switch_it_but_not_race(tiny: Any, tmp_path: Path) -> None:
    with Store.open(f"sqlite:///{tmp_path / 's.db'}") as store:
        plan = service.new_plan(settings(tiny, tmp_path, "", early_stopping="off"))
        service.register(plan, store)

        def switched(mode: str) -> service.Plan:
            return service.resume_plan(store, "tiny", lambda c: c.model_copy(update={"early_stopping": mode}))

        assert switched("exact").config.early_stopping == "exact"
        with pytest.raises(service.UserError, match="early_stopping between exact and off"):
            switched("racing")
