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
from moevolve.workers.profiling.messages import (
    LoadReply,
    LoadRequest,
    MeasureReply,
    MeasureRequest,
    ProfiledModel,
    ProfileSettings,
)
from moevolve.workers.profiling.report import BatchProfile, ModelProfile, ProfileReport

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
    """Profile checkpoints; ratios are relative to the first.

    Args:
        models: Checkpoints, at least one.
        settings: Settings of the profile.
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
            group, waiting = waiting[:1], waiting[1:]
            loaded = [_loaded(stack, group[0], settings, folder, on_stage)]
            if apart is None:
                apart = not _leaves_room(loaded[0][1], len(waiting))
            if not apart:
                loaded += [_loaded(stack, model, settings, folder, on_stage) for model in waiting]
                group, waiting = [*group, *waiting], []
            runs = _interleaved([process for process, _ in loaded], settings, on_stage)
        loads = [load for _, load in loaded]
        profiles += [_profile(*each, settings) for each in zip(group, loads, runs, strict=True)]
    return ProfileReport(replace(settings, apart=apart), tuple(profiles))


def _loaded(
    stack: ExitStack, model: ProfiledModel, settings: ProfileSettings, folder: Path, on_stage: Stage
) -> tuple[_Process, LoadReply]:
    """Start a process that lives as long as `stack`, and load the model in it."""
    on_stage(f"loading {model.label}")
    process = stack.enter_context(_Process(model, folder))
    return process, process.load(settings)


def _leaves_room(load: LoadReply, others: int) -> bool:
    """Whether other models fit into memory, if each takes twice the bytes of the loaded one's weights."""
    return 2 * others * load.weight_bytes <= load.free_bytes


def _interleaved(
    processes: Sequence[_Process], settings: ProfileSettings, on_stage: Stage
) -> list[list[list[MeasureReply]]]:
    """Run all batch sizes; returns the replies by process and batch size, without a first untimed run."""
    runs: list[list[list[MeasureReply]]] = [[] for _ in processes]
    for size in settings.batch_sizes:
        request = settings.request(size)
        on_stage(f"batch size {size}: warming up")
        for process in processes:
            process.measure(request)
        for per_size in runs:
            per_size.append([])
        for repeat, turns in enumerate(settings.turns(len(processes))):
            on_stage(f"batch size {size}: {repeat + 1} of {settings.repeats}")
            for turn in turns:
                runs[turn][-1].append(processes[turn].measure(request))
    return runs


def _profile(
    model: ProfiledModel, load: LoadReply, runs: list[list[MeasureReply]], settings: ProfileSettings
) -> ModelProfile:
    batches = []
    for size, replies in zip(settings.batch_sizes, runs, strict=True):
        peaks = [reply.peak_bytes for reply in replies if reply.peak_bytes is not None]
        batches.append(
            BatchProfile(
                size,
                settings.request(size).tokens,
                settings.new_tokens,
                tuple(reply.prefill_seconds for reply in replies),
                tuple(reply.decode_seconds for reply in replies),
                max(peaks) if len(peaks) == len(replies) else None,
            )
        )
    return ModelProfile(model.label, load, tuple(batches))


class _Process:
    """The process of one model. It is killed at the end of its `with` block, and ends when this process does."""

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
                env={**os.environ, **_ENV, "HF_MODULES_CACHE": str(folder / "modules"), "TMPDIR": str(folder)},
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
        """Load the model."""
        reply: LoadReply = self._ask(LoadRequest(self.model, settings))
        return reply

    def measure(self, request: MeasureRequest) -> MeasureReply:
        """Run a batch once."""
        reply: MeasureReply = self._ask(request)
        return reply

    def _ask(self, request: LoadRequest | MeasureRequest) -> Any:
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
