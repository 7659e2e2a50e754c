"""What a launch takes: `python -m moevolve.search.estimate.preview` reads a run and prints a `Preview`.

Sizes and memory are counted on the code of `transformers`, whose import takes seconds and hundreds of megabytes. So
that a server can have them counted and stay small, this is a program of its own, which `previewed` starts.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, field, replace

from pydantic import TypeAdapter

from moevolve.evaluators.errors import UserError
from moevolve.search.config.files import parse_stored_config
from moevolve.search.config.run import RunConfig
from moevolve.search.estimate.counts import ModelSize, PhaseCount, count_run, final_evaluations
from moevolve.search.estimate.devices import gpus_for
from moevolve.search.genomes.registry import costs_of, make_space
from moevolve.workers.contract.capacity import WorkerMemory

LIMIT_S = 120.0
"""Longest time that a preview may take."""
_BAD_INPUT = 2


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
        total_flops: FLOPs of all evaluations; None if the tasks' data can't be read.
        hours: Duration of all evaluations by their FLOPs alone, by number of workers and kind of GPU. Empty for a run
            on the CPU, and if the tasks' data can't be read.
        notes: What the numbers leave out, or why they are missing, a line each.
    """

    phases: tuple[PhaseCount, ...]
    ranked: int
    tested: int
    sizes: tuple[ModelSize, ...] = ()
    weight_bytes: int | None = None
    memory: WorkerMemory | None = None
    total_flops: int | None = None
    hours: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


_PREVIEW = TypeAdapter(Preview)


def previewed(config: RunConfig) -> Preview:
    """Preview a run in another process.

    Raises:
        UserError: The model is missing or doesn't fit the genome's settings, or counting takes too long.
    """
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    command = [sys.executable, "-m", "moevolve.search.estimate.preview"]
    try:
        done = subprocess.run(
            command,
            input=config.canonical_json(),
            capture_output=True,
            text=True,
            encoding="utf-8",
            timeout=LIMIT_S,
            env=os.environ | offline,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise UserError(
            f"search {config.name}: counting what it takes was given up after {LIMIT_S:g} s; use `moevolve plan`"
        ) from None
    if done.returncode == _BAD_INPUT:
        raise UserError(done.stdout)
    if done.returncode != 0:
        raise RuntimeError(f"the preview of {config.name} ended with code {done.returncode}: {done.stderr[-2000:]}")
    return _PREVIEW.validate_json(done.stdout)


def preview(config: RunConfig) -> Preview:
    """Preview a run in this process, which loads torch.

    Raises:
        UserError: The model is missing or doesn't fit the genome's settings.
    """
    from moevolve.search.estimate.estimate import estimate
    from moevolve.search.estimate.memory import launch_memory
    from moevolve.workers.checkpoints.loading import local_directory
    from moevolve.workers.profiling.outline import outline_model

    ranked, tested = final_evaluations(config)
    if local_directory(config.model) is None:
        phases = tuple(PhaseCount(phase.kind, phase.evaluations, phase.evaluations) for phase in config.phases)
        return Preview(phases, ranked, tested)  # a hub id
    outline = outline_model(config.model)
    sizes, phases = count_run(config, outline)
    known = Preview(phases, ranked, tested, sizes, outline.weight_bytes)
    try:
        found = estimate(config, gpus_for(config), outline=outline)
    except UserError as error:  # `launch` may still download the data
        costs = costs_of(make_space(config.genome, outline.facts, config.phases), outline)
        memory = launch_memory(config, outline, costs, on_gpu=config.workers.num_gpus > 0).memory
        notes = (f"memory is that of the largest batches, and the time isn't known: {error}",)
        return replace(known, memory=memory, notes=notes)
    return replace(
        known,
        memory=found.memory.get(config.model.originals, found.memory["device"]),
        total_flops=found.total_flops,
        hours={f"{one.workers} x {one.name}": one.hours for one in found.devices},
        notes=found.notes,
    )


if __name__ == "__main__":
    try:
        with redirect_stdout(sys.stderr):  # what libraries print
            found = preview(parse_stored_config(sys.stdin.read()))
    except UserError as error:
        sys.stdout.write(str(error))
        sys.exit(_BAD_INPUT)
    sys.stdout.write(_PREVIEW.dump_json(found).decode())
