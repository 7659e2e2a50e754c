"""One small finished search of every genome kind in one store, for the tests of analyses and reports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dense_lab import dense_run
from local_workers import local_pool

from moevolve.search.config.files import load_run_config
from moevolve.search.config.run import RunConfig
from moevolve.search.running.calibration import calibrated_setup
from moevolve.search.running.execute import PoolFactory, execute
from moevolve.search.running.launch import register, set_up_new
from moevolve.search.running.observer import Observer
from moevolve.store.repository import Store

DENSE: dict[str, dict[str, Any]] = {
    "factorllm": {"experts": 4, "active": 2, "calibration_tokens": 300},
    "tomoe": {"experts": 3, "budget": 0.5, "calibration_tokens": 300},
    "nanomoe": {"variant": "II", "blocks": 4, "rank": 3},
}
KINDS = ("eep", *DENSE)


def finished(store: Store, run: RunConfig, make_pool: PoolFactory = local_pool) -> None:
    """A whole search, final scores included."""
    setup = set_up_new(run)
    register(setup, store)
    calibrated_setup(setup, store, local_pool(setup).calibrate)
    execute(setup, store, Observer(), make_pool)


def search_all_kinds(tiny: Any, folder: Path) -> str:
    """URL of a store with a finished search of every kind, named by the kind."""
    url = f"sqlite:///{folder / 'store.db'}"
    run = load_run_config(tiny.write_run(folder / "eep.yaml", "eep"))
    with Store.open(url) as store:
        finished(store, run)
        for kind, genome in DENSE.items():
            (folder / kind).mkdir()
            run = dense_run(tiny, folder / kind, {"kind": kind, **genome}, kind)
            phases = tuple(phase.model_copy(update={"evaluations": 14, "initial": 5}) for phase in run.phases)
            finished(store, run.model_copy(update={"phases": phases}))
    return url
