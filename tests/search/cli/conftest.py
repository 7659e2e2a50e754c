"""What tests of commands share that interrupt a search, or steer it: what it comes to when it is left alone."""

from __future__ import annotations

from typing import Any

import pytest
from report_lab import finished

from moevolve.search.config.files import load_run_config
from moevolve.store.repository import Store


@pytest.fixture(scope="session")
def uninterrupted(tiny: Any, tmp_path_factory: pytest.TempPathFactory, snapshot: Any) -> Any:
    """What a store holds after the search `calm` in this process, with nothing between it and its one worker."""
    folder = tmp_path_factory.mktemp("calm")
    run = load_run_config(tiny.write_run(folder / "run.yaml", "calm"))
    with Store.open(f"sqlite:///{folder / 'moevolve.db'}") as store:
        finished(store, run)
    return snapshot(folder / "moevolve.db", "calm")
