"""What servers of tests have alike: tokens, and a run to launch."""

from __future__ import annotations

import json
from pathlib import Path

READ, WRITE = "r" * 32, "w" * 32


def write_runs(folder: Path) -> Path:
    """Write a run `small.yaml` of a model that nobody has into a folder `runs`, and return that."""
    run = {
        "name": "calm",
        "model": {"path": "nobody/nothing"},
        "genome": {"kind": "eep", "experts": 2},
        "tasks": ["boolq"],
        "phases": [{"kind": "prune", "evaluations": 40}],
    }
    (folder / "runs").mkdir()
    (folder / "runs" / "small.yaml").write_text(json.dumps(run))
    return folder / "runs"
