"""A search in a process that may take less memory than the experts have: searched, repaired and exported alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from larger_than_memory import export_one, search, searches_in_a_fork
from tiny_models import WORDS, save_tiny_model

pytestmark = [pytest.mark.bench, pytest.mark.slow]

MODEL = {
    "num_hidden_layers": 6,
    "hidden_size": 1024,
    "head_dim": 32,
    "moe_intermediate_size": 64,
    "num_experts": 32,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}
EXPERTS = 3 * 1024 * 64 * 32 * 6 * 4
"""Bytes of all experts in float32."""
ROOM = EXPERTS * 4 // 5
"""What a search may take: on disk, it needs up to 0.7 of the experts (with AVX-512); in memory, more than all."""
OWN_GB = 0.013


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("large") / "model"
    save_tiny_model(directory, "qwen3_moe", WORDS, seed=3, **MODEL)
    return directory


def written(task: Path, tiny: Any, model: Path, folder: Path, place: str, *phases: dict[str, Any]) -> dict[str, Any]:
    """Write a run with originals in a place; returns the arguments of a search."""
    changes = {
        "model": {"path": str(model), "device": "cpu", "expert_offload": place},
        "tasks": [{"name": str(task), "counts": {"calibration": 4, "search": 4}}],
        "genome": {"kind": "eep", "experts": 2, "groups": 2},
        "phases": list(phases),
        "final": {"rerank": 0, "test": False},
    }
    (folder / place).mkdir()
    run = tiny.write_run(folder / place / "run.yaml", "large", **changes)
    return {"run_file": str(run), "folder": str(folder / place), "room": ROOM, "experts_gb": OWN_GB}


def test_experts_on_disk_give_the_search_and_the_exports_of_experts_in_memory(
    tiny: Any, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the originals in memory, the first search doesn't fit where the second one runs."""
    task = tmp_path / "short.yaml"
    task.write_text(yaml.safe_dump({"extends": str(tiny.task), "max_new_tokens": 2}))
    phases = (
        {"kind": "prune", "evaluations": 2, "initial": 2, "init": ["reap"]},
        {"kind": "merge", "evaluations": 1, "initial": 1},
        {"kind": "repair", "evaluations": 1, "repair": {"tokens": 48}},
    )
    host, disk = (written(task, tiny, model, tmp_path, place, *phases) for place in ("host", "disk"))
    found = searches_in_a_fork(host, disk)
    assert "allocate memory" in found["refused"]
    assert found["individuals"] == 4 and found["failures"] == []
    monkeypatch.setenv("MOEVOLVE_DEVICE_GB", str(OWN_GB))
    (tmp_path / "host" / "store.db").unlink()
    expected = search(**host | {"room": None})
    for same in ("population", "best"):
        assert found[same] == expected[same]
    individual = found["best"]["repair"]
    here, there = (export_one(str(tmp_path / place), individual, None, OWN_GB) for place in ("disk", "host"))
    assert here == there
