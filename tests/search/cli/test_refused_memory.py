"""A model that doesn't fit is refused by the workers before they load it, and the search says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ray
from typer.testing import CliRunner

from moevolve.evaluators.errors import UserError
from moevolve.search.cli.app import app
from moevolve.store.reader import StoreReader
from moevolve.workers.contract.capacity import CAPACITY, NoRoomError


def test_launch_refuses_what_does_not_fit(
    tiny: Any, ray_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its worker is wanted for a calibration first."""
    monkeypatch.setenv(CAPACITY, "0.00005")
    store = f"sqlite:///{tmp_path / 'store.db'}"
    phases = [{"kind": "prune", "evaluations": 2, "initial": 2, "init": ["naee"]}]
    path = tiny.write_run(tmp_path / "run.yaml", "large", store=store, phases=phases)
    try:
        result = CliRunner().invoke(app, ["launch", str(path), "--address", ray_address])
    finally:
        ray.shutdown()
    assert isinstance(result.exception, NoRoomError) and isinstance(result.exception, UserError), result.output
    message = str(result.exception)
    assert "\n" not in message
    for word in ("a worker takes", "this machine has 5e-05 GB free", "original experts", "`moevolve plan` has"):
        assert word in message
    with StoreReader.open(store) as reader:
        record = reader.search("large")
        assert record.status == "failed"
