"""Every task file that comes with the package: parses, renders a row in the hub's format, keeps its splits apart."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pytest
import yaml
from demo.prompts import CHOICES, TEMPLATE
from demo.tasks import TASKS

from moevolve.evaluators.matching.registry import make_matcher
from moevolve.evaluators.preparation import prepare
from moevolve.evaluators.preparation.registry import list_tasks, load_task
from moevolve.evaluators.tasks.config import Source
from moevolve.evaluators.tasks.datasets import Table
from moevolve.evaluators.tasks.installed import DOMAINS
from moevolve.evaluators.tasks.selection import check_disjoint, select_rows
from moevolve.evaluators.types import Example

HELD_OUT = {
    "electrical_engineering",
    "professional_accounting",
    "high_school_macroeconomics",
    "high_school_computer_science",
    "business_ethics",
    "miscellaneous",
    "high_school_psychology",
}
# What tests of packaged tasks read from: see the file.
ROWS: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("rows.yaml").read_text(encoding="utf-8"))
PLAIN = {name: found for name, found in ROWS.items() if not name.startswith("eep/")}
TRAINING_ROWS = {name: found["training_rows"] for name, found in PLAIN.items() if "training_rows" in found}


def _serve(monkeypatch: pytest.MonkeyPatch, rows: list[dict[str, Any]]) -> None:
    """Return the same rows for every source split of the hub."""

    def fake(source: Source, split: str) -> Table:
        return Table(split, datasets.Dataset.from_list(rows))

    monkeypatch.setattr(prepare, "load_table", fake)


def test_every_packaged_task_is_tried() -> None:
    listed = {name for name in list_tasks() if not name.startswith("eep/")}
    assert {name for name in list_tasks() if name not in listed} == ROWS.keys() - PLAIN
    assert listed == {*PLAIN, "mmlu-ood"} | {f"demo-{name}" for name in TASKS} | {f"text-{name}" for name in DOMAINS}


@pytest.mark.parametrize("name", [name for name, found in ROWS.items() if "prompt" in found])
def test_a_hub_row_becomes_the_prompt(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    found, task = ROWS[name], load_task(name)
    _serve(monkeypatch, [found["row"]])
    test = task.splits["test"].model_copy(update={"where_not": {}, "offset": 0, "count": None, "indices": None})
    whole = task.model_copy(update={"splits": {"test": test}})
    (example,) = prepare.prepare_split(whole, "test").examples
    wanted = Example(found["prompt"], tuple(found["references"]), tuple(found.get("choices", ())))
    assert replace(example, shots=(), choices=example.choices if name in PLAIN else ()) == wanted
    assert len(example.shots) == {"eep/drop": 2, "eep/gsm8k": 4}.get(name, 0)


def test_splits_take_different_training_rows_and_leave_some_to_measure_on() -> None:
    """The sizes are those that the data sets' authors give, as far as splits reach."""
    tasks = {name: load_task(name) for name in PLAIN}
    assert set(TRAINING_ROWS) == {
        name for name, task in tasks.items() if any(each.source == "train" for each in task.splits.values())
    }
    for name, given in TRAINING_ROWS.items():
        splits, count = tasks[name].splits, min(given, 10_000 if name == "wikitext2" else 2_600)
        table = Table(name, datasets.Dataset.from_dict({"text": ["word " * 50] * count}))
        rows = {split: select_rows(table, chosen) for split, chosen in splits.items() if chosen.source == "train"}
        check_disjoint(rows, name)
        assert len(rows["search"]) >= 150 and len(rows.get("dev", range(100))) >= 100, name
        if "calibration" in splits:
            assert len(rows["calibration"]) == {"wsc": 42}.get(name, splits["calibration"].row_count)
            assert len(rows["calibration"]) >= 512 or name == "wsc"
        else:
            assert count - sum(map(len, rows.values())) == 0, "rows are left to measure on"


