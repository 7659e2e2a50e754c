"""The command line on a tiny real search: every verb once, and what a store holds after interruptions."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from killing import MOEVOLVE, count, kill_at, last_worker, start, wait_for

pytestmark = pytest.mark.slow

TOTAL = 24


@pytest.fixture(scope="module")
def calm(tiny: Any, tmp_path_factory: pytest.TempPathFactory, snapshot: Any) -> tuple[Path, Any]:
    """An uninterrupted launch of search `calm` with one worker: its folder, and what the store held right after."""
    folder = tmp_path_factory.mktemp("calm")
    run = tiny.write_run(folder / "run.yaml", "calm")
    done = subprocess.run([MOEVOLVE, "launch", str(run)], cwd=folder, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    (folder / "out.txt").write_text(done.stdout)
    return folder, snapshot(folder / "moevolve.db", "calm")


@pytest.fixture(scope="module")
def finished(calm: tuple[Path, Any]) -> Path:
    return calm[0]


@pytest.fixture(scope="module")
def uninterrupted(calm: tuple[Path, Any]) -> Any:
    return calm[1]


def test_launch_ends_with_the_table(finished: Path) -> None:
    table = (finished / "out.txt").read_text()
    for expected in (
        "full model",
        "random pruning, 4 draws",
        "best found",
        "moevolve best --task pick",
        "moevolve export",
    ):
        assert expected in table


def test_best_json_has_what_is_promised(finished: Path, moevolve: Any) -> None:
    rows = json.loads(moevolve("best", "--task", "pick", "--json", "--limit", "3", cwd=finished).stdout)
    assert 1 <= len(rows) <= 3
    first = rows[0]
    assert first["search"] == "calm"
    assert first["id"].startswith("calm:")
    assert set(first["scores"]) == {"search", "dev", "test"}
    assert first["scores"]["dev"] is not None
    assert first["scores"]["test"] is not None
    assert first["ranked_by"] == "dev"
    assert (first["experts"], first["active"]) == (2, 2)
    assert 0 < first["parameters_kept"] < 1
    assert first["genome"]
    assert first["lineage_depth"] >= 0
    assert f"best found\n{first['id']}" not in first["genome"]
    assert first["id"] in (finished / "out.txt").read_text(), "the table's winner is the best on dev"
    assert json.loads(moevolve("best", "--experts", "3", "--json", cwd=finished).stdout) == []


def test_listings(finished: Path, moevolve: Any) -> None:
    (search,) = json.loads(moevolve("searches", "--json", cwd=finished).stdout)
    assert (search["name"], search["status"], search["individuals"]) == ("calm", "finished", TOTAL)
    assert "calm" in moevolve("searches", cwd=finished).stdout
    shown = json.loads(moevolve("show", "calm:20", "--json", cwd=finished).stdout)
    assert shown["phase"] == "merge"
    assert shown["status"] == "ok"
    assert shown["evaluations"][0]["split"] == "search"
    assert "retained" in moevolve("show", "calm:20", cwd=finished).stdout
    graph = json.loads(moevolve("lineage", "calm:20", "--json", cwd=finished).stdout)
    assert {node["index"] for node in graph["nodes"]} >= {20, *(parent for parent, _ in graph["edges"])}
    dot = moevolve("lineage", "calm:20", "--dot", cwd=finished).stdout
    assert dot.startswith("digraph")
    assert "boolq" in moevolve("tasks", cwd=finished).stdout


def test_evaluate_reuses_and_measures(finished: Path, moevolve: Any, tiny: Any) -> None:
    full = json.loads(
        moevolve("evaluate", "full", "--task", tiny.task, "--split", "test", "--json", cwd=finished).stdout
    )
    assert full["examples"] == 21
    assert full["interval"][0] <= full["score"] <= full["interval"][1]
    fresh = moevolve("evaluate", "calm:0", "--task", tiny.task, "--split", "dev", "--json", cwd=finished)
    again = moevolve("evaluate", "calm:0", "--task", tiny.task, "--split", "dev", "--json", cwd=finished)
    assert json.loads(fresh.stdout) == json.loads(again.stdout), "the second one comes from the store"


def test_evaluate_under_another_fitness_is_another_task(finished: Path, moevolve: Any, tiny: Any) -> None:
    def score(individual: str, fitness: str) -> dict[str, Any]:
        task = f"{tiny.task}@{fitness}"
        done = moevolve("evaluate", individual, "--task", task, "--split", "dev", "--json", cwd=finished)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    full, pruned, likelihood = score("full", "kl"), score("calm:0", "kl"), score("calm:0", "perplexity")
    assert (full["task"], likelihood["task"]) == ("pick@kl", "pick@perplexity")
    assert full["score"] == pytest.approx(1.0, abs=1e-6)
    assert full["interval"] == pytest.approx([1.0, 1.0], abs=1e-6), "no luck is in it, however few the examples"
    assert 0 < pruned["interval"][0] <= pruned["score"] <= pruned["interval"][1] < 1
    assert 0 < likelihood["score"] < 1
    tasks = {
        row["task"] for row in json.loads(moevolve("show", "calm:0", "--json", cwd=finished).stdout)["evaluations"]
    }
    assert {"pick", "pick@kl", "pick@perplexity"} <= tasks


def test_export_loads_without_moevolve(finished: Path, moevolve: Any, tmp_path: Path) -> None:
    pruned = json.loads(moevolve("show", "calm:3", "--json", cwd=finished).stdout)
    assert pruned["phase"] == "prune"
    target = tmp_path / "pruned"
    report = json.loads(moevolve("export", "calm:3", target, "--json", cwd=finished).stdout)
    assert report["form"] == "stock"
    check = (
        "import sys; sys.modules['moevolve'] = None\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        f"model = AutoModelForCausalLM.from_pretrained({str(target)!r})\n"
        f"tokens = AutoTokenizer.from_pretrained({str(target)!r})('the cat is red', return_tensors='pt')\n"
        "print(model.config.num_local_experts, tuple(model(**tokens).logits.shape))"
    )
    loaded = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert loaded.returncode == 0, loaded.stderr
    assert loaded.stdout.split()[0] == "2"
    assert "calm:3" in (target / "README.md").read_text()
    assert json.loads(moevolve("show", "calm:3", "--json", cwd=finished).stdout)["exports"][0]["form"] == "stock"


def test_coefficients_go_out_and_come_back(finished: Path, moevolve: Any, tmp_path: Path, tiny: Any) -> None:
    out = tmp_path / "again.pth"
    assert json.loads(moevolve("export", "calm:20", out, "--json", cwd=finished).stdout) == {"file": str(out)}
    imported = moevolve("import-eep", out, "--experts-of", tiny.model, "--json")
    (row,) = json.loads(imported.stdout)
    assert row["experts"] == 2
    back = json.loads(moevolve("show", "again:0", "--json").stdout)
    there = json.loads(moevolve("show", "calm:20", "--json", cwd=finished).stdout)
    assert back["phenotype_hash"] == there["phenotype_hash"]
    again = moevolve("import-eep", out, "--experts-of", tiny.model)
    assert again.returncode == 2
    assert "exists" in again.stderr


def test_plot(finished: Path, moevolve: Any, tmp_path: Path) -> None:
    picture = tmp_path / "calm.png"
    assert moevolve("plot", "calm", "-o", picture, cwd=finished).returncode == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_launching_the_same_name_again_is_refused(finished: Path, moevolve: Any) -> None:
    again = moevolve("launch", "run.yaml", cwd=finished)
    assert again.returncode == 2
    assert "calm" in again.stderr
    assert "resume" in again.stderr


def test_three_workers_give_the_same_store(
    uninterrupted: Any, tiny: Any, moevolve: Any, snapshot: Any, tmp_path: Path
) -> None:
    run = tiny.write_run(tmp_path / "run.yaml", "calm", workers={"count": 3, "num_cpus": 0.3})
    done = moevolve("launch", run)
    assert done.returncode == 0, done.stderr
    assert snapshot(tmp_path / "moevolve.db", "calm") == uninterrupted


def test_sigkill_at_random_moments_changes_nothing(
    uninterrupted: Any, tiny: Any, snapshot: Any, tmp_path: Path
) -> None:
    """Five kills, each after a random number of further evaluations, then a resume to the end."""
    database = tmp_path / "moevolve.db"
    run = tiny.write_run(tmp_path / "run.yaml", "calm", workers={"count": 2, "num_cpus": 0.5})
    rng = random.Random(5)
    goals = sorted(rng.sample(range(1, TOTAL - 6), 5))
    for attempt, goal in enumerate(goals):
        command = ["launch", str(run)] if attempt == 0 else ["resume", "calm"]
        kill_at(command, tmp_path, database, goal, rng.uniform(0, 0.1))
        assert count(database) < TOTAL
    done = subprocess.run([MOEVOLVE, "resume", "calm"], cwd=tmp_path, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    assert snapshot(database, "calm") == uninterrupted


def test_workers_killed_during_evaluation_change_nothing(
    uninterrupted: Any, tiny: Any, snapshot: Any, tmp_path: Path
) -> None:
    database = tmp_path / "moevolve.db"
    run = tiny.write_run(tmp_path / "run.yaml", "calm", workers={"count": 2, "num_cpus": 0.5})
    process = start(["launch", str(run)], tmp_path)
    killed = set()
    for goal in (5, 10, 15):
        wait_for(database, goal, process)
        victim = last_worker(database)
        os.kill(victim, signal.SIGKILL)
        killed.add(victim)
    output, _ = process.communicate(timeout=400)
    assert process.returncode == 0, output
    assert len(killed) == 3
    assert snapshot(database, "calm") == uninterrupted


@pytest.mark.parametrize(
    ("stop", "number"),
    # Ctrl-C in a terminal reaches the whole group, a cluster manager's SIGTERM the driver alone.
    [pytest.param(os.killpg, signal.SIGINT, id="ctrl-c"), pytest.param(os.kill, signal.SIGTERM, id="sigterm")],
)
def test_an_interruption_leaves_a_resumable_search(
    stop: Any, number: int, uninterrupted: Any, tiny: Any, snapshot: Any, moevolve: Any, tmp_path: Path
) -> None:
    database = tmp_path / "moevolve.db"
    run = tiny.write_run(tmp_path / "run.yaml", "calm")
    process = start(["launch", str(run)], tmp_path)
    wait_for(database, 1, process)
    stop(process.pid, number)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 130
    assert "moevolve resume calm" in output
    assert "Traceback" not in output and "SIGTERM" not in output
    (search,) = json.loads(moevolve("searches", "--json").stdout)
    assert search["status"] == "interrupted"
    assert moevolve("resume", "calm", "--set", "workers.count=2", "--set", "workers.num_cpus=0.5").returncode == 0
    assert snapshot(database, "calm") == uninterrupted


def test_resume_refuses_what_would_change_the_population(finished: Path, moevolve: Any) -> None:
    refused = moevolve("resume", "calm", "--set", "seed=4", cwd=finished)
    assert refused.returncode == 2
    assert "workers" in refused.stderr
