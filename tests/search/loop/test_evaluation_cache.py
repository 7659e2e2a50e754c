"""The cache: known evaluations come from the store, unknown ones from the pool once, whatever the pool repeats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from replies import answer, failure, loss
from scripted_pool import ScriptedPool, none_of
from search_lab import run_config, start
from search_samples import PRUNE, eep_space

from moevolve.evaluators.types import SplitRef
from moevolve.search.genomes.contract.base import Offspring
from moevolve.search.genomes.eep.space import EepGenome
from moevolve.search.loop.evaluation_cache import EvaluationCache
from moevolve.search.loop.scores import interval
from moevolve.search.loop.search_loop import individual_record
from moevolve.store.errors import StoreError
from moevolve.store.records import FULL_MODEL, EvaluationRecord
from moevolve.store.repository import Store
from moevolve.workers.contract.edits import Edit, IdentityEdit
from moevolve.workers.contract.messages import EvaluationRequest

ONE, TWO = SplitRef("one", "search", "f-one", "accuracy"), SplitRef("two", "search", "f-two", "accuracy")


@pytest.fixture
def store(store: Store) -> Store:
    start(store, run_config())
    return store


@pytest.fixture
def pool() -> ScriptedPool:
    return ScriptedPool(arriving=none_of)


@pytest.fixture
def cache(store: Store, pool: ScriptedPool) -> EvaluationCache:
    return make_cache(store, pool)


def make_cache(store: Store, pool: ScriptedPool, model: str = "model", engine: str = "engine") -> EvaluationCache:
    return EvaluationCache(store, pool, "lab-1", model, engine)


def genome(seed: int = 0) -> EepGenome:
    return eep_space(layers=4).sample(np.random.default_rng(seed), PRUNE).genome


def edit(seed: int = 0) -> Edit:
    return genome(seed).express()


def recorded(store: Store, cache: EvaluationCache) -> list[EvaluationRecord]:
    """What the store has once the cache has written what is new."""
    cache.record()
    phenotypes = [edit(seed).phenotype_hash for seed in range(3)]
    fingerprints = ["f-one", "f-two", "f-three", "mean", "geometric_mean"]
    return store.evaluations([*phenotypes, FULL_MODEL], "model", "engine", fingerprints)


def test_a_job_goes_to_the_pool_once_and_settles_with_its_record(cache: EvaluationCache, pool: ScriptedPool) -> None:
    job = EvaluationRequest(edit(), (ONE, TWO), experts=4, active=2, parameters=100)
    assert cache.request([job, job]) == []
    assert cache.request([job]) == []
    (request,) = pool.requests
    assert request.fingerprints == ("f-one", "f-two")
    assert cache.poll(0.0) == []
    pool.ready.append(answer(request, 0.75, attempts=2))
    (settled,) = cache.poll(0.0)
    assert settled.request == job and not settled.reused and settled.failure is None
    record = settled.evaluations[1]
    assert (record.task, record.score, record.gold_logprob, record.attempt) == ("two", 0.75, -1.0, 2)
    assert (record.experts, record.active, record.parameters) == (4, 2, 100)
    assert (record.model_fingerprint, record.engine_fingerprint) == ("model", "engine")


def test_an_interval_is_of_the_metric_that_the_task_is_scored_by(
    store: Store, cache: EvaluationCache, pool: ScriptedPool
) -> None:
    cache.request([EvaluationRequest(edit(), (replace(ONE, metric="geometric_mean"),))])
    pool.ready.append(answer(pool.requests[-1], 1.0, outcomes=[1.0] * 9))
    cache.poll(0.0)
    (record,) = recorded(store, cache)
    assert record.metric == "geometric_mean" and interval(record) == (1.0, 1.0)
    low, high = interval(replace(record, metric="accuracy"))
    assert high == 1.0 and low == pytest.approx(9 / (9 + 1.959964**2)), "Wilson's interval of 9 right answers of 9"


def test_a_repeated_or_unknown_reply_is_ignored(store: Store, cache: EvaluationCache, pool: ScriptedPool) -> None:
    cache.request([EvaluationRequest(edit(), (ONE,))])
    stranger = EvaluationRequest(edit(), (ONE,), ticket="stranger")
    pool.ready.extend([answer(pool.requests[0], 0.5), answer(pool.requests[0], 0.9), answer(stranger)])
    (settled,) = cache.poll(0.0)
    assert settled.evaluations[0].score == 0.5
    assert len(recorded(store, cache)) == 1


def test_only_the_splits_that_are_missing_are_asked_for(cache: EvaluationCache, pool: ScriptedPool) -> None:
    three = replace(TWO, task="three", fingerprint="f-three")
    jobs = [EvaluationRequest(edit(), (ONE,)), EvaluationRequest(edit(), (three,))]
    assert cache.request(jobs) == [] and len(pool.requests) == 2, "one candidate may be under way several times at once"
    for request, score in zip(pool.requests, (0.25, 0.5), strict=True):
        pool.ready.append(answer(request, score))
    assert {item.request.key: item.evaluations[0].score for item in cache.poll(0.0)} == {
        jobs[0].key: 0.25,
        jobs[1].key: 0.5,
    }
    cache.request([EvaluationRequest(edit(), (ONE, TWO))])
    assert pool.requests[2].fingerprints == ("f-two",)
    pool.ready.append(answer(pool.requests[2], 0.75))
    (settled,) = cache.poll(0.0)
    assert [record.score for record in settled.evaluations] == [0.25, 0.75]
    assert not settled.reused
    cache.request([EvaluationRequest(edit(1), (ONE, TWO))])
    pool.ready.append(answer(replace(pool.requests[3], splits=(ONE,))))
    (incomplete,) = cache.poll(0.0)
    assert incomplete.failure == "no result was returned"


def test_evaluations_are_reused_at_once_and_by_another_cache_of_the_same_weights_and_settings(
    store: Store, cache: EvaluationCache, pool: ScriptedPool
) -> None:
    job = EvaluationRequest(edit(), (ONE,))
    cache.request([job])
    pool.ready.append(answer(pool.requests[0], 0.25))
    (settled,) = cache.poll(0.0)
    (again,) = cache.request([job])
    assert again.reused and again.evaluations[0].score == 0.25
    assert len(pool.requests) == 1 and len(recorded(store, cache)) == 1
    later = ScriptedPool(arriving=none_of)
    (found,) = make_cache(store, later).request([job])
    assert found.reused and later.requests == []
    assert found.evaluations[0].score == settled.evaluations[0].score
    # The driver would fill its memory with them.
    assert found.evaluations[0].outcomes is None
    (stored,) = store.evaluations(edit().phenotype_hash, "model", "engine", ["f-one"])
    assert stored.outcomes == np.array([1, 0], "<f4").tobytes() and stored.examples_seen == 2
    for count, other in enumerate([("other", "engine"), ("model", "other")], start=1):
        assert make_cache(store, later, *other).request([job]) == []
        assert len(later.requests) == count


def test_a_failure_belongs_to_its_split_alone(store: Store, cache: EvaluationCache, pool: ScriptedPool) -> None:
    three = SplitRef("three", "search", "f-three", "accuracy")
    job = EvaluationRequest(edit(), (ONE, TWO, three))
    cache.request([job])
    pool.ready.append(failure(pool.requests[0], on="f-two", reason="NaN", score=0.25))
    (settled,) = cache.poll(0.0)
    assert (settled.failure, settled.failure_kind) == ("NaN", "candidate")
    assert [(record.task, record.score, record.failure) for record in recorded(store, cache)] == [
        ("one", 0.25, None),
        ("two", None, "NaN"),
    ]
    later = ScriptedPool(arriving=none_of)
    other = make_cache(store, later)
    # The whole fails again without running; each split is what it was; what was never tried is tried.
    (whole,) = other.request([job])
    assert whole.reused and whole.failure == "NaN" and later.requests == []
    (alone,) = other.request([EvaluationRequest(edit(), (ONE,))])
    assert alone.reused and (alone.failure, alone.evaluations[0].score) == (None, 0.25)
    assert other.request([EvaluationRequest(edit(), (three,))]) == [] and later.requests[0].fingerprints == ("f-three",)


def test_a_failure_that_is_not_the_candidates_is_no_evaluation(
    store: Store, cache: EvaluationCache, pool: ScriptedPool
) -> None:
    job = EvaluationRequest(edit(), (ONE, TWO))
    cache.request([job])
    pool.ready.append(loss(pool.requests[0], "worker"))
    (settled,) = cache.poll(0.0)
    assert (settled.failure, settled.failure_kind) == ("gone 3 times", "worker")
    assert recorded(store, cache) == []
    assert cache.request([job]) == [] and len(pool.requests) == 2, "who asks again has it tried again"


def newest(waiting: Sequence[EvaluationRequest]) -> Sequence[EvaluationRequest]:
    return waiting[-1:]


def test_each_request_is_settled_once_among_others_and_recorded(store: Store) -> None:
    pool = ScriptedPool(partial(answer, score=0.25), newest)
    cache = make_cache(store, pool)
    requests = [EvaluationRequest(edit(seed), (ONE,)) for seed in range(3)]
    cache.request([EvaluationRequest(IdentityEdit(), (ONE,)), requests[1]])
    settled = cache.settle(requests)
    assert sorted(item.request.key for item in settled) == sorted(request.key for request in requests)
    assert len(pool.requests) == 4
    kept = store.evaluations([request.edit.phenotype_hash for request in requests], "model", "engine", ["f-one"])
    assert [record.score for record in kept] == [0.25] * 3


def test_what_came_before_an_interruption_is_recorded(store: Store) -> None:
    cache = make_cache(store, ScriptedPool(partial(answer, score=0.25), newest, 2, KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        cache.settle([EvaluationRequest(edit(seed), (ONE,)) for seed in range(3)])
    phenotypes = [edit(seed).phenotype_hash for seed in range(3)]
    assert len(store.evaluations(phenotypes, "model", "engine", ["f-one"])) == 2


def test_what_the_store_refuses_stays_to_be_recorded(store: Store, cache: EvaluationCache, pool: ScriptedPool) -> None:
    cache.request([EvaluationRequest(edit(), (ONE,))])
    pool.ready.append(answer(pool.requests[0]))
    cache.poll(0.0)
    orphan = individual_record(1, "prune", Offspring(genome(), "mutation", (0,)), genome().space.describe(genome()), 1)
    with pytest.raises(StoreError, match="FOREIGN KEY"):
        cache.record([orphan])
    assert [record.score for record in recorded(store, cache)] == [0.5]
