"""Previews whose process gives no answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from moevolve.evaluators.errors import UserError
from moevolve.search.config.run import RunConfig
from moevolve.search.estimate import preview


@pytest.mark.parametrize("does", ["exit 3", "exec sleep 60"])
def test_a_process_without_an_answer_is_an_error_and_is_replaced(
    does: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, started = tmp_path / "script", tmp_path / "started"
    script.write_text(f"#!/bin/sh\necho again >>{started}\n{does}\n")
    script.chmod(0o700)
    monkeypatch.setattr("sys.executable", str(script))
    monkeypatch.setattr(preview, "LIMIT_S", 1.0)
    config = RunConfig.model_validate(
        {
            "name": "calm",
            "model": {"path": "model"},
            "genome": {"kind": "eep", "experts": 2},
            "tasks": [{"name": "rte"}],
            "phases": [{"kind": "prune", "evaluations": 4, "initial": 2}],
        }
    )
    process = preview.PreviewProcess()
    for _ in range(2):
        with pytest.raises(UserError, match="search calm: counting what it takes failed"):
            process.preview(config)
    assert started.read_text().split() == ["again"] * 2
