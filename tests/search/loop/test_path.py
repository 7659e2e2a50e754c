"""The path of one individual, as this room's README has it: every file that takes or returns one of its records."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from local_workers import local_pool

from moevolve.evaluators.types import SplitResult
from moevolve.search.config.files import load_run_config
from moevolve.search.genomes.contract.base import Offspring
from moevolve.search.loop.search_loop import SearchLoop
from moevolve.search.running.execute import execute
from moevolve.search.running.launch import register, set_up_new
from moevolve.search.running.observer import Observer
from moevolve.store.records import EvaluationRecord, IndividualRecord
from moevolve.store.repository import Store
from moevolve.workers.contract.messages import EvaluationReply, EvaluationRequest
from moevolve.workers.methods.eep.edit import EepEdit

ROOT = Path(__file__).parents[3]
RECORDS = (Offspring, EepEdit, IndividualRecord, EvaluationRequest, EvaluationReply, SplitResult, EvaluationRecord)


def holds_record(value: Any) -> bool:
    """Whether a value is a record of an individual, or a list or tuple that begins with one."""
    return isinstance(value, RECORDS) or (
        isinstance(value, list | tuple) and isinstance(next(iter(value), None), RECORDS)
    )


def traced_path(run: Any) -> set[str]:
    """The product's files whose functions take or return a record during a call; a record's own methods don't count."""
    found = set()

    def note(frame: FrameType, event: str, returned: Any) -> None:
        code = frame.f_code
        path = Path(code.co_filename)
        if event not in ("call", "return") or not path.is_relative_to(ROOT) or ".venv" in path.parts:
            return
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        values = [frame.f_locals.get(name) for name in names if name != "self"] if event == "call" else [returned]
        if any(map(holds_record, values)):
            found.add(path.relative_to(ROOT).as_posix())

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return {path for path in found if not path.startswith("tests/")}


def test_the_readme_lists_the_files_on_the_path_of_an_individual(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    phases = [{"kind": "prune", "evaluations": 6, "initial": 3, "init": ["random"]}]
    config = load_run_config(tiny.write_run(tmp_path / "run.yaml", "path", phases=phases, window=1))
    setup, run, found = set_up_new(config), SearchLoop.run, set[str]()
    monkeypatch.setattr(SearchLoop, "run", lambda loop: found.update(traced_path(lambda: run(loop))))
    with Store.open(f"sqlite:///{tmp_path / 'store.db'}") as store:
        register(setup, store)
        execute(setup, store, Observer(), local_pool)
    here = (ROOT / "search" / "loop" / "README.md").read_text(encoding="utf-8")
    table = here.split("## The path of one individual")[1].split("\n\n")[2]
    listed = set(re.findall(r"`([\w/<>]+\.py)`", table))
    assert {path.replace("<kind>", "eep").replace("ray_pool", "local") for path in listed} == found
    assert len(listed) <= 22
