"""Searches in this process whose candidates have outcomes per example: the real worker on an engine without a model."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from search_lab import UnrulyPool, make_lab_plan, smooth

from moevolve.evaluators.engine import Watch
from moevolve.evaluators.errors import CandidateError
from moevolve.evaluators.types import Example, Matching, PreparedSplit, Split
from moevolve.search.config import RunConfig
from moevolve.search.plan import Plan
from moevolve.search.service import register
from moevolve.store.repository import Store
from moevolve.workers.actor import EvaluationWorker
from moevolve.workers.edits.base import Edit
from moevolve.workers.messages import EvaluationReply, EvaluationRequest

EXAMPLES, BATCH = 60, 4


def graded(task: str, split: Split) -> PreparedSplit:
    examples = tuple(Example(f"{task} {split} {i}?", ("yes",), ("yes", "no")) for i in range(EXAMPLES))
    return PreparedSplit(task, split, "rank", "accuracy", Matching(), 1, " ", examples)


def stopping_plan(config: RunConfig, search_id: str = "lab-1") -> Plan:
    """`make_lab_plan` with enough examples to stop half-way, and a `dev` split."""
    splits: tuple[Split, ...] = ("search", "dev")
    prepared = {name: tuple(graded(task.name, name) for task in config.tasks) for name in splits}
    return replace(make_lab_plan(config, search_id), prepared=prepared)


def begin(store: Store, config: RunConfig, search_id: str = "lab-1") -> Plan:
    """Record a new search."""
    plan = stopping_plan(config, search_id)
    register(plan, store)
    return plan


class _Resident:
    """A model that is no more than the edit on it."""

    edit: Edit | None = None

    @contextmanager
    def edited(self, edit: Edit) -> Iterator[None]:
        self.edit = edit
        yield

    def revert(self) -> None:
        self.edit = None


class _Engine:
    """Answers by `smooth`: the better a candidate, the more examples it gets right, the easy ones first, with noise."""

    def __init__(self, resident: _Resident) -> None:
        self._resident = resident
        self.examples = 0

    def rank(self, split: PreparedSplit, watch: Watch | None = None) -> tuple[NDArray[np.float64], ...]:
        assert self._resident.edit is not None
        outcome = smooth(self._resident.edit)
        if outcome is None:
            raise CandidateError("logits are not finite")
        share, gold = min(1.0, max(0.05, 3 * outcome[0] - 1.2)), outcome[1]  # wider apart than they are
        key = hashlib.sha256(f"{split.fingerprint} {self._resident.edit.phenotype_hash}".encode()).digest()
        noise = np.random.default_rng(list(key)).normal(0, 0.1, EXAMPLES)
        hardness = np.random.default_rng(5).random(EXAMPLES)
        values = [np.array([gold, gold - 1 if right else gold + 1]) for right in hardness + noise < share]
        batches = [list(range(at, at + BATCH)) for at in range(0, EXAMPLES, BATCH)]
        for batch in batches if watch is None else watch.arrange(batches):
            self.examples += len(batch)
            if watch is not None:
                watch.ranked(batch, [values[i] for i in batch])
        return tuple(values)


def lab_worker() -> EvaluationWorker:
    """A real worker around them."""
    worker: Any = object.__new__(EvaluationWorker)
    worker._resident = _Resident()
    worker._engine = _Engine(worker._resident)
    worker._reuse = worker._population = None
    worker._name = "lab"
    return worker


@dataclass
class WorkerPool(UnrulyPool):
    """An unruly pool whose requests a worker answers.

    Attributes:
        splits: prepared splits of any number of plans.
        requests: all that were submitted.
    """

    splits: dict[str, PreparedSplit] = field(default_factory=dict)
    requests: list[EvaluationRequest] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.worker = lab_worker()

    def submit(self, request: EvaluationRequest) -> None:
        self.requests.append(request)
        super().submit(request)

    @property
    def examples(self) -> int:
        """Examples that were run."""
        engine: Any = self.worker._engine
        return int(engine.examples)

    def _reply(self, request: EvaluationRequest) -> EvaluationReply:
        reply = self.worker.evaluate(request, tuple(self.splits[key] for key in request.splits))
        return replace(reply, seconds=0.1)


def pool_of(plan: Plan, seed: int = 0, **other: Any) -> WorkerPool:
    return WorkerPool(seed, splits=dict(plan.all_prepared), **other)
