"""The worker: holds one resident model and scores the edits it is sent. Runs as a Ray actor, or in-process."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import replace

import torch

from moevolve.evaluators.errors import CandidateError, UserError
from moevolve.evaluators.fitness.kinds import FITNESSES
from moevolve.evaluators.fitness.scoring import Answer, run_split, transcribe
from moevolve.evaluators.types import PreparedSplit, SplitResult
from moevolve.workers.checkpoints.loading import resolve_device
from moevolve.workers.contract.capacity import NeededMemory, check_room
from moevolve.workers.contract.edits import ALL_TOKENS, CalibrationRecipe, Edit
from moevolve.workers.contract.messages import EvaluationReply, EvaluationRequest, WorkerFault, WorkerInfo
from moevolve.workers.contract.settings import ALL_SHORTCUTS, EngineConfig, ModelConfig, Shortcuts
from moevolve.workers.contract.usage import Usage, UsageRequest
from moevolve.workers.engine.engine import GenerationEngine
from moevolve.workers.engine.measuring import analyse_usage, calibrate, token_sequences
from moevolve.workers.engine.reuse import LayerReuse
from moevolve.workers.engine.runtime import configure_runtime
from moevolve.workers.model.resident import ResidentModel


class EvaluationWorker:
    """One resident model and its engine.

    Args:
        model: which checkpoint, and how to hold it.
        engine: how prompts are batched and run.
        shortcuts: which ways to compute less are taken.
        activation_cache_bytes: host memory for hidden states that candidates leave for others
            (`workers/engine/reuse.py`), which changes no result; 0 runs every layer of every candidate.
        needed: memory that there must be before anything is loaded; None loads and sees.

    Raises:
        NoRoomError: there isn't that much memory.
        UserError: the checkpoint can't be loaded.
    """

    def __init__(
        self,
        model: ModelConfig,
        engine: EngineConfig,
        shortcuts: Shortcuts = ALL_SHORTCUTS,
        activation_cache_bytes: int = 0,
        needed: NeededMemory | None = None,
    ) -> None:
        configure_runtime(engine.threads)
        if needed is not None:
            _reserve(model, needed)
        self._resident = ResidentModel.load(model, None if needed is None else needed.memory.beside)
        resident = self._resident
        self._reuse = (
            LayerReuse(resident.model, resident.layer_keys, activation_cache_bytes) if activation_cache_bytes else None
        )
        self._engine = GenerationEngine(resident.model, resident.tokenizer, engine, shortcuts, self._reuse)
        self._name = f"{socket.gethostname()}/{os.getpid()}"

    @property
    def resident(self) -> ResidentModel:
        return self._resident

    def info(self, node: str = "") -> WorkerInfo:
        """Where this worker runs; also the sign that its model is loaded."""
        return WorkerInfo(self._name, node, str(self._resident.device))

    def evaluate(self, request: EvaluationRequest, splits: tuple[PreparedSplit, ...]) -> EvaluationReply:
        """Apply the edit, score every split in order, revert.

        Splits of a fitness that compares, if this worker hasn't seen them, are run through the unedited model first.
        What the candidate itself raises becomes the reply's `failure`, beside the results of the splits before it; the
        resident model is reverted either way.

        Raises:
            WorkerFault: the worker is at fault, and may not be used again.
        """
        started = time.perf_counter()
        results: dict[str, SplitResult] = {}
        failure: str | None = None
        failed_on = tuple(split.fingerprint for split in splits)
        try:
            self._remember(splits)
            begun = time.perf_counter()
            with self._resident.edited(request.edit):
                for split in splits:
                    failed_on = (split.fingerprint,)
                    results[split.fingerprint] = self._score(split, begun)
                    begun = time.perf_counter()
        except CandidateError as error:
            failure = str(error)
        except Exception as error:  # noqa: BLE001 - a candidate's own fault never stops a search
            if is_workers_fault(error):
                raise WorkerFault(f"{type(error).__name__}: {error}") from None
            failure = f"{type(error).__name__}: {error}"
        return EvaluationReply(
            ticket=request.ticket,
            results=results,
            failure=failure,
            seconds=time.perf_counter() - started,
            worker=self._name,
            failed_on=() if failure is None else failed_on,
        )

    def calibrate(self, recipe: CalibrationRecipe, splits: tuple[PreparedSplit, ...]) -> bytes:
        """Make a calibration on the unedited model, as a safetensors file.

        Raises:
            UserError: the model isn't one that the recipe is for, or its own numbers are not finite.
        """
        self._resident.revert()
        try:
            return calibrate(self._resident, self._engine, recipe, splits).to_bytes()
        except CandidateError as error:
            raise UserError(f"the unedited model can't be measured: {error}") from None

    def analyse(self, request: UsageRequest, split: PreparedSplit) -> Usage:
        """Count what the routers choose under an edit, on a split's prompts and answers; revert.

        Where there is no gold answer, it is the unedited model's.

        Raises:
            UserError: the edit doesn't fit this model, or there are no prompts.
            CandidateError: the edit's values are at fault.
        """
        limit = ALL_TOKENS if request.tokens is None else request.tokens
        self._resident.revert()
        sequences = token_sequences(self._engine, (split,), limit)
        return analyse_usage(self._resident, request.edit, sequences, self._engine.token_text)

    def answer(self, edit: Edit, split: PreparedSplit) -> tuple[Answer, ...]:
        """What the model says under an edit to every prompt of a split, whole; revert.

        Raises:
            UserError: the edit doesn't fit this model.
            CandidateError: the edit's values are at fault.
        """
        self._remember((split,))
        with self._resident.edited(edit):
            return transcribe(self._engine, split)

    def _remember(self, splits: tuple[PreparedSplit, ...]) -> None:
        """Let the engine keep what the unedited model predicts, where candidates are compared with it."""
        self._resident.revert()
        for split in splits:
            if FITNESSES[split.fitness].compares:
                self._engine.remember(split)

    def _score(self, split: PreparedSplit, begun: float) -> SplitResult:
        """Score the model as it is on one split; what is done since `begun` counts as its time."""
        if self._reuse is not None:
            self._reuse.work = self._reuse.spared = 0
        result = run_split(self._engine, split)
        saved = 0.0 if self._reuse is None else self._reuse.spared / max(self._reuse.work, 1)
        return replace(result, seconds=time.perf_counter() - begun, saved=saved)


def _reserve(model: ModelConfig, needed: NeededMemory) -> None:
    """See that there is room for a model, and keep to the part of a device that is this worker's."""
    device = resolve_device(model)
    if device.type == "cuda" and needed.gpus < 1:
        torch.cuda.set_per_process_memory_fraction(needed.gpus, device)
    check_room(needed, device)


_DEVICE_FAULTS = ("CUDA", "CUBLAS", "CUDNN", "CUSPARSE", "CUSOLVER", "NCCL", "HIP error", "device-side assert")
"""What messages of a device's errors say where torch has no class of its own for them."""


def is_workers_fault(error: BaseException) -> bool:
    """Whether an exception says nothing of the candidate, but that this process can't be trusted any more.

    Memory ran out, the host's or a device's; or the device reported an error: an illegal access or an assertion leaves
    a CUDA context that fails everything after it.
    """
    if isinstance(error, MemoryError | torch.OutOfMemoryError | torch.AcceleratorError):
        return True
    said = str(error)
    return isinstance(error, RuntimeError) and any(name in said for name in _DEVICE_FAULTS)
