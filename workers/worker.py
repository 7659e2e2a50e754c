"""The worker: applies edits to one resident model and scores it. It runs as a Ray actor or in the driver's process."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from moevolve.evaluators.errors import CandidateError, UserError, is_machine_fault, opening
from moevolve.evaluators.fitness.scoring import Answer, run_split, transcribe
from moevolve.evaluators.types import PreparedSplit, SplitResult
from moevolve.workers.checkpoints.loading import resolve_device, use_threads
from moevolve.workers.contract.capacity import NeededMemory, check_room, release_freed_memory
from moevolve.workers.contract.edits import ALL_TOKENS, Edit, IdentityEdit, Measurement
from moevolve.workers.contract.messages import EvaluationReply, EvaluationRequest, WorkerFault, WorkerInfo
from moevolve.workers.contract.settings import ALL_SHORTCUTS, EngineConfig, ModelConfig, Shortcuts
from moevolve.workers.contract.usage import Usage
from moevolve.workers.engine.columns import Columns
from moevolve.workers.engine.engine import GenerationEngine
from moevolve.workers.engine.measuring import analyse_usage, calibrate, token_sequences
from moevolve.workers.model.resident import ResidentModel
from moevolve.workers.vllm.engine import VllmEngine


class EvaluationWorker:
    """One resident model and its engine.

    Args:
        model: Checkpoint and settings.
        engine: Settings of the engine.
        needed: Memory that must be available before the model is loaded; None to load it without a check.
        fits: See `moevolve.workers.contract.methods.ModelParts`.
        shortcuts: Optimisations to use.

    Raises:
        NoRoomError: The memory isn't available.
        UserError: The checkpoint can't be loaded.
    """

    def __init__(
        self,
        model: ModelConfig,
        engine: EngineConfig,
        needed: NeededMemory | None = None,
        fits: Path | None = None,
        shortcuts: Shortcuts = ALL_SHORTCUTS,
    ) -> None:
        use_threads(engine.threads)
        if needed is not None:
            device = resolve_device(model)
            if device.type == "cuda" and needed.gpus < 1:
                torch.cuda.set_per_process_memory_fraction(needed.gpus, device)
            check_room(needed, device)
        self.resident = ResidentModel.load(model, None if needed is None else needed.memory.beside, fits)
        with opening(f"model {model.path}: a worker can't run it"):
            if engine.vllm is None:
                self._engine = GenerationEngine(self.resident.model, self.resident.tokenizer, engine, shortcuts)
            else:
                self._engine = VllmEngine(self.resident, engine, engine.vllm, shortcuts)
        self._name = f"{socket.gethostname()}/{os.getpid()}"  # where users look for its process and log

    @property
    def memory(self) -> Mapping[str, object]:
        """See `GenerationEngine.memory`."""
        return self._engine.memory

    def info(self, node: str = "") -> WorkerInfo:
        return WorkerInfo(self._name, node, str(self.resident.device), self.resident.one_layer_at_a_time)

    def evaluate_round(
        self, requests: Sequence[EvaluationRequest], splits: tuple[PreparedSplit, ...]
    ) -> list[EvaluationReply]:
        """Do as `evaluate` for several edits. One layer at a time, they take turns on every layer, which is read once.

        Raises:
            WorkerFault: The worker failed and must not be used again.
        """
        begun = time.perf_counter()
        states = self._through_layers([request.edit for request in requests], splits)
        share = (time.perf_counter() - begun) / len(requests)
        return [self._evaluate(*each, splits, share) for each in zip(requests, states, strict=True)]

    def evaluate(self, request: EvaluationRequest, splits: tuple[PreparedSplit, ...]) -> EvaluationReply:
        """Apply the edit and score every split in order.

        The edit stays applied unless one layer is edited at a time: a repair takes longer than a score, and the next
        request is often another split's. A new split whose fitness compares with the unedited model is first run
        through that. Errors become the reply's
        `failure`, together with the results of the splits before it; `failed_on` is empty unless they are the
        candidate's own.

        Raises:
            WorkerFault: The worker failed and must not be used again.
        """
        return self._evaluate(request, None, splits)

    def _evaluate(
        self,
        request: EvaluationRequest,
        states: Sequence[Tensor] | Exception | None,
        splits: tuple[PreparedSplit, ...],
        seconds: float = 0.0,
    ) -> EvaluationReply:
        """Do as `evaluate`. With `states`, the passes have run, in so many seconds, or have ended with an error."""
        started = time.perf_counter() - seconds
        results: dict[str, SplitResult] = {}
        failure: str | None = None
        failed_on: tuple[str, ...] = ()
        scoring = False
        try:
            self._remember(splits)
            split_started = time.perf_counter() - seconds
            failed_on = tuple(split.fingerprint for split in splits)
            if isinstance(states, Exception):
                raise states
            with self._edited(request.edit, splits, states):
                scoring = True
                for split in splits:
                    failed_on = (split.fingerprint,)
                    results[split.fingerprint] = self._score(split, split_started)
                    split_started = time.perf_counter()
        except Exception as error:  # noqa: BLE001 - a candidate's own fault never stops a search
            failure = str(error) if isinstance(error, CandidateError) else f"{type(error).__name__}: {error}"
            if isinstance(error, WorkerFault) or is_machine_fault(error):
                raise WorkerFault(failure) from None
            if scoring and isinstance(error, UserError):
                failed_on = ()  # a row that can't be read, by any model
        return EvaluationReply(
            ticket=request.ticket,
            results=results,
            failure=failure,
            seconds=time.perf_counter() - started,
            worker=self._name,
            failed_on=() if failure is None else failed_on,
        )

    def calibrate(self, measurement: Measurement, splits: tuple[PreparedSplit, ...]) -> bytes:
        """Measure a calibration on the unedited model; returns the bytes of a safetensors file.

        Raises:
            UserError: The measurement isn't for models of this kind, or the unedited model fails or gives values that
                aren't finite.
        """
        self.resident.revert()
        try:
            with opening(f"model {self.resident.config.path}: it can't be measured"):
                measured = calibrate(self.resident, self._engine, measurement, splits).to_bytes()
        except CandidateError as error:
            raise UserError(f"the unedited model can't be measured: {error}") from None
        release_freed_memory()
        return measured

    def analyse(self, edit: Edit, split: PreparedSplit, tokens: int | None = None) -> Usage:
        """Count the experts chosen under an edit on a split's prompts and answers, and revert.

        Examples without gold answer get the unedited model's answer. Counting stops at the end of the prompt with which
        `tokens` tokens are reached; None counts all prompts.

        Raises:
            UserError: The edit doesn't fit this model, or there are no prompts.
            CandidateError: The edit has invalid values.
        """
        self.resident.revert()
        sequences = token_sequences(self._engine, (split,), ALL_TOKENS if tokens is None else tokens)
        return analyse_usage(self.resident, edit, sequences, self._engine.token_text)

    def answer(self, edit: Edit, *splits: PreparedSplit) -> tuple[tuple[Answer, ...], ...]:
        """Return the complete answers to each split's prompts under an edit; errors are those of `analyse`.

        The edit stays applied unless one layer is edited at a time, as for short answers and choices.
        """
        self._remember(splits)
        with self._edited(edit, splits):
            return tuple(transcribe(self._engine, split) for split in splits)

    def has(self, edit: Edit) -> bool:
        """Return whether an edit is applied, so that a request of it begins at once."""
        return self.resident.applied.phenotype_hash == edit.phenotype_hash

    def _remember(self, splits: tuple[PreparedSplit, ...]) -> None:
        """Store the unedited model's predictions on splits whose fitness compares with them."""
        new = [split for split in splits if not self._engine.remembers(split)]
        if new:
            with self._edited(IdentityEdit(), new):
                for split in new:
                    self._engine.remember(split)

    def _through_layers(
        self, edits: Sequence[Edit], splits: tuple[PreparedSplit, ...]
    ) -> Sequence[Sequence[Tensor] | Exception | None]:
        """Run the passes that score the splits under several edits; None for each if each is to run them itself."""
        alone = [None] * len(edits)
        if len(edits) == 1 or not self.resident.one_layer_at_a_time:
            return alone
        try:
            self._remember(splits)
            passes = self._passes(splits)
        except Exception:  # noqa: BLE001 - it is every candidate's own, which says so
            return alone
        if passes is None:
            return alone
        assert isinstance(self._engine, GenerationEngine)
        return self._engine.forward.through_layers(passes, [partial(self.resident.by_layer, edit) for edit in edits])

    @contextmanager
    def _edited(
        self, edit: Edit, splits: Sequence[PreparedSplit], states: Sequence[Tensor] | None = None
    ) -> Iterator[None]:
        """Context manager in which the splits are scored under an edit, which is applied, or was layer by layer.

        With `states`, the passes have run (`_through_layers`).
        """
        passes = self._passes(splits) if self.resident.one_layer_at_a_time else None
        if passes is None:
            with self.resident.edited(edit, keep=True):
                yield
        else:
            assert isinstance(self._engine, GenerationEngine)
            with self._engine.forward.finished(passes, partial(self.resident.by_layer, edit), states):
                yield

    def _passes(self, splits: Sequence[PreparedSplit]) -> Sequence[Columns] | None:
        """Return the layouts of all passes that score the splits; None if those of one aren't known in advance."""
        if not isinstance(self._engine, GenerationEngine):
            return None
        found = [self._engine.passes(split) for split in splits]
        return None if None in found else [columns for each in found if each is not None for columns in each]

    def _score(self, split: PreparedSplit, started: float) -> SplitResult:
        """Score the current model on one split. Its time counts from `started`, which includes applying the edit."""
        result = run_split(self._engine, split)
        return replace(result, seconds=time.perf_counter() - started)
