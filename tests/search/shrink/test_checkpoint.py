"""Timing a new checkpoint beside the one that it was made of, and refusing one that is too large."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from shrink_samples import shrink_record

from moevolve.evaluators.errors import UserError
from moevolve.search.running.observer import Observer
from moevolve.search.shrink import checkpoint
from moevolve.search.shrink.checkpoint import finish, measured_speed
from moevolve.search.shrink.findings import Written
from moevolve.search.shrink.goal import Amount
from moevolve.search.shrink.record import Checks, Journal
from moevolve.workers.contract.card import ExportError
from moevolve.workers.contract.settings import ModelConfig
from moevolve.workers.profiling.report import BatchProfile, ProfiledModel

DEMO = Path(__file__).parents[3] / "configs" / "demo"


def test_only_code_that_an_export_has_written_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copied checkpoint may bring code of others, which the request hasn't trusted."""
    trusted: list[bool] = []
    notes: list[str] = []

    def profiled(models: list[ProfiledModel], *_: Any) -> Any:
        trusted.extend(model.trust_remote_code for model in models)
        raise UserError("no room")

    monkeypatch.setattr("moevolve.workers.profiling.run.profile_models", profiled)
    model, observer = ModelConfig(str(DEMO / "model"), device="cpu"), Observer(on_note=notes.append)
    for form in ("native", "stock"):
        assert measured_speed(model, Written(tmp_path, form, 1, ()), observer) is None
    assert trusted == [False, True, False, False]
    assert notes == ["speed and memory aren't measured: no room"] * 2
    offloaded = replace(model, expert_offload="disk")
    assert measured_speed(offloaded, Written(tmp_path, "stock", 1, ()), observer) is None
    assert len(trusted) == 4 and "doesn't fit on the device" in notes[-1]


def test_a_checkpoint_that_is_too_large_stays_so_when_the_command_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "find_candidate", lambda *_: None)
    monkeypatch.setattr(checkpoint, "_checked", lambda *_: Checks("small:0", 60.0, (), None))
    amount, request = Amount("size", "9B", number=9), SimpleNamespace(force=False)
    goal: Any = SimpleNamespace(amount=amount, folder=tmp_path, fits=tmp_path, request=request)
    journal = Journal(None, Observer(), shrink_record(tmp_path, written=Written(tmp_path, "stock", 10, ())))
    table: Any = SimpleNamespace(winner="small:0")
    with pytest.raises(ExportError, match="10 bytes, more than --size 9B"):
        finish(goal, None, journal, table, Observer())  # type: ignore[arg-type]
    assert journal.record.status == "running"


def test_the_gain_in_speed_has_a_range_and_tells_of_a_busy_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full, new = (
        BatchProfile(1, 8, 10, (1.0, 1.0, 1.0), seconds, None) for seconds in ((2.0, 2.0, 2.0), (1.0, 0.8, 1.25))
    )
    models = [SimpleNamespace(batches=(full,)), SimpleNamespace(batches=(new,))]
    report = SimpleNamespace(models=models, reference=SimpleNamespace(load=SimpleNamespace(device_name="a CPU")))
    monkeypatch.setattr("moevolve.workers.profiling.run.profile_models", lambda *_: report)
    model = ModelConfig(str(DEMO / "model"), device="cpu")
    speed = measured_speed(model, Written(tmp_path, "stock", 1, ()), Observer())
    assert speed is not None and str(speed) == "10 (2.00x; 1.60x to 2.50x)"
    assert "on a CPU, which was busy" in speed.about and "busy" not in replace(speed, low=1.95).about
