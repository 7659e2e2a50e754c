"""The worker: holds one resident model and scores the edits it is sent. Runs as a Ray actor, or in-process."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from moevolve.evaluators.early_stopping import Floor
from moevolve.evaluators.errors import CandidateError
from moevolve.evaluators.runner import run_split, run_until
from moevolve.evaluators.types import COMPARING_KINDS, PartialResult, PreparedSplit, SplitResult
from moevolve.workers.analysis import analyse_usage
from moevolve.workers.calibration.base import CalibrationRecipe
from moevolve.workers.calibration.calibrators import calibrate, token_sequences
from moevolve.workers.config import ALL_SHORTCUTS, EngineConfig, ModelConfig, Shortcuts
from moevolve.workers.edits.eep import EepEdit
from moevolve.workers.generation import GenerationEngine, configure_runtime
from moevolve.workers.messages import (
    EvaluationReply,
    EvaluationRequest,
    PartialTaskResult,
    PopulationChoice,
    TaskResult,
)
from moevolve.workers.population import Population, Seat, out_of_memory
from moevolve.workers.population_choice import hardware_of, measure_population
from moevolve.workers.resident import ResidentModel
from moevolve.workers.reuse import LayerReuse
from moevolve.workers.usage import Usage, UsageRequest


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """Where a worker runs.

    Attributes:
        name: host and process.
        node: of Ray; empty without.
        device: where its model's inputs go.
        hardware: the device's make, where it may pay to measure what is fastest on it; empty on a CPU.
    """

    name: str
    node: str
    device: str
    hardware: str = ""


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
        self._population: Population | None = None
        if engine.population != "auto":
            self.share(engine.population)
        self._name = f"{socket.gethostname()}/{os.getpid()}"

    @property
    def resident(self) -> ResidentModel:
        return self._resident

    def info(self, node: str = "") -> WorkerInfo:
        """Where this worker runs; also the sign that its model is loaded."""
        device = self._resident.device
        return WorkerInfo(self._name, node, str(device), hardware_of(device))

    def share(self, size: int) -> None:
        """Let so many candidates share a pass from now on; a worker whose engine doesn't say it begins with 1."""
        if size == 1:
            self._population = None
        elif self._population is None or self._population.size != size:
            self._population = Population(self._resident, self._engine, size, self._shared_bytes)

    def choose_population(
        self, request: EvaluationRequest, splits: tuple[PreparedSplit, ...], most: int
    ) -> PopulationChoice:
        """Measure how many candidates like one, an EEP edit, should share a pass over its splits, at most `most`.

        Raises:
            Exception: what isn't the candidate's fault, nor want of memory.
        """
        assert isinstance(request.edit, EepEdit)
        return measure_population(self._resident, self._engine, request.edit, splits, self._shared_bytes, most)

    @property
    def _shared_bytes(self) -> int:
        return self._settings.population_memory_mb << 20

    def evaluate(self, request: EvaluationRequest, splits: tuple[PreparedSplit, ...]) -> EvaluationReply:
        """Apply the edit, score every split in order, or until the request's floor is out of reach; revert.

        Splits of a fitness that compares (`COMPARING_KINDS`) that this worker hasn't seen are run through the unedited
        model first. Whatever the candidate itself raises becomes the reply's `failure`; the resident model is reverted
        either way.

        Raises:
            WorkerFault: memory ran out; the model may not be trusted any more.
        """
        if self._population is not None and self._population.width(request.edit) > 1:
            return self.evaluate_many((request,), splits)[0]

        def score(result: _Scored) -> None:
            self._remember(splits)
            with self._resident.edited(request.edit):
                self._score_all(self._engine, splits, request.floor, result)

        return self._reply(request, splits, score)

    def evaluate_many(
        self, requests: tuple[EvaluationRequest, ...], splits: tuple[PreparedSplit, ...]
    ) -> tuple[EvaluationReply, ...]:
        """Like `evaluate`, several requests for the same splits; those that can do share passes.

        What a request's reply says, times apart, doesn't depend on the others.

        Raises:
            WorkerFault: memory ran out; the model may not be trusted any more.
        """
        if self._population is None:
            return tuple(self.evaluate(request, splits) for request in requests)
        replies: dict[int, EvaluationReply] = {}
        for party in self._population.parties([request.edit for request in requests]):
            invited = tuple(requests[place] for place in party)
            if self._population.width(invited[0].edit) == 1:
                replies[party[0]] = self.evaluate(invited[0], splits)
            else:
                replies |= zip(party, self._together(self._population, invited, splits), strict=True)
        return tuple(replies[place] for place in range(len(requests)))

    def _together(
        self, population: Population, requests: tuple[EvaluationRequest, ...], splits: tuple[PreparedSplit, ...]
    ) -> list[EvaluationReply]:
        """Evaluate a party; if a shared pass fails, each by itself, so that the one at fault fails alone."""
        started = time.perf_counter()
        found = [_Scored() for _ in requests]
        seats = []
        for request, result in zip(requests, found, strict=True):
            seat = self._seat(request, splits, result)
            self._try(result, partial(self._resident.check, seat.edit))
            if result.failure is None:
                seats.append(seat)
        try:
            if seats:
                self._remember(splits)
                population.run(seats)
        except WorkerFault:
            raise
        except Exception as error:
            if out_of_memory(error):
                raise WorkerFault(f"out of memory: {error}") from None
            if len(seats) > 1:
                return [self.evaluate(request, splits) for request in requests]
            for result in found:
                result.failure = result.failure or f"{type(error).__name__}: {error}"
        share = 1 / len(requests)
        seconds = (time.perf_counter() - started) * share
        pairs = zip(requests, found, strict=True)
        return [result.reply(request, splits, seconds, self._name, share) for request, result in pairs]

    def _seat(self, request: EvaluationRequest, splits: tuple[PreparedSplit, ...], result: _Scored) -> Seat:
        def work(engine: GenerationEngine) -> None:
            self._try(result, lambda: self._score_all(engine, splits, request.floor, result))

        assert isinstance(request.edit, EepEdit)
        return Seat(request.edit, work)

    def _reply(
        self, request: EvaluationRequest, splits: tuple[PreparedSplit, ...], score: Callable[[_Scored], None]
    ) -> EvaluationReply:
        started = time.perf_counter()
        result = _Scored()
        self._try(result, lambda: score(result))
        return result.reply(request, splits, time.perf_counter() - started, self._name)

    def _try(self, result: _Scored, action: Callable[[], None]) -> None:
        """Run a candidate's evaluation; what it raises is its failure, unless the worker is at fault."""
        try:
            action()
        except CandidateError as error:
            result.failure = str(error)
        except MemoryError as error:
            raise WorkerFault(f"out of memory: {error}") from None
        except Exception as error:
            if out_of_memory(error):
                raise WorkerFault(f"out of device memory: {error}") from None
            result.failure = f"{type(error).__name__}: {error}"

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
        self, engine: GenerationEngine, splits: tuple[PreparedSplit, ...], floor: Floor | None, found: _Scored
    ) -> None:
        """Extend what was found split by split, until the floor is out of reach."""
        for split in splits:
            started = time.perf_counter()
            if self._reuse is not None:
                self._reuse.work = self._reuse.spared = 0
            result = self._score(split, floor, engine)
            seconds = time.perf_counter() - started
            if isinstance(result, PartialResult):
                found.partial = PartialTaskResult(split.fingerprint, result, seconds)
                return
            spared = 0.0 if self._reuse is None else self._reuse.spared / max(self._reuse.work, 1)
            found.results.append(TaskResult(split.task, split.split, split.fingerprint, result, seconds, spared))
            if floor is not None:
                floor = floor.knowing(split.fingerprint, result.score)
                if floor.out_of_reach:
                    return

    def _score(
        self, split: PreparedSplit, floor: Floor | None, engine: GenerationEngine
    ) -> SplitResult | PartialResult:
        return run_split(engine, split) if floor is None else run_until(engine, split, floor)


@dataclass
class _Scored:
    """What is known of a candidate so far; see `EvaluationReply`."""

    results: list[TaskResult] = field(default_factory=list)
    partial: PartialTaskResult | None = None
    failure: str | None = None

    def reply(
        self,
        request: EvaluationRequest,
        splits: tuple[PreparedSplit, ...],
        seconds: float,
        worker: str,
        share: float = 1.0,
    ) -> EvaluationReply:
        """The reply; `share` is the part of the time on the clock that counts as this candidate's."""
        failed = self.failure is not None
        part = self.partial
        return EvaluationReply(
            ticket=request.ticket,
            results=() if failed else tuple(replace(one, seconds=one.seconds * share) for one in self.results),
            failure=self.failure,
            seconds=seconds,
            worker=worker,
            stopped=not failed and len(self.results) < len(splits),
            partial=None if failed or part is None else replace(part, seconds=part.seconds * share),
        )
