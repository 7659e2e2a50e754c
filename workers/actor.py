"""The worker: holds one resident model and scores the edits it is sent. Runs as a Ray actor, or in-process."""

from __future__ import annotations

import os
import socket
import sys
import time
from dataclasses import dataclass

from moevolve.evaluators.early_stopping import Floor
from moevolve.evaluators.errors import CandidateError
from moevolve.evaluators.runner import run_split, run_until
from moevolve.evaluators.types import COMPARING_KINDS, PartialResult, PreparedSplit, SplitResult
from moevolve.workers.analysis import analyse_usage
from moevolve.workers.calibration.base import CalibrationRecipe
from moevolve.workers.calibration.calibrators import calibrate, token_sequences
from moevolve.workers.config import ALL_SHORTCUTS, EngineConfig, ModelConfig, Shortcuts
from moevolve.workers.generation import GenerationEngine, configure_runtime
from moevolve.workers.messages import EvaluationReply, EvaluationRequest, PartialTaskResult, TaskResult
from moevolve.workers.resident import ResidentModel
from moevolve.workers.reuse import LayerReuse
from moevolve.workers.usage import Usage, UsageRequest


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """Where a worker runs."""

    name: str
    node: str
    device: str


class WorkerFault(Exception):
    """The worker, not the candidate, is at fault (out of memory, say): the candidate is evaluated again elsewhere."""


class EvaluationWorker:
    """One resident model and its engine.

    Args:
        model: which checkpoint, and how to hold it.
        engine: how prompts are batched and run.
        shortcuts: which ways to compute less are taken.
        reuse_bytes: host memory for hidden states that candidates leave for others (`moevolve.workers.reuse`), which
            changes no result; 0 runs every layer of every candidate.

    Raises:
        UserError: the checkpoint can't be loaded.
    """

    _reuse: LayerReuse | None = None

    def __init__(
        self, model: ModelConfig, engine: EngineConfig, shortcuts: Shortcuts = ALL_SHORTCUTS, reuse_bytes: int = 0
    ) -> None:
        configure_runtime(engine.threads)
        self._resident = ResidentModel.load(model)
        resident = self._resident
        self._reuse = LayerReuse(resident.model, resident.layer_keys, reuse_bytes) if reuse_bytes else None
        self._engine = GenerationEngine(resident.model, resident.tokenizer, engine, shortcuts, self._reuse)
        self._settings = engine
        self._name = f"{socket.gethostname()}/{os.getpid()}"

    @property
    def resident(self) -> ResidentModel:
        return self._resident

    def info(self, node: str = "") -> WorkerInfo:
        """Where this worker runs; also the sign that its model is loaded."""
        return WorkerInfo(self._name, node, str(self._resident.device))

    def evaluate(self, request: EvaluationRequest, splits: tuple[PreparedSplit, ...]) -> EvaluationReply:
        """Apply the edit, score every split in order, or until the request's floor is out of reach; revert.

        Splits of a fitness that compares (`COMPARING_KINDS`) that this worker hasn't seen are run through the unedited
        model first. Whatever the candidate itself raises becomes the reply's `failure`; the resident model is reverted
        either way.

        Raises:
            WorkerFault: memory ran out; the model may not be trusted any more.
        """
        started = time.perf_counter()
        results: list[TaskResult] = []
        partial: PartialTaskResult | None = None
        failure: str | None = None
        try:
            self._remember(splits)
            with self._resident.edited(request.edit):
                partial = self._score_all(splits, request.floor, results)
        except CandidateError as error:
            failure = str(error)
        except MemoryError as error:
            raise WorkerFault(f"out of memory: {error}") from None
        except Exception as error:
            if type(error).__name__ == "OutOfMemoryError":
                raise WorkerFault(f"out of device memory: {error}") from None
            failure = f"{type(error).__name__}: {error}"
        return EvaluationReply(
            ticket=request.ticket,
            results=() if failure is not None else tuple(results),
            failure=failure,
            seconds=time.perf_counter() - started,
            worker=self._name,
            stopped=failure is None and len(results) < len(splits),
            partial=None if failure is not None else partial,
        )

    def calibrate(self, recipe: CalibrationRecipe, splits: tuple[PreparedSplit, ...]) -> bytes:
        """Make a calibration on the unedited model, as a safetensors file.

        Raises:
            UserError: the model isn't one that the recipe is for.
        """
        self._resident.restore()
        return calibrate(self._resident, self._settings, recipe, splits).to_bytes()

    def analyse(self, request: UsageRequest, split: PreparedSplit) -> Usage:
        """Count what the routers choose under an edit, on a split's prompts and gold answers; revert.

        Raises:
            UserError: the edit doesn't fit this model, or there are no prompts.
            CandidateError: the edit's values are at fault.
        """
        limit = sys.maxsize if request.tokens is None else request.tokens
        return analyse_usage(
            self._resident, request.edit, token_sequences(self._resident, self._settings, (split,), limit)
        )

    def _remember(self, splits: tuple[PreparedSplit, ...]) -> None:
        """Let the engine keep what the unedited model predicts, where candidates are compared with it."""
        self._resident.revert()
        for split in splits:
            if split.fitness in COMPARING_KINDS:
                self._engine.remember(split)

    def _score_all(
        self, splits: tuple[PreparedSplit, ...], floor: Floor | None, results: list[TaskResult]
    ) -> PartialTaskResult | None:
        """Extend `results` split by split; gives the one that the candidate was stopped on."""
        for split in splits:
            started = time.perf_counter()
            if self._reuse is not None:
                self._reuse.work = self._reuse.spared = 0
            result = self._score(split, floor)
            seconds = time.perf_counter() - started
            if isinstance(result, PartialResult):
                return PartialTaskResult(split.fingerprint, result, seconds)
            spared = 0.0 if self._reuse is None else self._reuse.spared / max(self._reuse.work, 1)
            results.append(TaskResult(split.task, split.split, split.fingerprint, result, seconds, spared))
            if floor is not None:
                floor = floor.knowing(split.fingerprint, result.score)
                if floor.out_of_reach:
                    return None
        return None

    def _score(self, split: PreparedSplit, floor: Floor | None) -> SplitResult | PartialResult:
        return run_split(self._engine, split) if floor is None else run_until(self._engine, split, floor)
