"""A dense kind as a user meets it, on the demo model: searched, then every verb on what it found."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from local_workers import local_pool
from transformers import AutoTokenizer
from typer.testing import CliRunner, Result

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.preparation.prepare import prepare_split
from moevolve.evaluators.preparation.registry import load_task
from moevolve.search.cli.app import app
from moevolve.search.config.run import RunConfig
from moevolve.search.loop.final_table import FinalTable
from moevolve.search.running.execute import execute
from moevolve.search.running.launch import register
from moevolve.search.running.observer import Observer
from moevolve.search.running.set_up import set_up
from moevolve.store.repository import Store

KIND, TOTAL, TEST = "factorllm", 8, 12
RUN: dict[str, Any] = {
    "name": KIND,
    "seed": 5,
    "model": {"path": str(Path(__file__).parents[3] / "configs/demo/dense"), "dtype": "float32", "device": "cpu"},
    "tasks": [{"name": "demo-relation", "counts": {"search": 16, "dev": 8, "test": TEST}}],
    "genome": {"kind": KIND, "experts": 8, "active": 4, "calibration_tokens": 256},
    "phases": [{"kind": "tune", "evaluations": TOTAL, "initial": 4}],
    "window": 4,
    "final": {"rerank": 2, "random_baselines": 2},
}


@dataclass(frozen=True)
class Calm:
    """A search in this process."""

    folder: Path
    report: FinalTable

    @property
    def winner(self) -> str:
        assert self.report.winner is not None
        return self.report.winner

    def ask(self, *arguments: object) -> Result:
        """The command line on the search's store, in this process."""
        store = f"sqlite:///{self.folder / 'moevolve.db'}"
        return CliRunner().invoke(app, [*map(str, arguments), "--store", store])

    def json(self, *arguments: object) -> Any:
        answer = self.ask(*arguments, "--json")
        assert answer.exit_code == 0, answer.output
        return json.loads(answer.stdout)


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Calm:
    folder = tmp_path_factory.mktemp(KIND)
    with Store.open(f"sqlite:///{folder / 'moevolve.db'}") as store:
        setup = set_up(RunConfig.model_validate(RUN), f"{KIND}-1")
        register(setup, store)
        return Calm(folder, execute(setup, store, Observer(), local_pool))


def test_questions_to_the_store(calm: Calm, tmp_path: Path) -> None:
    (search,) = calm.json("searches")
    found = search["search"]["name"], search["search"]["genome_kind"], search["individuals"], search["failed"]
    assert found == (KIND, KIND, TOTAL, 0)
    first = calm.json("best", "--task", "demo-relation", "--limit", 2)[0]
    assert (first["ref"], first["ranked_by"]) == (calm.winner, "dev")
    detail = calm.json("show", calm.winner)
    shown = detail["individual"]
    assert (shown["summary"], shown["phase"], shown["status"]) == (first["summary"], "tune", "ok")
    assert {row["split"] for row in detail["evaluations"]} == {"search", "dev", "test"}
    assert shown["active_parameters"] < shown["parameters_full"]
    graph = calm.json("lineage", f"{KIND}:{TOTAL - 1}")
    assert graph["edges"] and {node["phase"] for node in graph["nodes"]} == {"tune"}
    assert shown["summary"] in calm.ask("show", calm.winner).stdout
    assert shown["summary"].split()[0] in calm.ask("lineage", calm.winner).stdout  # long ones are wrapped there
    assert calm.winner in calm.ask("best", "--experts", shown["experts"], "--active", shown["active"]).stdout
    assert calm.json("best", "--experts", 99) == []
    assert calm.ask("plot", KIND, "-o", tmp_path / "course.png").exit_code == 0
    assert (tmp_path / "course.png").read_bytes().startswith(b"\x89PNG")


def test_any_task_can_be_scored(calm: Calm, tmp_path: Path) -> None:
    task = {"extends": "demo-kin", "splits": {"dev": {"from": "dev", "count": 8}}}
    (tmp_path / "few.yaml").write_text(yaml.safe_dump(task))
    found = calm.json("evaluate", calm.winner, "--task", f"{tmp_path / 'few.yaml'}@kl", "--split", "dev")
    assert (found["record"]["task"], found["record"]["examples_seen"]) == ("few@kl", 8)
    assert 0 < found["interval"][0] < found["score"] < found["interval"][1] < 1


def test_an_export_answers_as_it_was_scored(calm: Calm, outsider: Callable[..., list[Any]], tmp_path: Path) -> None:
    """Loaded where there is no moevolve."""
    folder = tmp_path / "native"
    report = calm.json("export", calm.winner, folder)
    split = prepare_split(load_task("demo-relation").with_counts({"test": TEST}), "test")
    ((_, texts, module),) = outsider([folder], torch.tensor([[4, 5]]), *(one.prompt for one in split.examples))
    shown = calm.json("show", calm.winner)
    assert (report["form"], report["parameters"]) == ("native", shown["individual"]["parameters"])
    assert module == "transformers_modules", "the checkpoint's own modelling code"
    words = AutoTokenizer.from_pretrained(folder)
    right = 0
    for text, one in zip(texts, split.examples, strict=True):
        answer = words.decode(text[len(words(one.prompt)["input_ids"]) :], skip_special_tokens=True)
        right += answer == one.references[0]
    scores = {row["split"]: row["score"] for row in shown["evaluations"]}
    assert right / TEST == pytest.approx(scores["test"])
    assert calm.winner in (folder / "README.md").read_text()


def test_what_is_refused(calm: Calm, tmp_path: Path) -> None:
    for arguments, message in (
        (("export", "full", tmp_path / "full"), "checkpoint already"),
        (("export", calm.winner, calm.folder), "not empty"),
        (("plot", KIND, "-o", tmp_path / "no" / "folder.png"), "can't be written"),
    ):
        refused = calm.ask(*arguments)
        assert isinstance(refused.exception, UserError)
        assert message in str(refused.exception)
    assert list(tmp_path.iterdir()) == []
