"""The command line on a tiny real search: every verb once."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sqlite3
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from commands_here import run_command, worker_here
from killing import count, start, wait_for
from safetensors.torch import load_file
from tiny_models import WORDS
from waiting import PATIENT_S

from moevolve.store.reader import StoreReader

pytestmark = pytest.mark.slow

TOTAL = 24


@dataclass(frozen=True)
class Calm:
    """Search `calm`, launched as users do, interrupted, and resumed to its end.

    Attributes:
        folder: Where `moevolve.db` has it.
        interrupted: How the launch ended.
        left: Its status then, and how many individuals were evaluated.
        resumed: How the other command ended.
        stored: What the store held afterwards.
    """

    folder: Path
    interrupted: subprocess.CompletedProcess[str]
    left: tuple[str, int]
    resumed: subprocess.CompletedProcess[str]
    stored: Any


@pytest.fixture(scope="module")
def calm(tiny: Any, snapshot: Any, tmp_path_factory: pytest.TempPathFactory) -> Calm:
    """Launched on a Ray of its own. In a terminal, Ctrl-C reaches the whole group: the driver, and that Ray."""
    folder = tmp_path_factory.mktemp("calm")
    database = folder / "moevolve.db"
    driver = start(["launch", str(tiny.write_slow_run(folder / "run.yaml", "calm"))], folder)
    wait_for(database, 1, driver)
    os.killpg(driver.pid, signal.SIGINT)
    output, _ = driver.communicate(timeout=PATIENT_S)
    interrupted = subprocess.CompletedProcess(driver.args, driver.returncode, output)
    with StoreReader.open(f"sqlite:///{database}") as store:
        left = store.search("calm").status, count(database)
    with worker_here():
        resumed = run_command(folder, "resume", "calm")
    return Calm(folder, interrupted, left, resumed, snapshot(database, "calm"))


@pytest.fixture(scope="module")
def finished(calm: Calm) -> Path:
    """Its folder."""
    assert calm.resumed.returncode == 0, calm.resumed.stderr
    return calm.folder


def test_ctrl_c_leaves_a_resumable_search(calm: Calm, uninterrupted: Any) -> None:
    output = calm.interrupted.stdout
    assert calm.interrupted.returncode == 130, output
    assert "moevolve resume calm" in output and "Traceback" not in output
    assert calm.left[0] == "interrupted" and calm.left[1] < TOTAL
    assert calm.stored == uninterrupted


def test_a_search_ends_with_the_table(calm: Calm) -> None:
    table = calm.resumed.stdout
    for expected in (
        "full model",
        "random pruning, 4 draws",
        "best found",
        "moevolve best --task pick",
        "moevolve export",
    ):
        assert expected in table


def test_best_json_has_what_is_promised(calm: Calm, finished: Path, in_process: Any) -> None:
    rows = json.loads(in_process("best", "--task", "pick", "--json", "--limit", "3", cwd=finished).stdout)
    assert 1 <= len(rows) <= 3
    first = rows[0]
    assert first["search_name"] == "calm"
    assert first["ref"].startswith("calm:")
    assert None not in (first["search_score"], first["dev_score"], first["test_score"])
    assert first["ranked_by"] == "dev"
    assert (first["experts"], first["active"]) == (2, 2)
    assert 0 < first["parameters"] < first["parameters_full"]
    assert first["summary"]
    assert first["depth"] >= 0
    assert first["ref"] in calm.resumed.stdout, "the table's winner is the best on dev"
    assert json.loads(in_process("best", "--experts", "3", "--json", cwd=finished).stdout) == []


def test_listings(finished: Path, in_process: Any) -> None:
    (search,) = json.loads(in_process("searches", "--json", cwd=finished).stdout)
    assert (search["search"]["name"], search["search"]["status"], search["individuals"]) == ("calm", "finished", TOTAL)
    assert "calm" in in_process("searches", cwd=finished).stdout
    shown = json.loads(in_process("show", "calm:20", "--json", cwd=finished).stdout)
    assert shown["individual"]["phase"] == "merge"
    assert shown["individual"]["status"] == "ok"
    assert shown["evaluations"][0]["split"] == "search"
    assert "retained" in in_process("show", "calm:20", cwd=finished).stdout
    graph = json.loads(in_process("lineage", "calm:20", "--json", cwd=finished).stdout)
    assert {node["index"] for node in graph["nodes"]} >= {20, *(parent for parent, _ in graph["edges"])}
    dot = in_process("lineage", "calm:20", "--dot", cwd=finished).stdout
    assert dot.startswith("digraph")
    assert "boolq" in in_process("tasks", cwd=finished).stdout


def test_retry_ends_as_if_nothing_had_happened(
    calm: Calm, finished: Path, worker_here: None, in_process: Any, tmp_path: Path
) -> None:
    """One individual is made one that outran its time; those that saw it are made again without it."""
    folder = tmp_path / "copy"
    shutil.copytree(finished, folder)
    population = "select idx, genome, status, fitness, tie_break, failure_kind from individuals order by idx"
    lost = "status = 'failed', failure = 'outran its time', failure_kind = 'timeout', fitness = null, tie_break = null"
    with contextlib.closing(sqlite3.connect(folder / "moevolve.db")) as database, database:
        expected = database.execute(population).fetchall()
        database.execute(f"update individuals set {lost} where idx = 9")
    assert "failed (timeout): outran its time" in in_process("show", "calm:9", cwd=folder).stdout
    done = in_process("retry", "calm", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "calm: failures to retry: 1, later individuals to make again: " in done.stderr
    assert done.stdout.split("Next:")[0] == calm.resumed.stdout.split("Next:")[0]
    with contextlib.closing(sqlite3.connect(folder / "moevolve.db")) as database:
        assert database.execute(population).fetchall() == expected
    again = in_process("retry", "calm", cwd=folder)
    assert again.returncode == 0 and "calm: nothing to retry" in again.stderr
    assert "did you mean calm?" in in_process("retry", "clam", cwd=folder).stderr


def test_evaluate_reuses_and_measures(finished: Path, in_process: Any, tiny: Any) -> None:
    full = json.loads(
        in_process("evaluate", "full", "--task", tiny.task, "--split", "test", "--json", cwd=finished).stdout
    )
    assert full["record"]["examples_seen"] == 21
    assert full["interval"][0] <= full["score"] <= full["interval"][1]
    fresh = in_process("evaluate", "calm:0", "--task", tiny.task, "--split", "dev", "--json", cwd=finished)
    again = in_process("evaluate", "calm:0", "--task", tiny.task, "--split", "dev", "--json", cwd=finished)
    assert json.loads(fresh.stdout) == json.loads(again.stdout), "the second one comes from the store"


def test_evaluate_under_another_fitness_is_another_task(finished: Path, in_process: Any, tiny: Any) -> None:
    def score(individual: str, fitness: str) -> dict[str, Any]:
        task = f"{tiny.task}@{fitness}"
        done = in_process("evaluate", individual, "--task", task, "--split", "dev", "--json", cwd=finished)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    full, pruned, likelihood = score("full", "kl"), score("calm:0", "kl"), score("calm:0", "perplexity")
    assert (full["record"]["task"], likelihood["record"]["task"]) == ("pick@kl", "pick@perplexity")
    assert full["score"] == pytest.approx(1.0, abs=1e-6)
    assert full["interval"] == pytest.approx([1.0, 1.0], abs=1e-6), "no luck is in it, however few the examples"
    assert 0 < pruned["interval"][0] <= pruned["score"] <= pruned["interval"][1] < 1
    assert 0 < likelihood["score"] < 1
    tasks = {
        row["task"] for row in json.loads(in_process("show", "calm:0", "--json", cwd=finished).stdout)["evaluations"]
    }
    assert {"pick", "pick@kl", "pick@perplexity"} <= tasks


def test_export_loads_without_moevolve(finished: Path, in_process: Any, outsider: Any, tmp_path: Path) -> None:
    pruned = json.loads(in_process("show", "calm:3", "--json", cwd=finished).stdout)
    assert pruned["individual"]["phase"] == "prune"
    target = tmp_path / "pruned"
    report = json.loads(in_process("export", "calm:3", target, "--json", cwd=finished).stdout)
    assert report["form"] == "stock"
    ((logits, _, module),) = outsider([target], torch.tensor([[4, 5, 6, 7]]), "the cat is red")
    assert module == "transformers" and torch.tensor(logits).shape == (1, 4, len(WORDS) + 4)
    assert json.loads((target / "config.json").read_text())["num_local_experts"] == 2
    assert "calm:3" in (target / "README.md").read_text()
    assert json.loads(in_process("show", "calm:3", "--json", cwd=finished).stdout)["exports"][0]["form"] == "stock"


def test_export_copies_from_the_checkpoint(finished: Path, in_process: Any, tmp_path: Path, tiny: Any) -> None:
    done = in_process("export", "calm:3", tmp_path / "copied", "--form", "source", cwd=finished)
    assert done.returncode == 0 and "tensors are equal to the source's, byte for byte" in " ".join(done.stdout.split())
    stock = json.loads(in_process("export", "calm:3", tmp_path / "stock", "--json", cwd=finished).stdout)
    assert stock["form"] == "stock"
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("copied", "stock"))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    refused = in_process("export", "calm:3", tmp_path / "no", "--form", "source", "--dtype", "float32", cwd=finished)
    assert refused.returncode == 2 and "--dtype: the individual is exported by copying bytes alone" in refused.stderr
    # Of a merged individual the changed tensors are written anew, as in a stock checkpoint.
    for form in ("source", "stock"):
        done = in_process("export", "calm:20", tmp_path / f"merged-{form}", "--form", form, cwd=finished)
        assert done.returncode == 0, done.stderr
    one, other = (load_file(tmp_path / f"merged-{form}" / "model.safetensors") for form in ("source", "stock"))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["copied", "merged-source", "merged-stock", "stock"]


def test_plot(finished: Path, in_process: Any, tmp_path: Path) -> None:
    picture = tmp_path / "calm.png"
    assert in_process("plot", "calm", "-o", picture, cwd=finished).returncode == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_launching_the_same_name_again_is_refused(finished: Path, in_process: Any) -> None:
    again = in_process("launch", "run.yaml", cwd=finished)
    assert again.returncode == 2
    assert "calm" in again.stderr
    assert "resume" in again.stderr


def test_resume_refuses_what_would_change_the_population(finished: Path, in_process: Any) -> None:
    refused = in_process("resume", "calm", "--set", "seed=4", cwd=finished)
    assert refused.returncode == 2
    assert "workers" in refused.stderr
