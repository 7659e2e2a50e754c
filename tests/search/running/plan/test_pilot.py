"""What a pilot says of the evaluations that it has made."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from local_workers import local_pool

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.types import PreparedSplit
from moevolve.search.config.files import load_run_config
from moevolve.search.running.launch import set_up_new
from moevolve.search.running.plan.pilot import _measured, measure
from moevolve.store.repository import Store
from moevolve.workers.contract.edits import Measurement
from moevolve.workers.worker import EvaluationWorker


def evaluated(phase: str, seconds: float, worker: str, failure: str | None = None) -> tuple[str, Any]:
    return phase, [SimpleNamespace(split="search", seconds=seconds, worker=worker, failure=failure)]


def test_workers_that_wait_for_the_last_evaluation_of_a_phase_do_nothing_else() -> None:
    formulas = [evaluated("prune", seconds, worker) for seconds, worker in ((2.0, "a"), (3.0, "b"), (3.0, "a"))]
    found = _measured([*formulas, evaluated("repair", 30.0, "b"), evaluated("repair", 9.0, "a", "broken")], wall=50.0)
    assert (found.counts, found.workers, found.individuals) == ({"prune": 3, "repair": 1}, 2, 4)
    assert found.of("prune") == pytest.approx(8 / 3) and found.of("repair") == 30.0
    assert found.other_seconds == 50.0 - 8.0 / 2 - 30.0
    assert found.searching([("prune", 4), ("repair", 1)]) == pytest.approx(2 * 8 / 3 + 30.0)
    with pytest.raises(UserError, match="no individual could be evaluated"):
        _measured([evaluated("prune", 1.0, "a", "broken")], wall=5.0)


def test_a_calibration_that_the_search_will_find_is_not_made_for_the_pilot(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def calibrate(worker: EvaluationWorker, measurement: Measurement, splits: tuple[PreparedSplit, ...]) -> bytes:
        made.append("calibration")
        return calibrated(worker, measurement, splits)

    calibrated = EvaluationWorker.calibrate
    monkeypatch.setattr(EvaluationWorker, "calibrate", calibrate)
    phases = [{"kind": "prune", "evaluations": 4, "initial": 4, "init": ["reap", "random"]}]
    setup = set_up_new(load_run_config(tiny.write_run(tmp_path / "run.yaml", "piloted", phases=phases)))
    with Store.open(f"sqlite:///{tmp_path / 'store.db'}") as keep:
        first, second = (measure(setup, 2, local_pool, keep=keep) for _ in range(2))
    assert made == ["calibration"]
    assert first.calibration_seconds > 0 and second.calibration_seconds == 0
