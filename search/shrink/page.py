"""What shrinking a checkpoint answers: the page, or the plan of a dry run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from moevolve.search.loop.final_table import FinalTable
from moevolve.workers.contract.card import CheckpointForm


@dataclass(frozen=True, slots=True)
class ShrinkPlan:
    """The search of a dry run.

    Attributes:
        run_file: Run file, for `moevolve launch`.
        content: Its text.
    """

    run_file: Path
    content: str


@dataclass(frozen=True, slots=True)
class Written:
    """The new checkpoint.

    Attributes:
        directory: Its folder.
        form: See `CheckpointForm`.
        weight_bytes: Size of its weight files.
        changes: See `ExportReport`; empty if an earlier command wrote it.
    """

    directory: Path
    form: CheckpointForm
    weight_bytes: int
    changes: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class TaskCheck:
    """What a winner's answers to held-out prompts of one task are like; see `moevolve.search.shrink.guard`.

    Attributes:
        task: Name of the task.
        prompts: Number of prompts, the first ones of `test`.
        loops: Number of answers that repeat themselves, where the full model's don't.
        agreement: Overlap with the full model's predictions on these rows, in [0, 1].
        recovery: Score on `test` as a share of the full model's; None if it isn't known.
        faults: What is beyond the request's limits, each as the end of a sentence about the candidate.
    """

    task: str
    prompts: int
    loops: int
    agreement: float
    recovery: float | None
    faults: tuple[str, ...] = ()


@dataclass(frozen=True)
class Shrunk:
    """A shrunk model, or a search without a candidate to export.

    Attributes:
        model: Path or hub id of the checkpoint.
        run_file: Run file of the search.
        store: URL of its store.
        table: Winner and final table of the search.
        experts_full, experts: Experts per MoE layer before and after.
        layers: Number of MoE layers.
        weight_bytes: Size of the checkpoint's weight files.
        checks: What the winner's answers are like, by task; empty without a winner.
        written: The new checkpoint; None if every candidate failed, or the checks refused the winner.
        seconds: Duration of each stage by its title; those of a search that was continued are of its last part.
    """

    model: str
    run_file: Path
    store: str
    table: FinalTable = field(repr=False)
    experts_full: int
    experts: int
    layers: int
    weight_bytes: int
    checks: tuple[TaskCheck, ...]
    written: Written | None
    seconds: Mapping[str, float]
