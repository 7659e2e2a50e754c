"""Whole searches in this process: a synthetic fitness instead of models, and a pool that misbehaves on purpose."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from replies import answers, failure, result
from search_samples import mixtral
from store_samples import decided, evaluation, search, split

from moevolve.evaluators.types import Example, Matching, PreparedSplit, Split, SplitResult
from moevolve.search.config.run import RunConfig
from moevolve.search.genomes.registry import make_space
from moevolve.search.loop.evaluation_cache import EvaluationCache
from moevolve.search.loop.search_loop import SearchLoop
from moevolve.search.loop.setup import SearchSetup
from moevolve.search.running.launch import register
from moevolve.search.strategies.phased import make_strategy
from moevolve.search.strategies.schedule import make_schedule
from moevolve.store.records import Progress, SearchRecord
from moevolve.store.repository import Store
from moevolve.workers.contract.edits import Edit, IdentityEdit
from moevolve.workers.contract.messages import EvaluationReply, EvaluationRequest
from moevolve.workers.methods.eep.edit import EepEdit

Outcome = tuple[float, float] | None
"""Score and gold log-probability; None for a candidate that fails."""
LAYERS = 4
ROWS = 20
"""Examples that a candidate has outcomes on."""


def smooth(edit: Edit) -> Outcome:
    """A landscape that evolution can climb, coarse enough for ties; one candidate in nine fails."""
    if isinstance(edit, IdentityEdit):
        return 0.9, -0.25
    assert isinstance(edit, EepEdit)
    if int(edit.phenotype_hash[:4], 16) % 9 == 4:
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


def reranked_search(store: Store) -> SearchRecord:
    """A search of two, recorded by hand: individual 0 is the best on `search`, `dev` picks 1."""
    config = run_config(name="reranked", final={"rerank": 2})
    record = search("reranked", config=config.model_dump_json())
    store.create_search(record, [split("one"), split("one", "dev")])
    for index, (fitness, fine) in enumerate([(0.875, 0.25), (0.75, 0.5)]):
        scores = evaluation(index, fitness, "one"), evaluation(index, fine, "one", "dev")
        store.record(record.id, [decided(index, fitness)], scores)
    return store.search(record.id)


def prepared(task: str, split: Split) -> PreparedSplit:
    examples = (Example(f"{task} {split}?", ("yes",), ("yes", "no")),)
    return PreparedSplit(task, split, "rank", "mean", Matching(), 1, " ", examples)


def make_lab_setup(config: RunConfig, search_id: str = "lab-1") -> SearchSetup:
    """What `set_up` makes, without a checkpoint or data."""
    facts = mixtral(LAYERS)
    splits: dict[Split, tuple[PreparedSplit, ...]] = {
        "search": tuple(prepared(task.name, "search") for task in config.tasks)
    }
    return SearchSetup(
        config, search_id, facts, make_space(config.genome, facts, config.phases), make_schedule(config), splits
    )


class Stopped(Exception):
    """The driver's process is gone."""


@dataclass
class UnrulyPool:
    """At most `workers` requests are under way; which of them complete at a poll, and in which order, is random.

    Attributes:
        seed: of the order of events.
        score: the fitness.
        workers: how many requests are under way at once.
        repeat: probability that a reply comes a second time.
        stop_at: the poll that raises `Stopped`; None never stops.
        submitted: phenotype hashes in order of submission.
        delivered: phenotype hashes in order of delivery.
        busiest: most requests that were open at once.
    """

    seed: int
    score: Callable[[Edit], Outcome] = smooth
    workers: int = 3
    repeat: float = 0.2
    stop_at: int | None = None
    submitted: list[str] = field(default_factory=list)
    delivered: list[str] = field(default_factory=list)
    busiest: int = 0

    def __post_init__(self) -> None:
        self._rng = np.random.default_rng(self.seed)
        self._open: list[EvaluationRequest] = []
        self._polls = 0
        self._past: list[EvaluationReply] = []

    def submit(self, request: EvaluationRequest) -> None:
        self.submitted.append(request.edit.phenotype_hash)
        self._open.append(request)
        self.busiest = max(self.busiest, len(self._open))

    def poll(self, timeout: float) -> list[EvaluationReply]:
        if self._polls == self.stop_at:
            raise Stopped
        self._polls += 1
        under_way = min(self.workers, len(self._open))
        finished = self._rng.permutation(under_way)[: self._rng.integers(under_way + 1)]
        requests = [self._open[position] for position in finished]
        self._open = [request for position, request in enumerate(self._open) if position not in finished]
        fresh = [self.reply(request) for request in requests]
        self.delivered += [request.edit.phenotype_hash for request in requests]
        again = [reply for reply in self._past if self._rng.random() < self.repeat]
        self._past = fresh
        return [*again, *fresh] if self._rng.random() < 0.5 else [*fresh, *again]

    def close(self) -> None:
        self._open.clear()

    def reply(self, request: EvaluationRequest) -> EvaluationReply:
        outcome = self.score(request.edit)
        if outcome is None:
            return failure(request)
        phenotype = request.edit.phenotype_hash
        return answers(request, {key: _result(outcome, phenotype, key) for key in request.fingerprints})


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


def drive(store: Store, setup: SearchSetup, pool: UnrulyPool) -> list[Progress]:
    """One driver, as `running.execute` would set it up; returns what it reported."""
    reports: list[Progress] = []
    cache = EvaluationCache(store, pool, setup.search_id, setup.facts.fingerprint, "engine")
    SearchLoop(setup, make_strategy(setup.config, setup.space, setup.schedule), store, cache, reports.append).run()
    return reports


def population(store: Store, search_id: str = "lab-1") -> list[tuple[Any, ...]]:
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
