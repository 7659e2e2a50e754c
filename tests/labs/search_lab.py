"""Whole searches in this process: a synthetic fitness instead of models, and a pool that misbehaves on purpose."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from replies import answers, failure, result
from scripted_pool import ScriptedPool
from search_samples import mixtral

from moevolve.evaluators.types import Example, Matching, PreparedSplit, Split, SplitResult
from moevolve.search.config.run import RunConfig
from moevolve.search.loop.evaluation_cache import EvaluationCache
from moevolve.search.loop.search_loop import SearchLoop
from moevolve.search.loop.setup import SearchSetup
from moevolve.search.pools.base import Pool
from moevolve.search.running.launch import register
from moevolve.search.strategies.phased import make_strategy
from moevolve.search.strategies.schedule import make_schedule
from moevolve.store.reader import StoreReader
from moevolve.store.records import Progress
from moevolve.store.repository import Store
from moevolve.workers.contract.edits import Edit, IdentityEdit
from moevolve.workers.contract.messages import EvaluationReply, EvaluationRequest
from moevolve.workers.methods.eep.edit import EepEdit

Outcome = tuple[float, float] | None
"""Score and gold log-probability; None for a candidate that fails."""
LAYERS = 4
ROWS = 20
"""Examples that a candidate has outcomes on."""


def fails(phenotype_hash: str) -> bool:
    """Whether `smooth` has a candidate fail: one in nine."""
    return int(phenotype_hash[:4], 16) % 9 == 4


def smooth(edit: Edit) -> Outcome:
    """A landscape that evolution can climb, coarse enough for ties; some candidates fail."""
    if isinstance(edit, IdentityEdit):
        return 0.9, -0.25
    assert isinstance(edit, EepEdit)
    if fails(edit.phenotype_hash):
        return None
    worth = np.random.default_rng(99).random((edit.layers, 1, edit.experts))
    gain = float((edit.expert_merging * worth).sum(axis=(1, 2)).mean() / edit.retained)
    drift = float(np.abs(edit.router_mapping.sum(axis=2) - 1).mean())
    return round(float(np.clip(gain - drift, 0, 1)), 2), -round(1 + drift, 1)


def run_config(**changes: Any) -> RunConfig:
    """A search of 60 individuals with a window of 6; `changes` replace top-level settings."""
    data = {
        "name": "lab",
        "seed": 1,
        "model": {"path": "nowhere"},
        "tasks": [{"name": "one"}],
        "genome": {"experts": 4, "groups": 2},
        "phases": [
            {"kind": "prune", "evaluations": 30, "initial": 10},
            {"kind": "merge", "evaluations": 30, "entry_rate": 0.1},
        ],
        "window": 6,
    }
    return RunConfig.model_validate(data | changes)


def prepared(task: str, split: Split) -> PreparedSplit:
    examples = (Example(f"{task} {split}?", ("yes",), ("yes", "no")),)
    return PreparedSplit(task, split, "rank", "mean", Matching(), 1, " ", examples)


def make_lab_setup(config: RunConfig, search_id: str = "lab-1", layers: int = LAYERS) -> SearchSetup:
    """What `set_up` makes, without a checkpoint or data."""
    facts = mixtral(layers)
    splits: dict[Split, tuple[PreparedSplit, ...]] = {
        "search": tuple(prepared(task.name, "search") for task in config.tasks)
    }
    return SearchSetup(config, search_id, facts, config.space(facts), make_schedule(config), splits)


def scored(score: Callable[[Edit], Outcome]) -> Callable[[EvaluationRequest], EvaluationReply]:
    """The replies of workers for which a function of the edit is the fitness."""

    def reply(request: EvaluationRequest) -> EvaluationReply:
        outcome = score(request.edit)
        if outcome is None:
            return failure(request)
        phenotype = request.edit.phenotype_hash
        return answers(request, {key: _result(outcome, phenotype, key) for key in request.fingerprints})

    return reply


class UnrulyPool(ScriptedPool):
    """Works on the first few requests at once; a random part of them completes at a poll, in random order.

    Args:
        seed: Seed of the order of events.
        score: Fitness of an edit.
        workers: Largest number of requests under evaluation at once.
        repeat: Probability that a reply comes a second time.
        stop_at: Number of the poll that raises `Stopped`; None never stops.
    """

    def __init__(
        self,
        seed: int,
        score: Callable[[Edit], Outcome] = smooth,
        workers: int = 3,
        repeat: float = 0.2,
        stop_at: int | None = None,
    ) -> None:
        super().__init__(scored(score), self._finished, stop_at)
        self._rng = np.random.default_rng(seed)
        self._workers, self._repeat = workers, repeat
        self._past: list[EvaluationReply] = []

    def poll(self, timeout: float) -> list[EvaluationReply]:
        fresh = super().poll(timeout)
        again = [reply for reply in self._past if self._rng.random() < self._repeat]
        self._past = fresh
        return [*again, *fresh] if self._rng.random() < 0.5 else [*fresh, *again]

    def _finished(self, waiting: Sequence[EvaluationRequest]) -> list[EvaluationRequest]:
        under_way = min(self._workers, len(waiting))
        finished = self._rng.permutation(under_way)[: self._rng.integers(under_way + 1)]
        return [waiting[position] for position in finished]


def _result(outcome: tuple[float, float], phenotype: str, fingerprint: str) -> SplitResult:
    score, gold = outcome
    # Tasks differ by a hash of their fingerprint, so that their weights matter.
    shift = int(hashlib.sha256(fingerprint.encode()).hexdigest()[:4], 16) / 2**16 / 10
    mean = max(0.0, score - shift)
    # Which rows a candidate does well on is its own affair; they make up for each other in pairs.
    digest = hashlib.sha256(f"{phenotype} {fingerprint}".encode()).digest()
    some = np.array([byte / 255 for byte in digest[: ROWS // 2]]) * min(mean, 1 - mean)
    return result(mean, gold, np.concatenate([mean + some, mean - some]).tolist())


def start(store: Store, config: RunConfig, search_id: str = "lab-1") -> SearchSetup:
    """Record a new search."""
    setup = make_lab_setup(config, search_id)
    register(setup, store)
    return setup


def drive(store: Store, setup: SearchSetup, pool: Pool, engine: str = "engine") -> list[Progress]:
    """One driver, as `running.execute` would set it up; returns what it reported."""
    reports: list[Progress] = []
    cache = EvaluationCache(store, pool, setup.search_id, setup.facts.fingerprint, engine)
    SearchLoop(setup, make_strategy(setup.config, setup.space, setup.schedule), store, cache, reports.append).run()
    return reports


def population(store: StoreReader, search_id: str = "lab-1") -> list[tuple[Any, ...]]:
    """All of a search that must not depend on circumstances."""
    return [
        (
            *(row.index, row.phase, row.operator, row.genome, row.content_hash, row.phenotype_hash),
            *(row.depth, row.parents, row.status, row.fitness, row.tie_break, row.failure),
        )
        for row in store.history(search_id)
    ]


def repeated(items: Sequence[str]) -> set[str]:
    """What occurs more than once."""
    return {item for item in items if items.count(item) > 1}
