"""Every dense kind as a user meets it, on the demo model: searched, then every verb on what it found."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from dense_lab import complete
from transformers import AutoTokenizer
from typer.testing import CliRunner, Result

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.preparation.prepare import prepare_split
from moevolve.evaluators.preparation.registry import load_task
from moevolve.search.cli.app import app
from moevolve.search.cli.output.final_table import print_final_table
from moevolve.search.config.files import load_run_config
from moevolve.search.loop.final_table import FinalTable
from moevolve.search.running.launch import register
from moevolve.search.running.set_up import set_up
from moevolve.store.repository import Store

pytestmark = pytest.mark.slow

TOTAL, TEST = 12, 12
GENOMES: dict[str, dict[str, Any]] = {
    "factorllm": {"experts": 8, "active": 4, "calibration_tokens": 256},
    "tomoe": {"experts": 4, "budget": 0.6, "components": 4, "latent": 4, "calibration_tokens": 256},
    "nanomoe": {"variant": "II", "blocks": 4, "rank": 24, "layers": "*.mlp.up_proj", "fit": 1},
}


@dataclass(frozen=True)
class Calm:
    """A search in this process, named after its kind."""

    kind: str
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
def searched(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Calm]:
    """The search of each kind, run once."""
    made: dict[str, Calm] = {}

    def search(kind: str) -> Calm:
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind)
            run = load_run_config(write_run(folder, kind))
            with Store.open(f"sqlite:///{folder / 'moevolve.db'}") as store:
                setup = set_up(run, f"{kind}-1")
                register(setup, store)
                report = complete(setup, store)
            made[kind] = Calm(kind, folder, report)
        return made[kind]

    return search


@pytest.fixture(params=GENOMES)
def calm(request: pytest.FixtureRequest, searched: Callable[[str], Calm]) -> Calm:
    return searched(request.param)


def write_run(folder: Path, kind: str) -> Path:
    data = {
        "name": kind,
        "seed": 5,
        "model": {
            "path": str(Path(__file__).parents[3] / "configs" / "demo" / "dense"),
            "dtype": "float32",
            "device": "cpu",
        },
        "tasks": [{"name": "demo-relation", "counts": {"search": 16, "dev": 8, "test": TEST}}],
        "genome": {"kind": kind, **GENOMES[kind]},
        "phases": [{"kind": "tune", "evaluations": TOTAL, "initial": 6}],
        "window": 4,
        "workers": {"count": 1, "num_cpus": 0.5},
        "final": {"rerank": 2, "random_baselines": 2},
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


def test_questions_to_the_store(calm: Calm) -> None:
    (search,) = calm.json("searches")
    assert (search["search"]["name"], search["search"]["genome_kind"], search["individuals"], search["failed"]) == (
        calm.kind,
        calm.kind,
        TOTAL,
        0,
    )
    first = calm.json("best", "--task", "demo-relation", "--limit", 2)[0]
    assert (first["ref"], first["ranked_by"]) == (calm.winner, "dev")
    detail = calm.json("show", calm.winner)
    shown = detail["individual"]
    assert (shown["summary"], shown["phase"], shown["status"]) == (first["summary"], "tune", "ok")
    assert {row["split"] for row in detail["evaluations"]} == {"search", "dev", "test"}
    assert shown["active_parameters"] < shown["parameters_full"]
    graph = calm.json("lineage", f"{calm.kind}:{TOTAL - 1}")
    assert graph["edges"] and {node["phase"] for node in graph["nodes"]} == {"tune"}
    assert calm.ask("lineage", calm.winner, "--dot").stdout.startswith("digraph")
    assert shown["summary"] in calm.ask("show", calm.winner).stdout
    assert shown["summary"].split()[0] in calm.ask("lineage", calm.winner).stdout  # long ones are wrapped there
    assert calm.winner in calm.ask("best", "--experts", shown["experts"], "--active", shown["active"]).stdout
    assert calm.json("best", "--experts", 99) == []


def test_any_task_can_be_scored(calm: Calm, tmp_path: Path) -> None:
    task = {"extends": "demo-kin", "splits": {"dev": {"from": "dev", "count": 8}}}
    (tmp_path / "few.yaml").write_text(yaml.safe_dump(task))
    arguments = ("--task", f"{tmp_path / 'few.yaml'}@kl", "--split", "dev")
    found = calm.json("evaluate", calm.winner, *arguments)
    assert (found["record"]["task"], found["record"]["examples_seen"]) == ("few@kl", 8)
    assert 0 < found["interval"][0] < found["score"] < found["interval"][1] < 1
    assert calm.json("evaluate", calm.winner, *arguments) == found, "the second one comes from the store"
    full = calm.json("evaluate", "full", *arguments)
    assert full["score"] == pytest.approx(1.0, abs=1e-5)


def test_exports_answer_as_they_were_scored(
    searched: Callable[[str], Calm], outsider: Callable[..., list[Any]], tmp_path: Path
) -> None:
    """Loaded where there is no moevolve."""
    calms = [searched(kind) for kind in GENOMES]
    folders = [tmp_path / f"{kind}-native" for kind in GENOMES]
    reports = [calm.json("export", calm.winner, folder) for calm, folder in zip(calms, folders, strict=True)]
    split = prepare_split(load_task("demo-relation").with_counts({"test": TEST}), "test")
    found = outsider(folders, torch.tensor([[4, 5]]), *(one.prompt for one in split.examples))
    for calm, folder, report, (_, texts, module) in zip(calms, folders, reports, found, strict=True):
        assert report["form"] == "native"
        assert report["parameters"] == calm.json("show", calm.winner)["individual"]["parameters"]
        assert module == "transformers_modules", "the checkpoint's own modelling code"
        words = AutoTokenizer.from_pretrained(folder)
        right = 0
        for text, one in zip(texts, split.examples, strict=True):
            answer = words.decode(text[len(words(one.prompt)["input_ids"]) :], skip_special_tokens=True)
            right += answer == one.references[0]
        scores = {row["split"]: row["score"] for row in calm.json("show", calm.winner)["evaluations"]}
        assert right / TEST == pytest.approx(scores["test"])
        assert calm.winner in (folder / "README.md").read_text()


def test_pictures(calm: Calm, tmp_path: Path) -> None:
    assert calm.ask("plot", calm.kind, "-o", tmp_path / "course.png").exit_code == 0
    assert (tmp_path / "course.png").read_bytes().startswith(b"\x89PNG")


def test_what_is_refused(calm: Calm, tmp_path: Path) -> None:
    for arguments, message in (
        (("export", "full", tmp_path / "full"), "checkpoint already"),
        (("export", calm.winner, calm.folder), "not empty"),
        (("plot", calm.kind, "-o", tmp_path / "no" / "folder.png"), "can't be written"),
    ):
        refused = calm.ask(*arguments)
        assert isinstance(refused.exception, UserError)
        assert message in str(refused.exception)
    assert list(tmp_path.iterdir()) == []


def test_the_table_tells_what_a_token_uses(calm: Calm, capsys: pytest.CaptureFixture[str]) -> None:
    print_final_table(calm.report, "sqlite:///moevolve.db")
    heading = next(line for line in capsys.readouterr().out.splitlines() if "parameters" in line)
    # A token passes through all of a block-mixed layer.
    assert ("active" in heading) == (calm.kind != "nanomoe")
