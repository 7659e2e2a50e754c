"""Searches that measure on tasks without a `calibration` split: which rows they take for it, and where that is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from dense_lab import check_repeated_and_resumed, dense_run
from local_workers import local_pool

from moevolve.search.config.files import load_run_config
from moevolve.search.config.run import TaskSection
from moevolve.search.config.study import StudyCell, load_study
from moevolve.search.loop.setup import calibration_rows_note
from moevolve.search.running.candidates import find_candidate
from moevolve.search.running.observer import Observer
from moevolve.search.running.set_up import set_up
from moevolve.search.running.study import run_study
from moevolve.store.repository import Store

SAID = "task bare has no `calibration` split: 6 of its `search` rows are set aside to measure on"
NOTE = (
    "task bare has no `calibration` split: {} set aside to measure on; give it a `calibration` split to search on all "
    "of them"
)
PHASES = [{"kind": "prune", "evaluations": 5, "initial": 4, "init": ["frequency", "random"]}]


@pytest.fixture(scope="module")
def bare(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny task without rows to measure on."""
    task = yaml.safe_load(tiny.task.read_text())
    del task["splits"]["calibration"]
    task["source"]["files"] = {"all": str(tiny.task.parent / "pick.jsonl")}
    path: Path = tmp_path_factory.mktemp("bare") / "bare.yaml"
    path.write_text(yaml.safe_dump(task))
    return path


def test_a_search_says_which_rows_it_measures_on(
    tiny: Any, bare: Path, worker_here: None, in_process: Any, tmp_path: Path
) -> None:
    phases = [{**PHASES[0], "evaluations": 8}]
    run = tiny.write_run(tmp_path / "run.yaml", "measured", tasks=[str(bare)], phases=phases, final={"rerank": 1})
    planned = in_process("plan", run)
    assert planned.returncode == 0 and f"- {SAID}" in planned.stdout, planned.stderr
    launched = in_process("launch", run, "--store", "sqlite:///store.db", "--json")
    assert launched.returncode == 0, launched.stderr
    assert f"measured: {SAID}" in launched.stderr
    assert "measured: warning: phases.0 (prune) makes" in launched.stderr
    winner = json.loads(launched.stdout)["winner"]
    url = f"sqlite:///{tmp_path / 'store.db'}"
    with Store.open(url) as store:
        record = store.search("measured")
        weights = {(task.split, task.weight) for task in store.search_tasks(record.id, auxiliary=True)}
        assert weights == {("calibration", 0.0), ("search", 1.0), ("dev", 1.0), ("test", 1.0)}
        counted = {cost.split: cost.examples // cost.evaluations for cost in store.costs(record).splits}
        assert counted == {"search": 18, "dev": 20, "test": 21}
        assert find_candidate(store, "measured:0").edit.phenotype_hash == store.history(record.id)[0].phenotype_hash
        before = len(store.individual(winner).evaluations)
    # The search's own rows are those that its individuals are evaluated on from now on.
    scored = in_process("evaluate", winner, "--task", bare, "--split", "search", "--store", url, "--json")
    assert json.loads(scored.stdout)["models"][0]["records"][0]["examples_seen"] == 18, scored.stderr
    with Store.open(url) as store:
        assert len(store.individual(winner).evaluations) == before
    resumed = in_process("resume", "measured", "--store", url, "--json")
    assert json.loads(resumed.stdout)["winner"] == winner, resumed.stderr


def test_a_plan_says_how_many_rows_are_left(tiny: Any, bare: Path, in_process: Any, tmp_path: Path) -> None:
    """A search that measures nothing searches on all rows; where lengths are given, no rows are read."""
    plain = tiny.write_run(tmp_path / "plain.yaml", "plain", tasks=[str(bare)])
    given = tiny.write_run(tmp_path / "given.yaml", "given", tasks=[str(bare)], phases=PHASES, final={"test": False})
    for run, lengths, rows in ((plain, (), [24, 20, 21]), (given, ("--prompt-tokens", "12"), [18, 20])):
        found = json.loads(in_process("plan", run, *lengths, "--json").stdout)
        assert [split["examples"] for split in found["splits"]] == rows
        assert any(note.startswith(SAID) for note in found["notes"]) == (run == given)


def test_baselines_that_are_compared_measure_on_the_same_rows(tiny: Any, bare: Path, tmp_path: Path) -> None:
    base = tiny.run_data("unused", tasks=[str(bare)], phases=PHASES, final={"rerank": 1})
    del base["name"]
    methods = {"random": {"baseline": "random"}, "reap": {"baseline": "reap"}, "warm": None}
    data = {"name": "both", "base": base | {"store": f"sqlite:///{tmp_path / 'store.db'}"}, "methods": methods}
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(data))
    said: list[tuple[str, str]] = []

    def observer(place: int, cell: StudyCell) -> Observer:
        return Observer(on_note=lambda note: said.append((cell.method, note)))

    study = load_study(tmp_path / "study.yaml")
    with Store.open(study.store) as store:
        outcomes = run_study(study, store, observer, local_pool)
    assert [method for method, note in said if note.startswith(SAID)] == ["reap", "warm"]
    _, reap, warm = (outcome.setup.prepared for outcome in outcomes)
    assert not any(outcome.failure for outcome in outcomes) and reap["calibration"] == warm["calibration"]
    assert [len(outcome.setup.prepared["search"][0].examples) for outcome in outcomes] == [24, 18, 18]


def test_of_several_tasks_only_those_without_rows_give_some(tiny: Any, bare: Path, tmp_path: Path) -> None:
    tasks = [str(tiny.task), {"name": str(bare), "counts": {"search": 8}}]
    changes: dict[str, Any] = {"tasks": tasks, "phases": PHASES}
    setup = set_up(load_run_config(tiny.write_run(tmp_path / "run.yaml", "two", **changes)), "two-1")
    assert setup.notes == (NOTE.format("2 of its `search` rows are"),)
    sizes = {split: [len(each.examples) for each in group] for split, group in setup.prepared.items()}
    assert sizes == {"calibration": [63, 2], "search": [24, 6], "dev": [20, 20], "test": [21, 21]}
    assert calibration_rows_note("bare", None) == NOTE.format("a quarter of its `search` rows is")


def test_rows_set_aside_are_found_again_on_resume(tiny: Any, bare: Path, tmp_path: Path) -> None:
    genome = {"kind": "factorllm", "experts": 4, "active": 1, "calibration_tokens": 60}
    run = dense_run(tiny, tmp_path, genome, "divided")
    run = run.model_copy(update={"tasks": (TaskSection(name=str(bare), counts={"search": 20}),)})
    setup = set_up(run, "divided-1")
    assert setup.notes == (NOTE.format("5 of its `search` rows are"),)
    sizes = {split: len(group[0].examples) for split, group in setup.prepared.items()}
    assert sizes == {"calibration": 5, "search": 15, "dev": 20, "test": 21}
    assert {split.fingerprint for split in setup.prepared["calibration"]} < set(setup.all_prepared)
    check_repeated_and_resumed(run, tmp_path)
    with Store.open(f"sqlite:///{tmp_path / 'whole.db'}") as store:
        for reference in ("divided:0", "divided:15"):
            subject = find_candidate(store, reference)
            assert subject.detail is not None
            assert subject.edit.phenotype_hash == subject.detail.individual.phenotype_hash
