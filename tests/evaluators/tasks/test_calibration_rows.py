"""The split `calibration`: its own rows, whose prompts are in no other split, or a part of `search`."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.preparation.prepare import prepare_split, prepare_splits
from moevolve.evaluators.preparation.registry import load_task
from moevolve.evaluators.types import SPLITS, PreparedSplit

PROMPT = "{}\nA. Yes\nB. No\nAnswer:"
SPLITS_OF_ROWS: dict[str, Any] = {
    "search": {"from": "all", "seed": 1, "count": 4},
    "dev": {"from": "all", "seed": 1, "offset": 4, "count": 3},
    "test": {"from": "all", "seed": 1, "offset": 7},
}


def with_prompts(folder: Path, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The settings for a user's own file of calibration prompts."""
    (folder / "my.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "source": {"files": {"all": "rows.jsonl", "prompts": "my.jsonl"}},
        "splits": {"calibration": {"from": "prompts"}, **SPLITS_OF_ROWS},
    }


def texts(split: PreparedSplit) -> list[str]:
    return [example.prompt.split("\n")[0] for example in split.examples]


def test_a_file_of_prompts_is_enough(write_task: Any, tmp_path: Path) -> None:
    task = load_task(write_task(**with_prompts(tmp_path, [{"text": f"new {i}"} for i in range(3)])))
    prepared = prepare_splits(task)
    assert tuple(prepared) == SPLITS
    found = prepared["calibration"]
    assert [example.prompt for example in found.examples] == [PROMPT.format(f"new {i}") for i in range(3)]
    assert all((example.references, example.choices) == ((), ()) for example in found.examples)
    assert all(example.references and example.choices for example in prepared["search"].examples)
    assert prepare_split(task, "calibration").fingerprint == found.fingerprint
    assert prepare_split(load_task(write_task()), "search").fingerprint == prepared["search"].fingerprint


def test_rows_have_answers_all_or_none(write_task: Any, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"text": f"new {i}", "label": "true"} for i in range(3)]
    labelled = prepare_split(load_task(write_task(**with_prompts(tmp_path, rows))), "calibration")
    assert [example.references for example in labelled.examples] == [("A",)] * 3
    assert [example.choices for example in labelled.examples] == [("A", "B")] * 3
    # Data sets with hidden answers have a column for them all the same.
    for hidden in (None, "-1"):
        rows[1]["label"] = hidden
        partly = prepare_split(load_task(write_task(**with_prompts(tmp_path, rows))), "calibration")
        assert [example.references for example in partly.examples] == [()] * 3
        assert partly.fingerprint != labelled.fingerprint


def test_fields_that_only_answers_use_are_not_needed(write_task: Any, tmp_path: Path) -> None:
    rows = [{"text": f"text {i}", "gold": {"name": "ab"[i % 2]}} for i in range(12)]
    changes = {
        "rows": rows,
        "fields": {"gold_name": "gold.name", "body": "text"},
        "labels": {"gold_name": {"a": "A", "b": "B"}},
        "prompt": "{{ body }}\n",
        "answer": "{{ gold_name }}",
    }
    task = load_task(write_task(**changes, **with_prompts(tmp_path, [{"text": "new"}])))
    assert texts(prepare_split(task, "calibration")) == ["new"]
    task = load_task(write_task(**changes, **with_prompts(tmp_path, [{"words": "new"}])))
    with pytest.raises(UserError, match=r"my\.jsonl:1: field fields\.body: the row has no text"):
        prepare_split(task, "calibration")


def test_what_other_splits_ask_is_left_out(write_task: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"text": text} for text in ("text 3", "new", "text 11", "newer", "new")]
    with caplog.at_level(logging.INFO):
        task = load_task(write_task(**with_prompts(tmp_path, rows)))
        assert texts(prepare_split(task, "calibration")) == ["new", "newer"]
    assert "3 of 5 rows of `calibration` are left out" in caplog.text
    with pytest.raises(UserError, match=r"small\.yaml: all prompts of `calibration` also stand in other"):
        prepare_split(load_task(write_task(**with_prompts(tmp_path, rows[:3:2]))), "calibration")


def test_rows_of_one_source_are_disjoint_by_number(write_task: Any) -> None:
    own = {"calibration": {"from": "all", "seed": 1, "offset": 10}, **SPLITS_OF_ROWS}
    with pytest.raises(UserError, match="is in both `calibration` and `test`"):
        prepare_split(load_task(write_task(splits=own)), "calibration")
    assert texts(prepare_split(load_task(write_task(splits=own)), "test")), "it needs no rows to measure on"
    own["test"] = own["test"] | {"count": 3}
    prepared = prepare_splits(load_task(write_task(splits=own)))
    assert len({text for split in prepared.values() for text in texts(split)}) == 12


@pytest.mark.parametrize(("count", "listed"), [(2, False), (7, True), (12, False)])
def test_a_quarter_of_search_is_set_aside(write_task: Any, count: int, listed: bool) -> None:
    chosen = {"indices": list(range(count - 1, -1, -1))} if listed else {"seed": 1, "count": count}
    task = load_task(write_task(splits={"search": {"from": "all", **chosen}}))
    whole = texts(prepare_split(task, "search"))
    aside = task.with_calibration()
    prepared = prepare_splits(aside)
    rows = max(1, count // 4)
    assert texts(prepared["search"]) == whole[:-rows] and texts(prepared["calibration"]) == whole[-rows:]
    assert (aside.splits["search"].row_count, aside.splits["calibration"].row_count) == (count - rows, rows)
    assert all(example.references for example in prepared["calibration"].examples)
    assert prepared["search"].fingerprint == prepare_split(aside, "search").fingerprint
    other = aside.with_fitness("agreement")
    assert texts(prepare_split(other, "search")) == whole[:-rows], "under every fitness the same rows"


def test_tasks_with_rows_of_their_own_keep_search(write_task: Any, tmp_path: Path) -> None:
    task = load_task(write_task(**with_prompts(tmp_path, [{"text": "new"}])))
    assert task.with_calibration() == task
    only = load_task(write_task(splits={"search": {"from": "all", "indices": [3]}}))
    with pytest.raises(UserError, match=r"the only row of `search` is set aside to measure on, and none is left"):
        prepare_split(only.with_calibration(), "search")
