"""A dense kind as a user meets it, on the demo model; and whole searches of the others on a tiny one.

These are repeated and resumed; `test_set_aside` does that with divisions into experts."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import yaml
from dense_lab import check_repeated_and_resumed, dense_run, search
from local_workers import local_pool
from profile_lab import load_plainly
from transformers import AutoTokenizer
from typer.testing import CliRunner, Result

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.preparation.prepare import prepare_split
from moevolve.evaluators.preparation.registry import load_task
from moevolve.search.cli.app import app
from moevolve.search.config.run import RunConfig
from moevolve.search.running.candidates import find_candidate
from moevolve.search.running.execute import execute
from moevolve.search.running.launch import register
from moevolve.search.running.observer import Observer
from moevolve.search.running.resume import set_up_stored
from moevolve.search.running.set_up import set_up
from moevolve.store.records import IndividualRecord
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

MASKS = {"kind": "tomoe", "experts": 4, "calibration_tokens": 300}
MIXED = {"kind": "nanomoe", "variant": "II", "blocks": 4, "rank": 3, "fit": 3}


@dataclass(frozen=True)
class Calm:
    """A search in this process."""

    folder: Path
    winner: str

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
        return Calm(folder, str(execute(setup, store, Observer(), local_pool).winner))


def test_questions_to_the_store(calm: Calm) -> None:
    first = calm.json("best", "--task", "demo-relation", "--limit", 2)[0]
    assert (first["ref"], first["ranked_by"]) == (calm.winner, "dev")
    detail = calm.json("show", calm.winner)
    shown = detail["individual"]
    assert (shown["summary"], shown["phase"], shown["status"]) == (first["summary"], "tune", "ok")
    assert {row["split"] for row in detail["evaluations"]} == {"search", "dev", "test"}
    assert shown["active_parameters"] < shown["parameters_full"]
    assert shown["summary"] in calm.ask("show", calm.winner).stdout
    assert calm.winner in calm.ask("best", "--experts", shown["experts"], "--active", shown["active"]).stdout


def test_any_task_can_be_scored(calm: Calm, tmp_path: Path) -> None:
    task = {"extends": "demo-kin", "splits": {"dev": {"from": "dev", "count": 8}}}
    (tmp_path / "few.yaml").write_text(yaml.safe_dump(task))
    found = calm.json("evaluate", calm.winner, "--task", f"{tmp_path / 'few.yaml'}@kl", "--split", "dev")
    (record,), (score,) = (found["models"][0][name] for name in ("records", "scores"))
    assert (record["task"], record["examples_seen"]) == ("few@kl", 8)
    assert 0 < score["low"] < score["score"] < score["high"] < 1


def test_an_export_answers_as_it_was_scored(calm: Calm, tmp_path: Path) -> None:
    folder = tmp_path / "native"
    report = calm.json("export", calm.winner, folder)
    shown = calm.json("show", calm.winner)
    assert (report["form"], report["parameters"]) == ("native", shown["individual"]["parameters"])
    model, words, right = load_plainly(folder), AutoTokenizer.from_pretrained(folder), 0
    for one in prepare_split(load_task("demo-relation").with_counts({"test": TEST}), "test").examples:
        prompt = words(one.prompt, return_tensors="pt")
        text = model.generate(**prompt, max_new_tokens=4, do_sample=False)[0, prompt["input_ids"].shape[1] :]
        right += words.decode(text, skip_special_tokens=True) == one.references[0]
    scores = {row["split"]: row["score"] for row in shown["evaluations"]}
    assert right / TEST == pytest.approx(scores["test"])
    assert calm.winner in (folder / "README.md").read_text()


def test_what_is_refused(calm: Calm, tmp_path: Path) -> None:
    for message, *arguments in (
        ("name an individual as SEARCH:INDEX", "export", "full", tmp_path / "full"),
        ("not empty", "export", calm.winner, calm.folder),
        ("/dev/null: File exists", "plot", KIND, "-o", Path("/dev/null/folder.png")),
    ):
        refused = calm.ask(*arguments).exception
        assert isinstance(refused, UserError) and str(message) in str(refused)
    assert list(tmp_path.iterdir()) == []


def test_the_terms_of_masks_are_taken_off_the_score(tiny: Any, tmp_path: Path) -> None:
    check_repeated_and_resumed(dense_run(tiny, tmp_path, MASKS | {"coverage": 0.2, "balance": 0.1}, "masked"), tmp_path)
    with Store.open(f"sqlite:///{tmp_path / 'whole.db'}") as store:
        setup = set_up_stored(store, "masked")
        tasks = [split.fingerprint for split in setup.splits("search")]
        engine = store.search("masked").engine_fingerprint
        penalties = []
        for row in store.history("masked-1"):
            subject = find_candidate(store, f"masked:{row.index}")
            assert subject.edit.phenotype_hash == row.phenotype_hash
            records = store.evaluations(row.phenotype_hash, setup.facts.fingerprint, engine, tasks)
            assert subject.genome is not None
            penalties.append(subject.space.describe(subject.genome).penalty)
            assert row.fitness == pytest.approx(fmean(one.score or 0.0 for one in records) - penalties[-1])
        assert len(set(penalties)) > 10 and min(penalties) > 0


def test_plain_low_rank_is_evaluated_once_as_a_baseline_of_mixing(tiny: Any, tmp_path: Path) -> None:
    run = dense_run(tiny, tmp_path, MIXED, "mixed")

    def searched(evaluations: int, **genome: Any) -> list[IndividualRecord]:
        phases = tuple(phase.model_copy(update={"evaluations": evaluations, "initial": 1}) for phase in run.phases)
        changed = run.model_copy(update={"phases": phases, "genome": run.genome.model_copy(update=genome)})
        with Store.open(f"sqlite:///{tmp_path / genome['variant']}.db") as store:
            setup = set_up(changed, "mixed-1")
            register(setup, store)
            search(setup, store)
            return store.history("mixed-1")

    rows = searched(4, variant="low_rank")
    assert len(rows) == 4 and len({row.content_hash for row in rows}) == len({row.fitness for row in rows}) == 1
    assert searched(1, variant="I", fit=0)[0].fitness == rows[0].fitness, "mixing starts from it"
