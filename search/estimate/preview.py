"""What a launch takes: `python -m moevolve.search.estimate.preview` reads runs and prints a `Preview` of each.

Sizes and memory are counted on the code of `transformers`, whose import takes seconds and hundreds of megabytes. So
that a server can have them counted and stay small, this is a program of its own, which a `PreviewProcess` starts.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from typing import TextIO

from pydantic import TypeAdapter

from moevolve.evaluators.errors import UserError
from moevolve.search.config.files import parse_stored_config
from moevolve.search.config.run import RunConfig
from moevolve.search.estimate.counts import (
    ModelSize,
    PhaseCount,
    described_as,
    final_evaluations,
    model_sizes,
    phase_counts,
)
from moevolve.search.genomes.registry import costs_of
from moevolve.workers.contract.capacity import WorkerMemory

LIMIT_S = 120.0
"""Longest time that a preview may take."""
_IDLE_S = 300.0
"""Time without a request after which the process gives its memory back."""


@dataclass(frozen=True, slots=True)
class Preview:
    """What a search takes, as far as it is known without weights and without asking the hub.

    Attributes:
        phases: Number of individuals of each phase, and the largest possible number of different ones.
        ranked: Number of individuals scored on `dev` at the end.
        tested: Number of models scored on `test` at the end, including the full one.
        sizes: Sizes of the full model and of a candidate of each kind of phase; empty if the model is on a hub.
        weight_bytes: Bytes of the full model's weights as a worker loads them.
        memory: Memory of one worker.
        notes: What the numbers leave out, or why they are missing, a line each.
    """

    phases: tuple[PhaseCount, ...]
    ranked: int
    tested: int
    sizes: tuple[ModelSize, ...] = ()
    weight_bytes: int | None = None
    memory: WorkerMemory | None = None
    notes: tuple[str, ...] = ()


_ANSWER: TypeAdapter[Preview | str] = TypeAdapter(Preview | str)


class PreviewProcess:
    """A process that previews runs, started by the first one; it ends when none has come for minutes.

    One preview at a time: the caller sees to that.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def preview(self, config: RunConfig) -> Preview:
        """Preview a run in the process.

        Raises:
            UserError: The model is missing or doesn't fit the genome's settings, or counting fails or takes too long.
        """
        process = self._ready()
        limit = threading.Timer(LIMIT_S, process.kill)
        limit.start()
        try:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(config.canonical_json() + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        finally:
            limit.cancel()
        if not answer:
            self.close()
            raise UserError(
                f"search {config.name}: counting what it takes failed: the process took more than {LIMIT_S:g} s, or it"
                " ended, for which the server's log may have a reason; `moevolve plan` counts without a limit"
            )
        found = _ANSWER.validate_json(answer)
        if isinstance(found, str):
            raise UserError(found)
        return found

    def close(self) -> None:
        """End the process, if there is one."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _ready(self) -> subprocess.Popen[str]:
        if self._process is None or self._process.poll() is not None:
            self.close()
            offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
            self._process = subprocess.Popen(
                [sys.executable, "-m", "moevolve.search.estimate.preview"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                encoding="utf-8",
                env=os.environ | offline,
                start_new_session=True,  # it ends with its input, not with a Ctrl-C meant for the server
            )
        return self._process


def preview(config: RunConfig) -> Preview:
    """Preview a run in this process, which loads torch.

    Raises:
        UserError: The model is missing or doesn't fit the genome's settings.
    """
    from moevolve.search.estimate.estimate import estimate
    from moevolve.search.estimate.memory import launch_memory
    from moevolve.workers.checkpoints.files import local_directory
    from moevolve.workers.profiling.outline import outline_model

    ranked, tested = final_evaluations(config)
    if local_directory(config.model) is None:
        phases = tuple(PhaseCount(phase.kind, phase.evaluations, phase.evaluations) for phase in config.phases)
        return Preview(phases, ranked, tested)  # a hub id
    outline = outline_model(config.model)
    costs = costs_of(config.space(outline.facts), outline)
    sizes, phases = model_sizes(outline, costs, described_as(config.phases)), phase_counts(config, costs)
    known = Preview(phases, ranked, tested, sizes, outline.weight_bytes)
    try:
        found = estimate(config, outline=outline)
    except UserError as error:  # `launch` may still download the data
        memory = launch_memory(config, outline, costs, on_gpu=config.workers.num_gpus > 0).memory
        notes = (f"memory is that of the largest batches: {error}",)
        return replace(known, memory=memory, notes=notes)
    return replace(known, memory=found.memory.get(config.model.originals, found.memory["device"]), notes=found.notes)


def _serve(asked: TextIO, answers: TextIO) -> None:
    """Answer every line, a configuration, with a line: a `Preview`, or what is wrong with the configuration."""
    while select.select([asked], [], [], _IDLE_S)[0] and (line := asked.readline()):
        try:
            found: Preview | str = preview(parse_stored_config(line))
        except UserError as error:
            found = str(error)
        answers.write(_ANSWER.dump_json(found).decode() + "\n")
        answers.flush()


if __name__ == "__main__":
    with redirect_stdout(sys.stderr):  # what libraries print
        _serve(sys.stdin, sys.__stdout__ or sys.stdout)
