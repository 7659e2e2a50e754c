"""Whole searches on a tiny dense model in this process: calibrated, run, interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from local_workers import interrupted_after, local_pool, plainly
from search_lab import drive, population
from tiny_models import WORDS, save_tiny_model

from moevolve.search.config.files import load_run_config
from moevolve.search.config.run import RunConfig
from moevolve.search.loop.setup import SearchSetup
from moevolve.search.running.calibration import calibrated_setup
from moevolve.search.running.launch import register
from moevolve.search.running.set_up import set_up
from moevolve.store.repository import Store
from moevolve.workers.contract.settings import engine_fingerprint


def dense_run(tiny: Any, folder: Path, genome: dict[str, Any], name: str) -> RunConfig:
    """A search of 16 individuals for `genome` on a tiny random Llama."""
    directory = folder / "model"
    save_tiny_model(directory, "llama", WORDS, seed=5, num_hidden_layers=3, intermediate_size=32)
    changes = {
        "model": {"path": str(directory), "device": "cpu"},
        "genome": genome,
        "phases": [{"kind": "tune", "evaluations": 16, "initial": 5, "sigma": 0.3}],
        "window": 2,
    }
    return load_run_config(tiny.write_run(directory.parent / "run.yaml", name, **changes))


def search(setup: SearchSetup, store: Store, stop: int | None = None) -> None:
    """Run or resume a search; `stop` ends it after so many evaluations as a lost process would."""
    step = plainly if stop is None else interrupted_after(stop)
    drive(store, setup, local_pool(setup, step), engine_fingerprint(setup.config.model, setup.config.engine))


def never(*arguments: Any) -> bytes:
    raise AssertionError("the calibration is stored")


def check_repeated_and_resumed(run: RunConfig, folder: Path) -> None:
    """An interrupted search of 16 individuals, 5 of them initial, ends as an uninterrupted one does, bit for bit."""
    found, search_id = [], f"{run.name}-1"
    # A store each, so that no evaluation is reused.
    for name, stop in (("whole", None), ("interrupted", 8)):
        with Store.open(f"sqlite:///{folder / name}.db") as store:
            setup = set_up(run, search_id)
            register(setup, store)
            setup = calibrated_setup(setup, store, local_pool(setup).calibrate)
            if stop is not None:
                with pytest.raises(KeyboardInterrupt):
                    search(setup, store, stop)
                setup = calibrated_setup(set_up(run, search_id), store, never)
            search(setup, store)
            found.append(population(store, search_id))
            rows = store.history(search_id)
    assert found[0] == found[1] and len(rows) == 16
    operators, fitness = [row.operator for row in rows], [row.fitness or 0.0 for row in rows]
    assert operators[:5] == ["start", *["random"] * 4] and set(operators[5:]) <= {"mutation", "crossover+mutation"}
    assert len(set(fitness)) > 3 and max(fitness) > fitness[0]
