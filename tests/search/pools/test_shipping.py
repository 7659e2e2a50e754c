"""Files copied for a cluster: the package, and the files that a run names."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.preparation.prepare import prepare_split
from moevolve.evaluators.preparation.registry import load_task
from moevolve.search.config.files import load_run_config
from moevolve.search.config.run import RunConfig
from moevolve.search.pools.shipping import RUN, pack

ROOM = 1 << 20


@pytest.fixture
def config(tiny: Any, tmp_path: Path) -> RunConfig:
    (tmp_path / "sent").mkdir()
    url = "postgresql://me:secret@host/searches"
    return load_run_config(tiny.write_run(tmp_path / "run.yaml", "calm", store=url, final={"held_out": ["demo-count"]}))


def test_the_copied_run_is_the_same_search(config: RunConfig, tmp_path: Path) -> None:
    environment = pack(config, tmp_path / "sent", False, ROOM)
    sent_files = Path(environment["working_dir"])
    run = sent_files / RUN
    there = load_run_config(run)
    assert there.config_hash == config.config_hash and there.store == config.store
    assert there.workers.address == "auto" and run.stat().st_mode & 0o777 == 0o600
    assert there.final.held_out == ("demo-count",) and environment["env_vars"] == {}
    (mine,), (sent,) = config.tasks, there.tasks
    assert Path(sent.name).is_relative_to(sent_files) and Path(there.model.path).is_relative_to(sent_files)
    for split in ("search", "dev", "test"):
        assert prepare_split(load_task(sent.name), split) == prepare_split(load_task(mine.name), split)
    assert {path.name for path in Path(there.model.path).iterdir()} == {
        path.name for path in Path(config.model.path).iterdir()
    }


def test_the_copied_package_is_importable_and_paths_that_all_nodes_share_stay_as_they_are(
    config: RunConfig, tmp_path: Path
) -> None:
    environment = pack(config, tmp_path / "sent", True, 0)
    run = Path(environment["working_dir"]) / RUN
    there = load_run_config(run)
    assert there == config.model_copy(update={"workers": there.workers})
    assert [path.name for path in run.parent.iterdir()] == [Path(RUN).name]
    program = (
        "import importlib.metadata, json, moevolve, moevolve.kernels.routing_rule as kernels\n"
        "importlib.metadata.version('moevolve')\n"
        "print(json.dumps([moevolve.__file__, kernels.__file__, len(moevolve.tasks())]))"
    )
    path = os.pathsep.join({str(Path(module).parent) for module in environment["py_modules"]})
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    *homes, tasks = json.loads(done.stdout)
    assert all(Path(home).is_relative_to(tmp_path / "sent") for home in homes) and tasks > 10


def test_what_is_too_large_and_task_files_that_may_be_programs_are_not_sent(config: RunConfig, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"^model\.path: {config.model.path} is too large .* --shared-paths"):
        pack(config, tmp_path / "large", False, 1000)
    task = config.tasks[0].model_copy(update={"name": "lm_eval:/home/me/own.yaml#acc"})
    with pytest.raises(UserError, match=r"own\.yaml#acc: files of lm-evaluation-harness can't be sent"):
        pack(config.model_copy(update={"tasks": (task,)}), tmp_path / "sent", False, ROOM)


def test_a_task_in_a_folder_of_the_users_own_keeps_its_name(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own" / "deep").mkdir(parents=True)
    for name in ("pick.jsonl", "prompts.jsonl"):
        (tmp_path / "own" / name).write_bytes((tiny.folder / name).read_bytes())
    task = yaml.safe_load(tiny.task.read_text())
    (tmp_path / "own" / "base.yaml").write_text(yaml.safe_dump(task))
    (tmp_path / "own" / "deep" / "heir.yaml").write_text(yaml.safe_dump({"extends": "base", "fitness": "generate"}))
    monkeypatch.setenv("MOEVOLVE_TASKS", str(tmp_path / "own"))
    run = tiny.write_run(tmp_path / "run.yaml", "calm", tasks=["deep/heir@rank", "base"])
    here = [prepare_split(load_task(name), "search") for name in ("deep/heir@rank", "base")]
    (tmp_path / "sent").mkdir()
    environment = pack(load_run_config(run), tmp_path / "sent", False, ROOM)
    monkeypatch.chdir(environment["working_dir"])
    monkeypatch.setenv("MOEVOLVE_TASKS", environment["env_vars"]["MOEVOLVE_TASKS"])
    there = load_run_config(Path(RUN))
    assert [prepare_split(load_task(task.name), "search") for task in there.tasks] == here
