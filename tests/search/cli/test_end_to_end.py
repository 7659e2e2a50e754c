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
from transformers import AutoModelForCausalLM, MixtralForCausalLM
from waiting import PATIENT_S

from moevolve.store.reader import StoreReader

pytestmark = pytest.mark.slow

TOTAL = 24


@dataclass(frozen=True)
class Calm:
    """Search `calm`, interrupted when it had evaluated as many individuals as `left` says, and resumed to its end."""

    folder: Path
    loaded: str
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
    loaded = Path(f"/proc/{driver.pid}/maps").read_text()
    os.killpg(driver.pid, signal.SIGINT)
    output, _ = driver.communicate(timeout=PATIENT_S)
    interrupted = subprocess.CompletedProcess(driver.args, driver.returncode, output)
    with StoreReader.open(f"sqlite:///{database}") as store:
        left = store.search("calm").status, count(database)
    with worker_here():
        resumed = run_command(folder, "resume", "calm")
    return Calm(folder, loaded, interrupted, left, resumed, snapshot(database, "calm"))


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
    assert "_raylet" in calm.loaded, "the driver is on Ray"
    assert not [heavy for heavy in ("libtorch", "/tokenizers/", "/scipy/") if heavy in calm.loaded]


def test_listings(calm: Calm, finished: Path, in_process: Any) -> None:
    def listed(*arguments: str) -> Any:
        return json.loads(in_process(*arguments, "--json", cwd=finished).stdout)

    rows = listed("best", "--task", "pick", "--limit", "3")
    first = rows[0]
    assert len(rows) <= 3 and first["search_name"] == "calm" and first["ref"].startswith("calm:")
    assert None not in (first["search_score"], first["dev_score"], first["test_score"])
    assert (first["ranked_by"], first["experts"], first["active"]) == ("dev", 2, 2)
    assert 0 < first["parameters"] < first["parameters_full"] and first["summary"] and first["depth"] >= 0
    table = calm.resumed.stdout
    for expected in ("full model", "draws", "best found", first["ref"], "moevolve export"):
        assert expected in table, "the search ends with a table, whose winner is the best on dev"
    assert listed("best", "--experts", "3") == []
    (search,) = listed("searches")
    assert (search["search"]["name"], search["search"]["status"], search["individuals"]) == ("calm", "finished", TOTAL)
    assert "calm" in in_process("searches", cwd=finished).stdout
    shown = listed("show", "calm:20")
    assert (shown["individual"]["phase"], shown["individual"]["status"]) == ("merge", "ok")
    assert "kept, " in in_process("show", "calm:20", cwd=finished).stdout
    graph = listed("lineage", "calm:20")
    assert {node["index"] for node in graph["nodes"]} >= {20, *(parent for parent, _ in graph["edges"])}
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


def test_evaluate_measures_once(finished: Path, in_process: Any, tiny: Any) -> None:
    def evaluated(individual: str, fitness: str = "", split: str = "dev") -> dict[str, Any]:
        task = f"{tiny.task}{fitness}"
        done = in_process("evaluate", individual, "--task", task, "--split", split, "--json", cwd=finished)
        assert done.returncode == 0, done.stderr
        (model,) = json.loads(done.stdout)["models"]
        (record,), (score,) = model["records"], model["scores"]
        assert score["low"] <= score["score"] <= score["high"]
        return {"record": record, "interval": (score["low"], score["high"]), "score": score["score"]}

    assert evaluated("full", split="test")["record"]["examples_seen"] == 21
    assert evaluated("calm:0") == evaluated("calm:0"), "the second one comes from the store"
    # Under another fitness it is another task.
    full, pruned, likelihood = evaluated("full", "@kl"), evaluated("calm:0", "@kl"), evaluated("calm:0", "@perplexity")
    assert (full["record"]["task"], likelihood["record"]["task"]) == ("pick@kl", "pick@perplexity")
    assert full["interval"] == pytest.approx([1.0, 1.0], abs=1e-6), "no luck is in it, however few the examples"
    assert pruned["interval"][0] > 0 and pruned["interval"][1] < 1 and 0 < likelihood["score"] < 1
    shown = json.loads(in_process("show", "calm:0", "--json", cwd=finished).stdout)
    assert {"pick", "pick@kl", "pick@perplexity"} <= {row["task"] for row in shown["evaluations"]}


def test_exports_are_stock_checkpoints_and_copies_where_they_can_be(
    finished: Path, in_process: Any, tmp_path: Path
) -> None:
    """A pruned individual is made of the checkpoint's own bytes; of a merged one, changed tensors are written anew."""
    for name in ("calm:3", "calm:20"):
        stock = tmp_path / f"{name}-stock"
        report = json.loads(in_process("export", name, stock, "--json", cwd=finished).stdout)
        assert report["form"] == "stock" and name in (stock / "README.md").read_text()
        copied = in_process("export", name, tmp_path / "copied", "--form", "source", cwd=finished)
        assert copied.returncode == 0, copied.stderr
        said = "tensors are equal to the source's, byte for byte" in " ".join(copied.stdout.split())
        assert said or name == "calm:20"
        one, other = (load_file(folder / "model.safetensors") for folder in (tmp_path / "copied", stock))
        assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
        shutil.rmtree(tmp_path / "copied")
    refused = in_process("export", "calm:3", tmp_path / "no", "--form", "source", "--dtype", "float32", cwd=finished)
    assert refused.returncode == 2 and "--dtype: the individual is exported by copying bytes alone" in refused.stderr
    assert not (tmp_path / "no").exists()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "calm:3-stock")
    assert isinstance(model, MixtralForCausalLM) and model.config.num_local_experts == 2
    assert model(torch.tensor([[4, 5, 6, 7]])).logits.shape == (1, 4, len(WORDS) + 4)
    shown = json.loads(in_process("show", "calm:3", "--json", cwd=finished).stdout)
    assert shown["individual"]["phase"] == "prune" and {"stock", "source"} == {row["form"] for row in shown["exports"]}
