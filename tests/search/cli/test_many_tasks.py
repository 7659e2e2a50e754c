"""Searches with several weighted tasks, held-out tasks and tie-breaks: whole, on a tiny real model in this process."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from local_workers import local_pool
from typer.testing import CliRunner

from moevolve.evaluators.errors import UserError
from moevolve.search.cli.app import app
from moevolve.search.cli.output.final_table import print_final_table
from moevolve.search.config.files import load_run_config, parse_run_config
from moevolve.search.loop.final_table import FinalTable
from moevolve.search.loop.setup import SearchSetup
from moevolve.search.running.execute import execute
from moevolve.search.running.launch import register, set_up_new
from moevolve.search.running.observer import Observer
from moevolve.search.running.resume import set_up_stored
from moevolve.search.text import percent
from moevolve.store.repository import Store

RUNS = Path(__file__).parents[3] / "configs" / "runs"
SMALL = {"phases": [{"kind": "prune", "evaluations": 8, "initial": 4}], "engine": {"batch_tokens": 512}}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(f"sqlite:///{tmp_path}/s.db") as opened:
        yield opened


def run(store: Store, data: dict[str, Any]) -> tuple[SearchSetup, FinalTable]:
    setup = set_up_new(parse_run_config(data, "test"))
    register(setup, store)
    return setup, execute(setup, store, Observer(), local_pool)


def ask(tmp_path: Path, *arguments: str) -> Any:
    done = CliRunner().invoke(app, [*arguments, "--store", f"sqlite:///{tmp_path}/s.db", "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_one_search_keeps_the_scores_of_all_its_tasks(
    tiny: Any, store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "colours.yaml"
    task = yaml.safe_load(tiny.task.read_text())
    task["source"]["files"]["all"] = str(tiny.folder / "pick.jsonl")
    other.write_text(yaml.safe_dump(task | {"prompt": "{{ text }} the Answer is", "fitness": "generate"}))
    tasks = [{"name": str(tiny.task), "weight": 3}, {"name": str(other), "counts": {"search": 30}}]
    setup, report = run(store, tiny.run_data("both", tasks=tasks, final={"rerank": 3, "random_baselines": 2}, **SMALL))

    fitness = {}
    for index in range(8):
        shown = ask(tmp_path, "show", f"both:{index}")
        scores = {e["task"]: e for e in shown["evaluations"] if e["split"] == "search"}
        assert set(scores) == {"pick", "colours"}
        assert (scores["pick"]["examples_seen"], scores["colours"]["examples_seen"]) == (24, 30)
        fitness[index] = shown["individual"]["fitness"]
        assert shown["individual"]["fitness"] == pytest.approx(
            (3 * scores["pick"]["score"] + scores["colours"]["score"]) / 4
        )
        ties = [3 * scores["pick"]["gold_logprob"], scores["colours"]["gold_logprob"]]
        assert shown["individual"]["tie_break"] == pytest.approx(sum(ties) / 4)
    for name in ("pick", "colours"):
        rows = ask(tmp_path, "best", "--task", name, "--by", "search", "--limit", "20")
        assert {row["task"] for row in rows} == {name}
        scores = [row["search_score"] for row in rows]
        assert scores == sorted(scores, reverse=True)
        assert len(rows) == len({row["phenotype_hash"] for row in rows}) > 2
    measured = {(score.task, score.split) for row in report.entries for score in row.scores}
    print_final_table(report, "sqlite:///store.db")
    _, *blocks = re.split(r"│ (pick|colours) +│", capsys.readouterr().out)
    assert blocks[::2] == ["pick", "colours"]
    for name, table in zip(blocks[::2], blocks[1::2], strict=True):
        best = {score.split: score for score in report.entries[-1].scores if score.task == name}
        assert all(percent(score.score) in table for score in best.values())
    assert measured == {(name, split) for name in ("pick", "colours") for split in ("search", "dev", "test")}
    assert set_up_stored(store, "both").prepared == setup.prepared


def test_a_search_cannot_be_resumed_with_a_split_it_was_launched_without(tiny: Any, store: Store) -> None:
    data = tiny.run_data("short", tasks=[{"name": str(tiny.task)}], **SMALL)
    register(set_up_new(parse_run_config(data | {"final": {"rerank": 0, "test": False}}, "test")), store)
    for final, advice in (({"rerank": 2, "test": False}, "final.rerank: 0"), ({"rerank": 0}, "final.test: false")):
        with pytest.raises(UserError, match=f"launched without it; set {advice}"):
            set_up_stored(store, "short", lambda _, final=final: parse_run_config(data | {"final": final}, "test"))


def mmlu_files(folder: Path, subjects: list[str]) -> None:
    """Local stand-ins with the hub's columns: 8 validation and 2 test questions of every subject."""
    words = ("red", "blue", "green", "cat", "dog", "bird")
    for source, count in (("validation", 8), ("test", 2)):
        rows = [
            {
                "question": f"which {words[(i + n) % 6]} is the {words[n % 6]} {subject} {source} {n}",
                "subject": subject,
                "choices": [words[(i + n + c) % 6] for c in range(4)],
                "answer": (3 * i + n) % 4,
            }
            for n in range(count)
            for i, subject in enumerate(subjects)
        ]
        (folder / f"{source}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = {source: f"{source}.jsonl" for source in ("validation", "test")}
    for name in ("mmlu", "mmlu-ood"):
        task = {"extends": name, "source": {"files": files}, "fitness": "rank"}
        (folder / f"my-{name}.yaml").write_text(yaml.safe_dump(task))


def test_mmlu_as_in_the_paper(tiny: Any, store: Store, tmp_path: Path) -> None:
    held_out = yaml.safe_load((RUNS.parent / "tasks" / "mmlu-ood.yaml").read_text())["splits"]["test"]["where"]
    mmlu_files(tmp_path, [*held_out["subject"], *(f"subject_{i}" for i in range(50))])
    paper = load_run_config(RUNS / "mixtral-mmlu.yaml").model_dump(mode="json")
    assert (paper["tasks"][0]["name"], paper["final"]["held_out"]) == ("mmlu", ["mmlu-ood"])
    paper["model"] = {"path": str(tiny.model), "device": "cpu"}
    paper["genome"]["experts"] = 2
    paper["tasks"][0]["name"] = str(tmp_path / "my-mmlu.yaml")
    paper["final"] = {"rerank": 2, "held_out": [str(tmp_path / "my-mmlu-ood.yaml")]}
    setup, report = run(store, paper | {"name": "mmlu", "store": f"sqlite:///{tmp_path}/s.db"} | SMALL)
    prepared = {name: group[0] for name, group in setup.prepared.items()}
    assert {name: len(split.examples) for name, split in prepared.items()} == {"search": 200, "dev": 200, "test": 100}
    seen = [example.prompt for split in prepared.values() for example in split.examples]
    assert not any(subject.replace("_", " ") in prompt for prompt in seen for subject in held_out["subject"])
    (held,) = setup.held_out
    assert len(held.examples) == 14
    full, best = report.entries
    assert (full.label, best.ref) == ("full model", report.winner)
    assert ("my-mmlu-ood", "test") in {(score.task, score.split) for score in full.scores}
    assert report.winner is not None
    shown = ask(tmp_path, "show", report.winner)
    told = next(score for score in best.scores if score.task == "my-mmlu-ood")
    stored = next(e for e in shown["evaluations"] if e["task"] == "my-mmlu-ood")
    assert (stored["split"], stored["examples_seen"], stored["score"]) == ("test", 14, told.score)
    assert None not in (told.low, told.score, told.high) and told.low <= told.score <= told.high  # type: ignore[operator]


def test_held_out_tasks_are_held_out(tiny: Any) -> None:
    for final, said in (
        ({"held_out": [str(tiny.task)]}, "is one of `tasks`"),
        ({"held_out": ["mmlu-ood"], "test": False}, "scored on `test`"),
    ):
        with pytest.raises(UserError, match=f"final.held_out: .*{said}"):
            parse_run_config(tiny.run_data("x", tasks=[{"name": str(tiny.task)}], final=final), "test")


def test_a_search_on_a_task_of_lm_eval(tiny: Any, store: Store, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    words = ("red", "blue", "green", "cat", "dog", "bird")
    for source, count in (("validation", 60), ("test", 20)):
        rows = [
            {"text": f"the {words[i % 6]} is {words[i // 6 % 6]} {source}", "options": ["A", "B"], "gold": i % 5 % 2}
            for i in range(count)
        ]
        (tmp_path / f"{source}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {
        "task": "theirs",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {source: f"{source}.jsonl" for source in ("validation", "test")}},
        "validation_split": "validation",
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{text}} Answer :",
        "doc_to_choice": "{{options}}",
        "doc_to_target": "gold",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    (tmp_path / "theirs.yaml").write_text(yaml.safe_dump(task))
    path = tmp_path / "run.yaml"
    tasks = ["lm_eval:./theirs.yaml#acc", "lm_eval:./theirs.yaml@agreement", str(tiny.task)]
    settings = {"final": {"rerank": 2}, "store": f"sqlite:///{tmp_path}/s.db"}
    tiny.write_run(path, "theirs", tasks=tasks, **settings, **SMALL)
    config = load_run_config(path)
    assert config.tasks[0].name == f"lm_eval:{tmp_path}/theirs.yaml#acc"
    setup = set_up_new(config)
    register(setup, store)
    report = execute(setup, store, Observer(), local_pool)
    names = ["lm_eval:theirs#acc", "lm_eval:theirs@agreement", "pick"]
    assert {score.task for row in report.entries for score in row.scores} == set(names)
    shown = ask(tmp_path, "show", "theirs:0")
    scores = {e["task"]: e for e in shown["evaluations"] if e["split"] == "search"}
    assert set(scores) == set(names)
    assert shown["individual"]["fitness"] == pytest.approx(sum(scores[name]["score"] for name in names) / 3)
    assert scores["lm_eval:theirs#acc"]["examples_seen"] == 30
    rows = ask(tmp_path, "best", "--task", "lm_eval:theirs#acc")
    assert rows[0]["dev_score"] is not None
    found = ask(tmp_path, "evaluate", "theirs:0", "--task", f"lm_eval:{tmp_path}/theirs.yaml#acc", "--split", "test")
    assert (found["record"]["task"], found["record"]["examples_seen"]) == ("lm_eval:theirs#acc", 20)
    assert found["interval"][0] <= found["score"] <= found["interval"][1]
