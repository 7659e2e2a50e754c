"""The path of one individual, as this room's README has it: every file that takes or returns one of its records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from local_workers import local_pool
from traced_paths import ROOT, listed_path, traced_path

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

RECORDS = (Offspring, EepEdit, IndividualRecord, EvaluationRequest, EvaluationReply, SplitResult, EvaluationRecord)


def test_the_readme_lists_the_files_on_the_path_of_an_individual(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    phases = [{"kind": "prune", "evaluations": 6, "initial": 3, "init": ["random"]}]
    config = load_run_config(tiny.write_run(tmp_path / "run.yaml", "path", phases=phases, window=1))
    setup, run, found = set_up_new(config), SearchLoop.run, set[str]()
    monkeypatch.setattr(SearchLoop, "run", lambda loop: found.update(traced_path(lambda: run(loop), RECORDS)))
    with Store.open(f"sqlite:///{tmp_path / 'store.db'}") as store:
        register(setup, store)
        execute(setup, store, Observer(), local_pool)
    listed = listed_path(ROOT / "search" / "loop" / "README.md", "The path of one individual")
    assert {path.replace("<kind>", "eep").replace("ray_pool", "local") for path in listed} == found
    assert len(listed) <= 22
