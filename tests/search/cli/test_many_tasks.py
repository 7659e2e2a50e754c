"""Searches with several weighted tasks, held-out tasks and tie-breaks: whole, on a tiny real model in this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from local_workers import local_pool
from typer.testing import CliRunner

from moevolve.evaluators.errors import UserError
from moevolve.search.cli.app import app
from moevolve.search.config.files import load_run_config, parse_run_config
from moevolve.search.running.execute import execute
from moevolve.search.running.launch import register, set_up_new
from moevolve.search.running.observer import Observer
from moevolve.search.running.resume import set_up_stored
from moevolve.store.repository import Store

SMALL = {"phases": [{"kind": "prune", "evaluations": 5, "initial": 4}], "engine": {"batch_tokens": 512}}


def ask(tmp_path: Path, *arguments: str) -> Any:
    done = CliRunner().invoke(app, [*arguments, "--store", f"sqlite:///{tmp_path}/store.db", "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_one_search_keeps_the_scores_of_all_its_tasks(tiny: Any, store: Store, tmp_path: Path) -> None:
    other = tmp_path / "colours.yaml"
    task = yaml.safe_load(tiny.task.read_text())
    task["source"]["files"]["all"] = str(tiny.folder / "pick.jsonl")
    other.write_text(yaml.safe_dump(task | {"prompt": "{{ text }} the Answer is", "fitness": "generate"}))
    tasks = [{"name": str(tiny.task), "weight": 3}, {"name": str(other), "counts": {"search": 30}}]
    data = tiny.run_data("both", tasks=tasks, final={"rerank": 3, "random_baselines": 2}, **SMALL)
    setup = set_up_new(parse_run_config(data, "test"))
    register(setup, store)
    report = execute(setup, store, Observer(), local_pool)
    for index in range(5):
        shown = ask(tmp_path, "show", f"both:{index}")
        scores = {e["task"]: e for e in shown["evaluations"] if e["split"] == "search"}
        assert {name: row["examples_seen"] for name, row in scores.items()} == {"pick": 24, "colours": 30}
        for key, total in (("score", "fitness"), ("gold_logprob", "tie_break")):
            expected = (3 * scores["pick"][key] + scores["colours"][key]) / 4
            assert shown["individual"][total] == pytest.approx(expected)
    for name in ("pick", "colours"):
        rows = ask(tmp_path, "best", "--task", name, "--split", "search", "--limit", "20")
        assert {row["task"] for row in rows} == {name}
        scores = [row["search_score"] for row in rows]
        assert scores == sorted(scores, reverse=True)
        assert len(rows) == len({row["phenotype_hash"] for row in rows}) > 2
    measured = {(score.task, score.split) for row in report.entries for score in row.scores}
    assert measured == {(name, split) for name in ("pick", "colours") for split in ("search", "dev", "test")}
    assert set_up_stored(store, "both").prepared == setup.prepared


def test_a_search_cannot_be_resumed_with_a_split_it_was_launched_without(tiny: Any, store: Store) -> None:
    data = tiny.run_data("short", tasks=[{"name": str(tiny.task)}], **SMALL)
    register(set_up_new(parse_run_config(data | {"final": {"rerank": 0, "test": False}}, "test")), store)
    for final, advice in (({"rerank": 2, "test": False}, "final.rerank: 0"), ({"rerank": 0}, "final.test: false")):
        with pytest.raises(UserError, match=f"launched without it; set {advice}"):
            set_up_stored(store, "short", lambda _, final=final: parse_run_config(data | {"final": final}, "test"))


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
    tiny.write_run(path, "theirs", tasks=tasks, final={"rerank": 2}, **SMALL)
    config = load_run_config(path)
    assert config.tasks[0].name == f"lm_eval:{tmp_path}/theirs.yaml#acc"
    setup = set_up_new(config)
    register(setup, store)
    execute(setup, store, Observer(), local_pool)
    shown = ask(tmp_path, "show", "theirs:0")
    scores = {e["task"]: e for e in shown["evaluations"] if e["split"] == "search"}
    assert set(scores) == {"lm_eval:theirs#acc", "lm_eval:theirs@agreement", "pick"}
    assert shown["individual"]["fitness"] == pytest.approx(sum(each["score"] for each in scores.values()) / 3)
    assert scores["lm_eval:theirs#acc"]["examples_seen"] == 30
    assert ask(tmp_path, "best", "--task", "lm_eval:theirs#acc")[0]["dev_score"] is not None
    found = ask(tmp_path, "evaluate", "theirs:0", "--task", f"lm_eval:{tmp_path}/theirs.yaml#acc", "--split", "test")
    (record,), (score,) = (found["models"][0][name] for name in ("records", "scores"))
    assert (record["task"], record["examples_seen"]) == ("lm_eval:theirs#acc", 20)
    assert score["low"] <= score["score"] <= score["high"]
    given = ("--prompt-tokens", "160", "--examples", "256")
    planned = CliRunner().invoke(app, ["plan", str(path), *given])
    assert isinstance(planned.exception, UserError) and "can't be planned" in str(planned.exception)
