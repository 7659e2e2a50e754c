"""Profiles several checkpoints, each in its own process, with interleaved timed runs.

A process holds only its model, so the memory of the process is that of the model. Only one process runs at a time, and
every repeat runs all models, in alternating order, before the next repeat begins, so that changes in the machine's
speed affect all models. If there isn't ample memory for all models, they are loaded and run one after the other.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, Self

from moevolve.evaluators.errors import UserError
from moevolve.workers.profiling.report import (
    BatchProfile,
    LoadReply,
    MeasureReply,
    ModelProfile,
    ProfiledModel,
    ProfileReport,
    ProfileSettings,
)

Stage = Callable[[str], None]
_ENV = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
}


class ProfileError(RuntimeError):
    """The process of a model ended before it replied."""


def profile_models(
    models: Sequence[ProfiledModel], settings: ProfileSettings, folder: Path, on_stage: Stage = lambda _: None
) -> ProfileReport:
    """Profile at least one checkpoint.

    Args:
        models: Checkpoints; ratios are relative to the first.
        settings: What is timed, and how.
        folder: Empty folder for logs and copies of modelling code, which the caller removes.
        on_stage: Called with a description of each stage.

    Raises:
        UserError: A model can't be loaded or counted, or doesn't fit on the device.
        ProfileError: A process was killed or crashed.
    """
    profiles: list[ModelProfile] = []
    waiting, apart = list(models), settings.apart
    while waiting:
        with ExitStack() as stack:
            processes: list[_Process] = []
            while waiting and not (processes and apart):
                on_stage(f"loading {waiting[0].label}")
                processes.append(stack.enter_context(_Process(waiting.pop(0), folder)))
                loaded = processes[-1].load(settings)
                if apart is None:
                    # Whether there is room for the other models, if each takes twice the bytes of this one's weights.
                    apart = 2 * len(waiting) * loaded.weight_bytes > loaded.free_bytes
            profiles += _interleaved(processes, settings, on_stage)
    return ProfileReport(replace(settings, apart=apart), tuple(profiles))


def _interleaved(processes: Sequence[_Process], settings: ProfileSettings, on_stage: Stage) -> list[ModelProfile]:
    """Run all batch sizes, each a first time without timing it."""
    batches: list[list[BatchProfile]] = [[] for _ in processes]
    for size in settings.batch_sizes:
        on_stage(f"batch size {size}: warming up")
        for process in processes:
            process.measure(size)
        replies: list[list[MeasureReply]] = [[] for _ in processes]
        for repeat, turns in enumerate(settings.turns(len(processes))):
            on_stage(f"batch size {size}: {repeat + 1} of {settings.repeats}")
            for turn in turns:
                replies[turn].append(processes[turn].measure(size))
        for measured, found in zip(batches, replies, strict=True):
            measured.append(_batch_profile(size, found, settings))
    return [
        ModelProfile(process.model.label, process.loaded, tuple(measured))
        for process, measured in zip(processes, batches, strict=True)
    ]


def _batch_profile(size: int, replies: Sequence[MeasureReply], settings: ProfileSettings) -> BatchProfile:
    peaks = [reply.peak_bytes for reply in replies if reply.peak_bytes is not None]
    return BatchProfile(
        size,
        settings.batch_tokens(size),
        settings.new_tokens,
        tuple(reply.prefill_seconds for reply in replies),
        tuple(reply.decode_seconds for reply in replies),
        max(peaks) if len(peaks) == len(replies) else None,
    )


class _Process:
    """The process of one model. It is killed at the end of its `with` block, and ends when this process does."""

    loaded: LoadReply
    """Reply of `load`."""

    def __init__(self, model: ProfiledModel, folder: Path) -> None:
        self.model = model
        self._log = folder / f"{len(list(folder.glob('*.log')))}.log"
        self._connection, other = Pipe()
        # `multiprocessing.Process` would import the user's script again, and get its Ctrl-C.
        with self._log.open("wb") as log, other:
            self._process = subprocess.Popen(
                # -P: folders such as `kernels` in the working directory must not be imported.
                [sys.executable, "-P", "-m", "moevolve.workers.profiling.process", str(other.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(other.fileno(),),
                env={**os.environ, **_ENV, "HF_MODULES_CACHE": str(folder / "modules")},
                # Only the parent gets Ctrl-C; it then kills its children.
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._connection.close()

    def load(self, settings: ProfileSettings) -> LoadReply:
        self.loaded = self._ask((self.model, settings))
        return self.loaded

    def measure(self, batch_size: int) -> MeasureReply:
        reply: MeasureReply = self._ask(batch_size)
        return reply

    def _ask(self, request: object) -> Any:
        try:
            self._connection.send(request)
            reply = self._connection.recv()
        except (EOFError, OSError):
            raise ProfileError(f"{self.model.label}: {self._end()}") from None
        if isinstance(reply, UserError):
            raise UserError(f"{self.model.label}: {reply}")
        return reply

    def _end(self) -> str:
        code = self._process.wait()
        if code == -signal.SIGKILL:
            return "its process was killed, for want of memory perhaps; use smaller --batch-sizes, or --apart"
        lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return f"its process ended with code {code}: {lines[-1] if lines else 'it said nothing'}"
