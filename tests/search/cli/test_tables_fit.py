"""Every table that a command prints can be read in a pipe, with 80 characters a line, however long its names are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from canned_profilee import CannedProfilees
from commands_here import run_command, worker_here
from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from moevolve.search.cli.output import console

SEARCH, OTHER = (f"a-study-of-two-methods.{method}.s0" for method in ("searched-and-merged", "frequency-of-experts"))
TASKS = ("a-task-whose-name-is-rather-long", "answers-of-four-kinds-and-colours")
PHASES = [{"kind": "prune", "evaluations": 5, "initial": 4}, {"kind": "merge", "evaluations": 2, "initial": 1}]
GIVEN = " --prompt-tokens 9 --examples 9"


@pytest.fixture(scope="module")
def folder(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished study of two searches on two tasks, and a run file."""
    folder = tmp_path_factory.mktemp("tables")
    for name in TASKS:
        task = yaml.safe_load(tiny.task.read_text())
        for file in (files := task["source"]["files"]):
            files[file] = str(tiny.folder / files[file])
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(task))
    tasks = [str(folder / f"{name}.yaml") for name in TASKS]
    run = {"tasks": tasks, "phases": PHASES, "final": {"rerank": 2, "random_baselines": 2}}
    tiny.write_run(folder / "run.yaml", "a-run-with-quite-a-long-name", **run)
    base = tiny.run_data("unused", **run)
    del base["name"]
    methods = {"searched and merged": {}, "frequency of experts": {"baseline": "frequency"}}
    study = {"name": "a-study-of-two-methods", "base": base, "methods": methods, "seeds": [0]}
    (folder / "study.yaml").write_text(yaml.safe_dump(study, sort_keys=False))
    with worker_here():
        done = run_command(folder, "study", "study.yaml")
    assert done.returncode == 0, done.stderr
    return folder


class Watched(Table):
    """A table that says what can't be read in it."""

    def faults(self) -> list[str]:
        found = []
        for column in self.columns:
            width = column.width or 0
            for cell in map(str, [column.header, *column.cells]):
                broken = any(len(word) <= 20 and cell_len(word) > width for word in cell.split())
                lines = len(Text(cell).wrap(console.output, width, overflow="fold"))
                tall = lines > max(3, cell.count("\n") + 1) and width < console.output.width // 2
                if broken or (tall and cell != column.header):
                    found.append(f"{cell!r} in {width} characters")
        return found


@pytest.mark.parametrize(
    "command",
    [
        *("searches", f"show {SEARCH}", f"show {SEARCH}:5", f"show {SEARCH}:6 --genome"),
        *(f"show {SEARCH}:5 --against {OTHER}:0", "best", f"best --search {SEARCH}", f"pareto --search {SEARCH}"),
        *(f"pareto {TASKS[0]}", f"compare {SEARCH} {OTHER}", f"effects {SEARCH}", f"lineage {SEARCH}:6", "tasks"),
        *(f"answers {SEARCH}:3 --task {TASKS[1]} --limit 2{more}" for more in ("", " --prompts", " --stored")),
        *(f"{verb} {SEARCH}:3 --task {TASKS[1]}" for verb in ("evaluate", "analyse")),
        *("plan run.yaml", f"plan run.yaml --model mixtral-8x7b --model qwen3-30b-a3b{GIVEN}", "db check"),
        *(f"watch {SEARCH}", "study study.yaml", f"profile {SEARCH}:3 --batch-sizes 1,2"),
    ],
)
def test_every_table_can_be_read(command: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Watched] = []

    def watched(**options: Any) -> Watched:
        made.append(Watched(**options))
        return made[-1]

    if command.startswith("profile"):
        CannedProfilees(monkeypatch, tmp_path)
    monkeypatch.setattr(console, "Table", watched)
    monkeypatch.setattr(console.output, "width", 80)
    with worker_here():
        done = run_command(folder, *command.split())
    assert done.returncode == 0, done.stderr
    assert not [fault for table in made for fault in table.faults()]
    lines = done.stdout.splitlines()
    assert all((line and ord(max(line)) < 0x2500) or cell_len(line) <= 80 for line in lines)
    assert made or any("  " in line for line in lines), "rows one below the other"
