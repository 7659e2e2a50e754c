"""The profiler's messages, its processes, and what it says before anything is loaded."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Self

import pytest

from moevolve.evaluators.errors import UserError
from moevolve.workers.profiling import run as profiling
from moevolve.workers.profiling.checkpoints import check_folder
from moevolve.workers.profiling.messages import (
    FailureReply,
    LoadReply,
    LoadRequest,
    MeasureReply,
    MeasureRequest,
    Message,
    ProfiledModel,
    ProfileSettings,
    from_line,
    to_line,
)
from moevolve.workers.profiling.report import BatchProfile
from moevolve.workers.profiling.run import ProfileError, profile_models

SETTINGS = ProfileSettings((1, 3), prompt_tokens=6, new_tokens=2, repeats=3, device="cpu", threads=1)


@pytest.mark.parametrize(
    "message",
    [
        LoadRequest("a b/ü", None, None, False, "auto", "bfloat16", None, 64),
        MeasureRequest(8, 64, 32),
        MeasureReply(0.25, 1e-9, None),
        FailureReply("no\nroom"),
    ],
)
def test_messages_come_back_from_one_line(message: Message) -> None:
    line = to_line(message)
    assert line.count("\n") == 1 and line.endswith("\n")
    assert from_line(line) == message


@pytest.mark.parametrize(
    "line",
    ["", "[]", "{}", '{"message": "Popen"}', '{"message": "FailureReply"}', '{"message": "MeasureRequest", "x": 1}'],
)
def test_lines_that_are_no_messages(line: str) -> None:
    with pytest.raises(ValueError, match="no message"):
        from_line(line)


def test_rates_are_of_the_median() -> None:
    batch = BatchProfile(4, 10, 5, (9.0, 2.0, 1.0), (4.0, 1.0), None)
    assert batch.prefill_rate == 4 * 10 / 2.0
    assert batch.decode_rate == 4 * 5 / 2.5


def test_two_models_take_turns_in_processes_of_their_own(
    checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, int]] = []
    measure = profiling._Process.measure

    def spy(self: profiling._Process, request: MeasureRequest) -> MeasureReply:
        asked.append((self.model.label, request.batch_size))
        return measure(self, request)

    monkeypatch.setattr(profiling._Process, "measure", spy)
    models = [ProfiledModel(name, str(checkpoint(name))) for name in ("mixtral", "llama")]
    report = profile_models(models, SETTINGS, tmp_path)
    turns = ["mixtral", "llama", "mixtral", "llama", "llama", "mixtral", "mixtral", "llama"]
    assert asked == [(label, 1) for label in turns] + [(label, 3) for label in turns]
    assert [model.label for model in report.models] == ["mixtral", "llama"]
    assert report.reference.label == "mixtral"
    for model in report.models:
        assert (model.load.device, model.load.dtype, model.load.threads) == ("cpu", "float32", 1)
        assert [batch.batch_size for batch in model.batches] == [1, 3]
        for batch in model.batches:
            assert len(batch.prefill_seconds) == len(batch.decode_seconds) == 3
            assert min(batch.prefill_seconds + batch.decode_seconds) > 0
            assert batch.peak_bytes is None or 0 <= batch.peak_bytes < 2**28
    assert not list(tmp_path.glob("tmp*")), "the warm-up's model is gone"


class _Canned:
    """Stands for a process; writes down what happens to it."""

    events: ClassVar[list[str]] = []

    def __init__(self, model: ProfiledModel, folder: Path) -> None:
        self.model = model

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.events.append(f"end {self.model.label}")

    def load(self, settings: ProfileSettings) -> LoadReply:
        self.events.append(f"load {self.model.label}")
        return LoadReply(10, 5, 40, 8, 2, "llama", "float32", "cpu", "CPU", 1, "sdpa", "None")

    def measure(self, request: MeasureRequest) -> MeasureReply:
        self.events.append(f"{self.model.label} {request.batch_size}")
        peak = None if self.model.label == "b" and request.batch_size == 3 else 100 + len(self.events)
        return MeasureReply(2.0, 1.0, peak)


def test_apart_holds_one_model_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "_Process", _Canned)
    monkeypatch.setattr(_Canned, "events", [])
    models = [ProfiledModel("a", "one"), ProfiledModel("b", "two")]
    report = profile_models(models, replace(SETTINGS, repeats=1, apart=True), tmp_path)
    assert _Canned.events == [
        "load a",
        *["a 1"] * 2,
        *["a 3"] * 2,
        "end a",
        "load b",
        *["b 1"] * 2,
        *["b 3"] * 2,
        "end b",
    ]
    assert [batch.peak_bytes for batch in report.models[0].batches] == [103, 105]
    assert [batch.peak_bytes for batch in report.models[1].batches] == [109, None]
    assert report.models[1].flops == 10
    assert report.models[1].batches[1].prefill_rate == 3 * 6 / 2


def test_a_killed_process_and_one_that_cannot_load(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    with profiling._Process(ProfiledModel("mine", str(checkpoint("llama"))), tmp_path) as process:
        os.kill(process._process.pid, signal.SIGKILL)
        with pytest.raises(ProfileError, match="mine: its process was killed"):
            process.load(SETTINGS)
    with profiling._Process(ProfiledModel("gone", str(tmp_path / "gone")), tmp_path) as process:
        with pytest.raises(UserError, match=r"gone: it doesn't load") as caught:
            process.load(SETTINGS)
        assert "\n" not in str(caught.value)


def test_folders_that_are_no_checkpoints(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    good = checkpoint("llama")
    assert check_folder(str(good), False) == good
    with pytest.raises(UserError, match="no such folder"):
        check_folder(str(tmp_path / "none"), False)
    with pytest.raises(UserError, match=r"config\.json"):
        check_folder(str(tmp_path), False)
    settings = json.loads((good / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | {"auto_map": {"AutoConfig": "code.Config"}}))
    with pytest.raises(UserError, match="safetensors"):
        check_folder(str(tmp_path), False)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match="--trust-remote-code"):
        check_folder(str(tmp_path), False)
    assert check_folder(str(tmp_path), True) == tmp_path
