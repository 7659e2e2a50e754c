"""Stored searches of a GPU's model, exported, asked and profiled where there is none."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from canned_profilee import CannedProfilees

import moevolve
from moevolve.evaluators.errors import UserError
from moevolve.workers.checkpoints.loading import placed
from moevolve.workers.contract.settings import ModelConfig

Started = Callable[..., Any]


@pytest.fixture
def gpu_store(all_kinds: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A store whose searches say that their model ran on a GPU, its originals on the host; here is none."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    file = tmp_path / "gpu.db"
    shutil.copy(all_kinds.removeprefix("sqlite:///"), file)
    with sqlite3.connect(file) as connection:
        for key, config in connection.execute("SELECT id, config FROM searches").fetchall():
            changed = json.loads(config)
            changed["model"] |= {"device": "cuda", "expert_offload": "host"}
            connection.execute("UPDATE searches SET config = ? WHERE id = ?", (json.dumps(changed), key))
    return f"sqlite:///{file}"


def test_exports_need_no_gpu(gpu_store: str, tmp_path: Path, in_process: Started) -> None:
    found = moevolve.export(gpu_store, "eep:20", tmp_path / "default")
    assert found.form == "stock" and found.agreement.holds
    asked = ("export", "eep:20", tmp_path / "asked", "--store", gpu_store, "--device", "cpu", "--dtype", "bfloat16")
    done = in_process(*asked)
    assert done.returncode == 0, done.stderr
    said = f"read from its files, all {found.agreement.parts} parts agree with the model within"
    assert said in done.stdout.replace("\n", " ")
    dtypes = [json.loads((tmp_path / name / "config.json").read_text())["dtype"] for name in ("default", "asked")]
    assert dtypes == ["float32", "bfloat16"]
    with pytest.raises(UserError, match="no CUDA device"):
        moevolve.export(gpu_store, "eep:20", tmp_path / "no", device="cuda")
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["asked", "default"]


def test_answers_need_no_gpu(gpu_store: str, tiny: Any) -> None:
    here, half = (
        moevolve.answers(gpu_store, ["eep:20"], task=str(tiny.task), limit=2, **asked).rows[0]
        for asked in ({}, {"device": "auto", "dtype": "bfloat16"})
    )
    assert half.answers != here.answers


def test_a_failed_verification_is_told_in_a_line(
    gpu_store: str, tmp_path: Path, in_process: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    from moevolve.workers.export import export
    from moevolve.workers.export.folder import VerificationError

    def verify(*_: object) -> None:
        raise VerificationError("decoder layer 3 differs")

    monkeypatch.setattr(export, "verify", verify)
    done = in_process("export", "eep:20", tmp_path / "out", "--store", gpu_store)
    assert done.returncode == 1 and done.stdout == ""
    kept = tmp_path / "out.unverified"
    assert "eep:20 failed its verification: decoder layer 3 differs; the files are kept in" in done.stderr
    assert (kept / "model.safetensors").is_file() and not (tmp_path / "out").exists()
    assert moevolve.show(gpu_store, "eep:20").exports == ()


def test_a_full_model_that_no_gpu_may_have_room_for_is_profiled_over_all(
    gpu_store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in is asked to load it: neither here nor on the metered device of the lab is there a second GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    canned = CannedProfilees(monkeypatch, tmp_path)
    moevolve.profile(gpu_store, ["full"], search="eep", batch_sizes=(1,), timed_runs=1)
    assert "loads balanced beside" in canned.events[0]


def test_where_a_model_is_placed(monkeypatch: pytest.MonkeyPatch) -> None:
    spread = ModelConfig("m", dtype="bfloat16", device="cuda", device_map="auto")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert placed(spread) == ModelConfig("m", dtype="bfloat16", device="cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert placed(spread) == spread
    host = ModelConfig("m", device="cuda", expert_offload="host")
    assert placed(host, dtype="float16") == ModelConfig("m", dtype="float16", device="cuda", expert_offload="host")
    assert placed(host, "cpu") == ModelConfig("m", device="cpu")
    assert placed(ModelConfig("m", device="cpu")) == ModelConfig("m", device="cpu")