def test_mmlu_searches_on_fifty_subjects_and_holds_out_seven(monkeypatch: pytest.MonkeyPatch) -> None:
    subjects = sorted(HELD_OUT) + [f"subject_{i}" for i in range(50)]
    row = ROWS["mmlu"]["row"]
    _serve(monkeypatch, [row | {"subject": s, "question": f"{s} {i}"} for i in range(8) for s in subjects])
    seen = prepare.prepare_splits(load_task("mmlu"))
    held = prepare.prepare_splits(load_task("mmlu-ood"))
    assert [len(split.examples) for split in seen.values()] == [200, 200, 400]
    assert {name: len(split.examples) for name, split in held.items()} == {"test": 56}
    questions = {name: {e.prompt.split("\n")[1].split()[1] for e in split.examples} for name, split in seen.items()}
    assert all(len(found) == 50 and not found & HELD_OUT for found in questions.values())
    assert {e.prompt.split("\n")[1].split()[1] for e in held["test"].examples} == HELD_OUT


@pytest.mark.parametrize("name", ["hellaswag", "gsm8k"])
def test_the_authors_further_sets_on_local_files(tmp_path: Path, name: str) -> None:
    """With JSONL files that have the hub data sets' columns, splits take different rows."""
    row = ROWS[name]["row"]
    field = {"hellaswag": "ctx", "gsm8k": "question"}[name]
    for source, count in (("train", 1540), ("validation", 7), ("test", 7)):
        rows = [row | {field: f"{source} {n} {row[field]}"} for n in range(count)]
        (tmp_path / f"{source}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in rows))
    files = {source: f"{source}.jsonl" for source in ("train", "validation", "test")}
    (tmp_path / "mine.yaml").write_text(json.dumps({"extends": name, "source": {"files": files}}))
    prepared = prepare.prepare_splits(load_task(tmp_path / "mine.yaml"))
    sizes = {split: len(value.examples) for split, value in prepared.items()}
    assert sizes == {"calibration": 1024, "search": 256, "dev": 256, "test": 7}
    prompts = [example.prompt for value in prepared.values() for example in value.examples]
    assert len(set(prompts)) == len(prompts)
    tested = {"hellaswag": "validation", "gsm8k": "test"}[name]
    assert all(f"{tested} " in example.prompt for example in prepared["test"].examples)
    assert all("train " in example.prompt for example in prepared["dev"].examples)
    matcher, example = make_matcher(prepared["test"].matching), prepared["test"].examples[0]
    right = {"gsm8k": " 2 and 3 are 5.\n#### 5.00\n\n#### 6"}.get(name, f" {example.references[0]}.\nno")
    wrong = {"gsm8k": "5 of 6 are\n#### 6"}.get(name, " none")
    assert (matcher.match(right, example), matcher.match(wrong, example)) == (1.0, 0.0)
    assert matcher.decided(right, example)


def test_wikitext2_is_running_text_in_windows(tmp_path: Path) -> None:
    """With files that have the hub data set's columns, every row is a line of an article, complete and in order."""
    lines = ["", " = Valkyria = \n", "", *(f" Line {i} .\n" for i in range(8_500)), ""]
    for source in ("train", "validation", "test"):
        rows = [{"text": line and line.replace("Line", source)} for line in lines]
        (tmp_path / f"{source}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = {source: f"{source}.jsonl" for source in ("train", "validation", "test")}
    (tmp_path / "mine.yaml").write_text(json.dumps({"extends": "wikitext2", "source": {"files": files}}))
    prepared = prepare.prepare_splits(load_task(tmp_path / "mine.yaml"))
    assert {name: len(split.examples) for name, split in prepared.items()} == {
        "calibration": 4000,
        "search": 4000,
        "dev": len(lines),
        "test": len(lines),
    }
    # As GPTQ and those after it join the rows.
    assert prepared["test"].running_text == "\n\n".join(line.replace("Line", "test") for line in lines)
    assert prepared["search"].running_text.startswith("\n\n = Valkyria = \n\n\n\n\n train 0 .\n")
    assert {(split.fitness, split.metric, split.window) for split in prepared.values()} == {
        ("perplexity", "inverse_perplexity", 4096)
    }


def test_demo_tasks_are_ready_to_use() -> None:
    for demo in TASKS:
        task = load_task(f"demo-{demo}")
        assert (task.prompt, tuple(task.choices or ())) == (TEMPLATE, CHOICES.get(demo, ()))
        assert [chosen.source for chosen in task.splits.values()] == ["calibration", "search", "dev", "test"]
    prepared = prepare.prepare_splits(task)
    assert [len(split.examples) for split in prepared.values()] == [2000, 400, 300, 1000]
