"""A tiny search: a random Mixtral, a task whose scores differ between candidates, and commands in this process."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from tiny_models import MIXTRAL, WORDS, save_tiny_model

if TYPE_CHECKING:
    from moevolve.store.repository import Store

SLOW = {"batch_tokens": 20}
"""Engine with two prompts per forward pass: the same numbers, slowly enough for a search to be stopped on its way."""


@dataclass(frozen=True)
class TinyWorkspace:
    """A folder with a checkpoint `model/`, a task `pick.yaml` and runs to write.

    Attributes:
        folder: where it is.
    """

    folder: Path

    @property
    def model(self) -> Path:
        return self.folder / "model"

    @property
    def task(self) -> Path:
        return self.folder / "pick.yaml"

    def write_slow_run(self, path: Path, name: str) -> Path:
        return self.write_run(path, name, engine=SLOW)

    def run_data(self, name: str, **changes: Any) -> dict[str, Any]:
        """A run of 24 individuals as plain data; `changes` replace top-level settings."""
        data = {
            "name": name,
            "seed": 3,
            "model": {"path": str(self.model), "device": "cpu"},
            "tasks": [str(self.task)],
            "genome": {"kind": "eep", "experts": 2, "groups": 2},
            "phases": [
                {"kind": "prune", "evaluations": 12, "initial": 6},
                {"kind": "merge", "evaluations": 12, "sigma": 0.2},
            ],
            "window": 4,
            "workers": {"count": 1},
            "final": {"rerank": 3, "random_baselines": 4},
        }
        return data | changes

    def write_run(self, path: Path, name: str, **changes: Any) -> Path:
        path.write_text(yaml.safe_dump(self.run_data(name, **changes)))
        return path


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyWorkspace:
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_model(folder / "model", "mixtral", WORDS, seed=11, num_hidden_layers=4, **MIXTRAL)
    _write_task(folder)
    return TinyWorkspace(folder)


@pytest.fixture(scope="session")
def all_kinds(tiny: TinyWorkspace, tmp_path_factory: pytest.TempPathFactory) -> str:
    """URL of a store with a finished search of every genome kind, named by the kind. Not to be changed."""
    from report_lab import search_all_kinds

    return search_all_kinds(tiny, tmp_path_factory.mktemp("kinds"))


def _write_task(folder: Path) -> None:
    colours, animals = WORDS[:3], WORDS[3:6]
    rows = [
        {"text": f"the {animal} is {colour} a {other}", "label": "ABCD"[(7 * i + 3 * j + k) % 4]}
        for i, animal in enumerate(animals)
        for j, colour in enumerate(colours)
        for k, other in enumerate(WORDS[:9])
    ]
    (folder / "pick.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts = [
        {"text": f"the {animal} is {colour} a {other}"}
        for other in WORDS[9:]
        for animal in animals
        for colour in colours
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    task = {
        "source": {"files": {"all": "pick.jsonl", "prompts": "prompts.jsonl"}},
        "splits": {
            "calibration": {"from": "prompts"},
            "search": {"from": "all", "seed": 1, "count": 24},
            "dev": {"from": "all", "seed": 1, "offset": 40, "count": 20},
            "test": {"from": "all", "seed": 1, "offset": 60},
        },
        "prompt": "{{ text }} which Answer :",
        "answer": "{{ label }}",
        "choices": ["A", "B", "C", "D"],
        "fitness": "rank",
    }
    (folder / "pick.yaml").write_text(yaml.safe_dump(task))


Moevolve = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def in_process(tmp_path: Path) -> Moevolve:
    """Run the command line in `tmp_path`, in this process; see `commands_here`."""
    from commands_here import run_command

    def run(*arguments: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        return run_command(cwd or tmp_path, *arguments)

    return run


@pytest.fixture
def worker_here() -> Iterator[None]:
    """For commands in this process: their searches have one worker, in this process too, instead of any on Ray."""
    from commands_here import worker_here

    with worker_here():
        yield


@pytest.fixture(scope="session")
def ray_address() -> Iterator[str]:
    """A Ray cluster of this machine, with four CPUs whatever it has; a search that joins it need not start Ray."""
    from ray.cluster_utils import Cluster
    from ray_nodes import FRUGAL

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, **FRUGAL})
    yield cluster.address
    cluster.shutdown()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """An empty store in a file; tests that need it filled have a fixture of the same name that takes it."""
    from moevolve.store.repository import Store

    with Store.open(f"sqlite:///{tmp_path / 'store.db'}") as opened:
        yield opened


Snapshot = Callable[[Path, str], dict[str, Any]]


@pytest.fixture(scope="session")
def snapshot() -> Snapshot:
    """What two runs of the same search must have in common: everything but times, workers and attempts."""
    import sqlite3

    individuals = """
        select idx, phase, operator, genome, content_hash, phenotype_hash, summary, depth, i.status, fitness, tie_break,
               failure
        from individuals i join searches s on s.id = i.search_id where s.name = ? order by idx"""
    parents = """
        select child_idx, position, parent_idx from parents p join searches s on s.id = p.search_id
        where s.name = ? order by 1, 2"""
    evaluations = """
        select e.phenotype_hash, c.task_fingerprint, c.split, e.score, e.gold_logprob, e.outcomes, e.failure
        from evaluations e join evaluation_contexts c on c.id = e.context_id order by 1, 2"""

    def read(database: Path, name: str) -> dict[str, Any]:
        with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as connection:
            return {
                "individuals": connection.execute(individuals, (name,)).fetchall(),
                "parents": connection.execute(parents, (name,)).fetchall(),
                "evaluations": connection.execute(evaluations).fetchall(),
            }

    return read


@pytest.fixture(scope="session")
def uninterrupted(tiny: TinyWorkspace, tmp_path_factory: pytest.TempPathFactory, snapshot: Snapshot) -> dict[str, Any]:
    """What a store holds after the search `calm` in this process, with nothing between it and its one worker."""
    from report_lab import finished

    from moevolve.search.config.files import load_run_config
    from moevolve.store.repository import Store

    folder = tmp_path_factory.mktemp("calm")
    run = load_run_config(tiny.write_run(folder / "run.yaml", "calm"))
    with Store.open(f"sqlite:///{folder / 'moevolve.db'}") as store:
        finished(store, run)
    return snapshot(folder / "moevolve.db", "calm")
