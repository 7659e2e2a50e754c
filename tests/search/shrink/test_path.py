"""The path of one request, as this room's README has it: every file that takes or returns one of its records."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands_here import run_command, worker_here
from demo_chats import write_chats
from traced_paths import ROOT, listed_path, traced_path

from moevolve.search.interface.checkpoints.export import ExportRequest
from moevolve.search.loop.final_table import FinalTable
from moevolve.search.loop.setup import SearchSetup
from moevolve.search.running.candidates import Candidate
from moevolve.search.shrink import guard
from moevolve.search.shrink.amounts import Chosen
from moevolve.search.shrink.findings import TaskCheck, TaskLook, Written
from moevolve.search.shrink.goal import Amount, Goal
from moevolve.search.shrink.places import Place
from moevolve.search.shrink.record import Checks, Journal, ShrinkRecord
from moevolve.search.shrink.request import ShrinkRequest
from moevolve.search.shrink.result import ShrinkResult
from moevolve.search.shrink.settings import Sizes
from moevolve.workers.contract.card import ExportReport

RECORDS = (
    *(ShrinkRequest, Goal, Amount, Chosen, Place, Sizes, Journal, ShrinkRecord, SearchSetup, TaskLook, FinalTable),
    *(Candidate, TaskCheck, Checks, ExportRequest, ExportReport, Written, ShrinkResult),
)


def test_the_readme_lists_the_files_on_the_path_of_a_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_chats(tmp_path / "chats.jsonl", 100)
    monkeypatch.setattr(guard, "general_set", list)
    command = (
        *("shrink", ROOT / "configs" / "demo" / "model", "--data", "chats.jsonl", "--experts", "50%", "-o", "small"),
        *("--repair", "none", "--evaluations", "4", "--set", "workers.count=1", "--set", "engine.chat_template=none"),
        *("--set", "final.random_baselines=0", "--set", "tasks.0.counts={search: 8, dev: 4, test: 8}"),
    )
    codes: list[int] = []
    with worker_here():
        found = traced_path(lambda: codes.append(run_command(tmp_path, *command).returncode), RECORDS)
    assert codes == [0]
    listed = listed_path(ROOT / "search" / "shrink" / "README.md", "The path of a request")
    assert listed == found and len(listed) <= 40
