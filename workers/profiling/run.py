"""Profiles several checkpoints, each in its own process, with interleaved timed runs.

A process holds only its model, so the memory of the process is that of the model. Only one process runs at a time, and
every repeat runs all models, in alternating order, before the next repeat begins, so that changes in the machine's
speed affect all models. If there isn't ample memory for all models, they are loaded and run one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from moevolve.evaluators.errors import UserError
from moevolve.workers.children.process import ChildError, ChildProcess, R, Ts
from moevolve.workers.profiling.process import load, measure
from moevolve.workers.profiling.report import (
    BatchProfile,
    LoadReply,
    MeasureReply,
    ModelProfile,
    ProfiledModel,
    ProfileError,
    ProfileReport,
    ProfileSettings,
)

Stage = Callable[[str], None]
# Note of a report whose runs weren't interleaved.
ALONE = "models were loaded one after the other, because memory can't hold all at once, so drift isn't shared"
# The log is for errors: its last line becomes the message if the process ends.
_ENV = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
}


def profile_models(
    models: Sequence[ProfiledModel], settings: ProfileSettings, folder: Path, on_stage: Stage = lambda _: None
) -> ProfileReport:
    """Profile at least one checkpoint; ratios are relative to the first.

    The caller removes the folder, which gets logs and copies of modelling code, and is empty at first. `on_stage` is
    called with a description of each stage.

    Raises:
        UserError: A model can't be loaded, or doesn't fit on the device.
        ProfileError: A process was killed or crashed.
    """
    profiles: list[ModelProfile] = []
    waiting, alone = list(models), False
    while waiting:
        with ExitStack() as stack:
            processes: list[_Process] = []
            while waiting and not (processes and alone):
                on_stage(f"loading {waiting[0].label}")
                process = stack.enter_context(_Process(waiting.pop(0), folder))
                process.loaded = loaded = process.call(load, process.model, settings)
                processes.append(process)
                if not profiles and len(processes) == 1:
                    # Whether there is room for the other models, if each takes twice the bytes of this one's weights.
                    alone = 2 * len(waiting) * loaded.weight_bytes > loaded.free_bytes
            profiles += _interleaved(processes, settings, on_stage)
    return ProfileReport(settings, tuple(profiles), (ALONE,) if alone else ())


def _interleaved(processes: Sequence[_Process], settings: ProfileSettings, on_stage: Stage) -> list[ModelProfile]:
    """Run all batch sizes, each a first time without timing it."""
    batches: list[list[BatchProfile]] = [[] for _ in processes]
    for size in settings.batch_sizes:
        on_stage(f"batch size {size}: warming up")
        for process in processes:
            process.call(measure, size)
        replies: list[list[MeasureReply]] = [[] for _ in processes]
        for repeat, turns in enumerate(settings.turns(len(processes))):
            on_stage(f"batch size {size}: {repeat + 1} of {settings.timed_runs}")
            for turn in turns:
                replies[turn].append(processes[turn].call(measure, size))
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


class _Process(ChildProcess):
    """The child process of one model."""

    loaded: LoadReply
    """Reply of `load`."""

    def __init__(self, model: ProfiledModel, folder: Path) -> None:
        log = folder / f"{len(list(folder.glob('*.log')))}.log"
        super().__init__(environment={**_ENV, "HF_MODULES_CACHE": str(folder / "modules")}, log=log)
        self.model = model

    def call(self, function: Callable[[*Ts], R], *arguments: *Ts) -> R:
        try:
            return super().call(function, *arguments)
        except UserError as error:
            raise UserError(f"{self.model.label}: {error}") from None
        except ChildError as error:
            advice = "; use smaller --batch-sizes" if error.killed else ""
            raise ProfileError(f"{self.model.label}: {error}{advice}") from None
