"""What a worker keeps from one request to the next, and what becomes of a fault: the candidate's, or its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from moevolve.evaluators.errors import CandidateError, UserError
from moevolve.evaluators.fitness.engine import Engine
from moevolve.evaluators.fitness.kinds import FITNESSES, Rank
from moevolve.evaluators.types import Example, Floats, Matching, PreparedSplit
from moevolve.workers.contract.edits import Calibration, IdentityEdit
from moevolve.workers.contract.fitting import RowsMeasurement
from moevolve.workers.contract.messages import EvaluationReply, EvaluationRequest, WorkerFault
from moevolve.workers.contract.settings import EngineConfig, ModelConfig
from moevolve.workers.methods.eep.apply import EepApplicator
from moevolve.workers.methods.eep.edit import EepEdit, ExpertsMeasurement
from moevolve.workers.worker import EvaluationWorker

A = PreparedSplit(
    "a", "search", "rank", "accuracy", Matching(), 1, " ", (Example("which is larger :", ("fox",), ("fox", "dog")),)
)
B, C = replace(A, task="b"), replace(A, task="c")
SPLITS = (A, B, C)
MEASURED = replace(A, examples=(*A.examples, Example("the fox is larger :", ("dog",), ("fox", "dog"))))


class Failing(Rank):
    """Ranks choices, but fails on one split."""

    def __init__(self, split: PreparedSplit, error: Exception) -> None:
        self._split, self._error = split, error

    def outcomes(self, engine: Engine, split: PreparedSplit) -> tuple[Floats, Floats]:
        if split == self._split:
            raise self._error
        return super().outcomes(engine, split)


@pytest.fixture(scope="module")
def worker(checkpoint: Callable[[str], Path]) -> EvaluationWorker:
    return EvaluationWorker(ModelConfig(str(checkpoint("mixtral")), device="cpu"), EngineConfig())


def evaluate(worker: EvaluationWorker, scale: float = 1.0, whole: bool = False) -> EvaluationReply:
    """Score the first three of six experts, scaled, or the whole model, on all splits."""
    kept = np.stack([np.eye(3, 6, dtype=np.float32)] * 3)
    edit = IdentityEdit() if whole else EepEdit(kept, kept * np.float32(scale), 2)
    return worker.evaluate(EvaluationRequest(edit, tuple(split.ref for split in SPLITS)), SPLITS)


def test_what_was_scored_before_a_failure_is_reported(
    worker: EvaluationWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    fine = evaluate(worker)
    assert fine.failure is None and len(fine.results) == 3 and fine.failed_on == ()
    monkeypatch.setitem(FITNESSES, "rank", Failing(B, CandidateError("logits are not finite")))
    reply = evaluate(worker)
    assert list(reply.results) == [SPLITS[0].fingerprint]
    assert reply.results[SPLITS[0].fingerprint].gold_logprob == fine.results[SPLITS[0].fingerprint].gold_logprob
    assert (reply.failure, reply.kind, reply.failed_on) == ("logits are not finite", "candidate", (B.fingerprint,))


def test_an_error_of_the_data_or_the_unedited_model_is_not_the_candidates(
    worker: EvaluationWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be stored as the candidate's failure on splits that it was never scored on."""
    monkeypatch.setitem(FITNESSES, "rank", Failing(B, UserError("row 3: its text has one token; leave the row out")))
    reply = evaluate(worker)
    assert list(reply.results) == [SPLITS[0].fingerprint]
    assert reply.failure and "leave the row out" in reply.failure and reply.failed_on == ()
    compared = replace(A, fitness="agreement", metric=FITNESSES["agreement"].metric, task="broken")

    def remember(*_: Any) -> None:
        raise UserError("the unedited model's hidden states are not finite; try model.dtype: float32")

    monkeypatch.setattr(worker._engine, "remember", remember)
    edit = worker.resident.applied
    reply = worker.evaluate(EvaluationRequest(edit, (A.ref, compared.ref)), (A, compared))
    assert reply.failure and "not finite" in reply.failure and reply.failed_on == ()


