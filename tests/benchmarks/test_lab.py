from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.bench

LAB = Path(__file__).with_name("lab.py")


def rehearse(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(LAB), "--rehearse", "--threads", "1", "--out", str(folder), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_rehearsal_runs_every_row_once(tmp_path: Path) -> None:
    ended = rehearse(tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    results: list[dict[str, Any]] = [json.loads(line) for line in (tmp_path / "lab.jsonl").read_text().splitlines()]
    assert len({each["key"] for each in results}) == 77
    assert {each["form"] for each in results} == {"raw", "repaired", "searched"}
    assert all(set(each["perplexity"]) == {"prose", "code"} for each in results)
    assert "| 50 | FLAP | repaired |" in (tmp_path / "lab.md").read_text()

    # A line that is missing is the only row that runs again.
    (tmp_path / "lab.jsonl").write_text("".join(json.dumps(each) + "\n" for each in results[1:]))
    again = rehearse(tmp_path)
    assert again.returncode == 0 and "77 of 77 rows" in again.stdout
    last = (tmp_path / "lab.jsonl").read_text().splitlines()[-1]
    assert len((tmp_path / "lab.jsonl").read_text().splitlines()) == len(results)
    assert json.loads(last)["perplexity"] == results[0]["perplexity"]
    assert "all 77 rows" in rehearse(tmp_path).stdout


def test_no_paragraph_is_in_two_splits(tmp_path: Path) -> None:
    rehearse(tmp_path, "--only", "no such row")
    for text in ("prose", "code"):
        splits = []
        for split in ("calibration", "search", "dev", "test"):
            rows = [json.loads(line)["text"] for line in (tmp_path / f"{text}-{split}.jsonl").read_text().splitlines()]
            splits.append({paragraph for row in rows for paragraph in row.split("\n\n") if len(paragraph) > 40})
        assert all(splits) and sum(map(len, splits)) == len(set().union(*splits))