def test_an_edit_stays_until_another_is_wanted(worker: EvaluationWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    """A repair takes longer than a score. New splits are compared with the unedited model, whatever is applied."""
    made: list[Any] = []
    apply = EepApplicator.apply
    monkeypatch.setattr(EepApplicator, "apply", lambda self, edit: (made.append(edit), apply(self, edit)))
    worker.resident.revert()
    first = evaluate(worker)
    assert evaluate(worker).results[A.fingerprint].gold_logprob == first.results[A.fingerprint].gold_logprob
    worker.answer(made[0], A)
    assert len(made) == 1
    compared = replace(A, fitness="agreement", metric=FITNESSES["agreement"].metric, task="new")
    for times in (2, 2):
        reply = worker.evaluate(EvaluationRequest(made[0], (compared.ref,)), (compared,))
        assert len(made) == times and reply.results[compared.fingerprint].score < 1
    assert evaluate(worker, whole=True).failure is None and isinstance(worker.resident.applied, IdentityEdit)
    evaluate(worker)
    assert len(made) == 3


def test_an_edit_that_cannot_be_made_fails_on_every_split(worker: EvaluationWorker) -> None:
    """And nothing is left of it, nor of a calibration, when another candidate is evaluated."""
    before = [evaluate(worker), evaluate(worker, whole=True)]
    for measurement in (ExpertsMeasurement(("importance", "usage"), None, 60), RowsMeasurement(60)):
        assert Calibration.from_bytes(worker.calibrate(measurement, (MEASURED,))).tokens_run
    kept = np.stack([np.eye(3, 6, dtype=np.float32)] * 2)
    misfit = EvaluationRequest(EepEdit(kept, kept, 2), tuple(split.ref for split in SPLITS))
    reply = worker.evaluate(misfit, SPLITS)
    assert reply.results == {} and reply.failure and reply.failed_on == misfit.fingerprints
    assert evaluate(worker, scale=1e30).failure, "and so do weights that are not finite"
    for old, new in zip(before, (evaluate(worker), evaluate(worker, whole=True)), strict=True):
        assert old.failure is new.failure is None
        for split in SPLITS:
            here, there = old.results[split.fingerprint], new.results[split.fingerprint]
            assert (here.score, here.gold_logprob) == (there.score, there.gold_logprob)


def test_faults_of_memory_and_device_are_the_workers(worker: EvaluationWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (
        MemoryError("no more"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx(...)`"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR"),
    ):
        monkeypatch.setitem(FITNESSES, "rank", Failing(A, error))
        with pytest.raises(WorkerFault, match=type(error).__name__):
            evaluate(worker)


def test_other_exceptions_are_the_candidates(worker: EvaluationWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (RuntimeError("shapes cannot be multiplied"), KeyError("cuda")):
        monkeypatch.setitem(FITNESSES, "rank", Failing(A, error))
        reply = evaluate(worker)
        assert (reply.kind, reply.failed_on) == ("candidate", (A.fingerprint,))
        assert reply.failure is not None and reply.failure.startswith(type(error).__name__)


def test_a_model_that_can_not_be_measured_is_named(worker: EvaluationWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring it again can't help, unless memory or the device was at fault."""
    for error, kind, said in (
        (
            IndexError("index out of range in self"),
            UserError,
            r"^model .*: it can't be measured: IndexError: .*\.log\)$",
        ),
        (torch.OutOfMemoryError("CUDA out of memory"), torch.OutOfMemoryError, "^CUDA out of memory$"),
    ):
        monkeypatch.setattr("moevolve.workers.worker.calibrate", Mock(side_effect=error))
        with pytest.raises(kind, match=said):
            worker.calibrate(RowsMeasurement(60), (MEASURED,))
