"""The cache: known evaluations come from the store, unknown ones from the pool once, whatever the pool repeats."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
from search_lab import run_config, start
from search_samples import PRUNE, eep_space

from moevolve.evaluators.types import SplitResult
from moevolve.search.loop.evaluation_cache import EvaluationCache, Job, SplitRef
from moevolve.search.pools.base import Completion
from moevolve.search.service.evaluate import interval
from moevolve.store.repository import Store
from moevolve.workers.messages import EvaluationReply, EvaluationRequest, FailureKind, TaskResult
from moevolve.workers.methods.base import Edit, IdentityEdit

ONE, TWO = SplitRef("one", "search", "f-one", "accuracy"), SplitRef("two", "search", "f-two", "accuracy")


@dataclass
class HandPool:
    """Completes what the test says, when it says."""

    requests: list[EvaluationRequest] = field(default_factory=list)
    ready: list[Completion] = field(default_factory=list)

    def submit(self, request: EvaluationRequest) -> None:
        self.requests.append(request)

    def poll(self, timeout: float) -> list[Completion]:
        ready, self.ready = self.ready, []
        return ready

    def close(self) -> None:
        self.requests.clear()

    def answer(self, request: EvaluationRequest, score: float = 0.5, attempts: int = 1) -> None:
        outcomes = np.array([1, 0], np.float32)
        results = tuple(
            TaskResult("", "search", key, SplitResult(score, -1.0, outcomes), 0.5) for key in request.splits
        )
        self.ready.append(Completion(EvaluationReply(request.ticket, results, None, 1.0, "w"), attempts))

    def fail(self, request: EvaluationRequest, on: str, score: float = 0.5) -> None:
        """The candidate fails on one split; those before it were scored."""
        before = request.splits[: request.splits.index(on)]
        outcomes = np.array([1, 0], np.float32)
        results = tuple(TaskResult("", "search", key, SplitResult(score, -1.0, outcomes), 0.5) for key in before)
        reply = EvaluationReply(request.ticket, results, "NaN", 1.0, "w", failed_on=(on,))
        self.ready.append(Completion(reply, 1))

    def lose(self, request: EvaluationRequest, kind: FailureKind) -> None:
        """Its workers die, or time runs out."""
        reply = EvaluationReply(request.ticket, (), "gone 3 times", 1.0, "w", kind)
        self.ready.append(Completion(reply, 3))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(f"sqlite:///{tmp_path / 's.db'}") as opened:
        yield opened


@pytest.fixture
def pool() -> HandPool:
    return HandPool()


@pytest.fixture
def cache(store: Store, pool: HandPool) -> EvaluationCache:
    return EvaluationCache(store, pool, "model", "engine")


def edit(seed: int = 0) -> Edit:
    return eep_space(layers=4).sample(np.random.default_rng(seed), PRUNE).genome.express()


def save(store: Store, cache: EvaluationCache) -> None:
    """As the driver does, in a search of its own."""
    if not store.searches():
        start(store, run_config())
    unsaved = cache.unsaved
    store.record("lab-1", evaluations=unsaved)
    cache.saved(len(unsaved))


def test_a_job_goes_to_the_pool_once_and_settles_with_its_record(cache: EvaluationCache, pool: HandPool) -> None:
    job = Job(edit(), (ONE, TWO), experts=4, active=2, parameters=100)
    assert cache.request([job, job]) == []
    assert cache.request([job]) == []
    (request,) = pool.requests
    assert request.splits == ("f-one", "f-two") and cache.in_flight == 1
    assert cache.poll(0.0) == []
    pool.answer(request, 0.75, attempts=2)
    (settled,) = cache.poll(0.0)
    assert settled.job == job and not settled.reused and settled.failure is None
    record = settled.evaluations[1]
    assert (record.task, record.score, record.gold_logprob, record.attempt) == ("two", 0.75, -1.0, 2)
    assert (record.experts, record.active, record.parameters) == (4, 2, 100)
    assert (record.model_fingerprint, record.engine_fingerprint) == ("model", "engine")
    assert cache.in_flight == 0


def test_an_interval_is_of_the_metric_that_the_task_is_scored_by(cache: EvaluationCache, pool: HandPool) -> None:
    """Outcomes alone don't tell: here both means give the score, and an interval of their own."""
    outcomes = np.array([0.5, 0.5, 0.5, 0.5], np.float32)
    for metric, expected in (("mean", (0.5, 0.5)), ("geometric_mean", (0.5, 0.5))):
        job = Job(edit(), (replace(ONE, fingerprint=metric, metric=metric),))
        cache.request([job])
        result = TaskResult("", "search", metric, SplitResult(0.5, -1.0, outcomes), 0.5)
        pool.ready.append(Completion(EvaluationReply(pool.requests[-1].ticket, (result,), None, 1.0, "w"), 1))
        cache.poll(0.0)
        record = cache.unsaved[-1]
        assert record.metric == metric and interval(record) == pytest.approx(expected)
    ones = replace(record, outcomes=np.ones(9, "<f4").tobytes(), score=1.0, gold_logprob=0.0)
    assert interval(ones) == (1.0, 1.0), "likelihoods of 1"
    low, high = interval(replace(ones, metric="accuracy"))
    assert high == 1.0 and low == pytest.approx(9 / (9 + 1.959964**2)), "Wilson's interval of 9 right answers of 9"


def test_a_repeated_or_unknown_reply_is_ignored(cache: EvaluationCache, pool: HandPool) -> None:
    cache.request([Job(edit(), (ONE,))])
    (request,) = pool.requests
    pool.answer(request, 0.5)
    pool.answer(request, 0.9)
    pool.answer(EvaluationRequest("stranger", edit(), ("f-one",)))
    (settled,) = cache.poll(0.0)
    assert settled.evaluations[0].score == 0.5
    assert len(cache.unsaved) == 1


def test_what_was_settled_is_reused_at_once(cache: EvaluationCache, pool: HandPool) -> None:
    job = Job(edit(), (ONE,))
    cache.request([job])
    pool.answer(pool.requests[0])
    cache.poll(0.0)
    (again,) = cache.request([job])
    assert again.reused and again.evaluations[0].score == 0.5
    assert len(pool.requests) == 1 and len(cache.unsaved) == 1


def test_only_the_splits_that_are_missing_are_asked_for(cache: EvaluationCache, pool: HandPool) -> None:
    cache.request([Job(edit(), (ONE,))])
    pool.answer(pool.requests[0], 0.25)
    cache.poll(0.0)
    cache.request([Job(edit(), (ONE, TWO))])
    assert pool.requests[1].splits == ("f-two",)
    pool.answer(pool.requests[1], 0.75)
    (settled,) = cache.poll(0.0)
    assert [record.score for record in settled.evaluations] == [0.25, 0.75]
    assert not settled.reused


def test_stored_evaluations_are_found_by_another_cache(store: Store, cache: EvaluationCache, pool: HandPool) -> None:
    cache.request([Job(edit(), (ONE,))])
    pool.answer(pool.requests[0], 0.25)
    (settled,) = cache.poll(0.0)
    save(store, cache)
    assert cache.unsaved == []
    later = HandPool()
    (found,) = EvaluationCache(store, later, "model", "engine").request([Job(edit(), (ONE,))])
    assert found.reused and later.requests == []
    assert found.evaluations[0].score == settled.evaluations[0].score
    # The driver would fill its memory with them.
    assert found.evaluations[0].outcomes is None
    (stored,) = store.evaluations(edit().phenotype_hash, "model", "engine", ["f-one"])
    assert stored.outcomes == np.array([1, 0], "<f4").tobytes() and stored.examples_seen == 2


@pytest.mark.parametrize(("model", "engine"), [("other", "engine"), ("model", "other")])
def test_evaluations_of_other_weights_or_settings_are_not_reused(
    store: Store, cache: EvaluationCache, pool: HandPool, model: str, engine: str
) -> None:
    cache.request([Job(edit(), (ONE,))])
    pool.answer(pool.requests[0])
    cache.poll(0.0)
    save(store, cache)
    later = HandPool()
    assert EvaluationCache(store, later, model, engine).request([Job(edit(), (ONE,))]) == []
    assert len(later.requests) == 1


def test_a_failure_belongs_to_its_split_alone(store: Store, cache: EvaluationCache, pool: HandPool) -> None:
    three = SplitRef("three", "search", "f-three", "accuracy")
    job = Job(edit(), (ONE, TWO, three))
    cache.request([job])
    pool.fail(pool.requests[0], on="f-two", score=0.25)
    (settled,) = cache.poll(0.0)
    assert (settled.failure, settled.failure_kind) == ("NaN", "candidate")
    assert [(record.task, record.score, record.failure) for record in cache.unsaved] == [
        ("one", 0.25, None),
        ("two", None, "NaN"),
    ]
    save(store, cache)
    later = HandPool()
    other = EvaluationCache(store, later, "model", "engine")
    # The whole fails again without running; each split is what it was; what was never tried is tried.
    (whole,) = other.request([job])
    assert whole.reused and whole.failure == "NaN" and later.requests == []
    (alone,) = other.request([Job(edit(), (ONE,))])
    assert alone.reused and (alone.failure, alone.evaluations[0].score) == (None, 0.25)
    assert other.request([Job(edit(), (three,))]) == [] and later.requests[0].splits == ("f-three",)


@pytest.mark.parametrize("kind", ["worker", "timeout"])
def test_a_failure_that_is_not_the_candidates_is_no_evaluation(
    store: Store, cache: EvaluationCache, pool: HandPool, kind: FailureKind
) -> None:
    job = Job(edit(), (ONE, TWO))
    cache.request([job])
    pool.lose(pool.requests[0], kind)
    (settled,) = cache.poll(0.0)
    assert (settled.failure, settled.failure_kind) == ("gone 3 times", kind)
    assert cache.unsaved == []
    save(store, cache)
    assert cache.request([job]) == [] and len(pool.requests) == 2, "who asks again has it tried again"


def test_a_reply_that_leaves_a_split_out_is_a_failure(cache: EvaluationCache, pool: HandPool) -> None:
    cache.request([Job(edit(), (ONE, TWO))])
    request = pool.requests[0]
    pool.answer(EvaluationRequest(request.ticket, request.edit, ("f-one",)))
    (settled,) = cache.poll(0.0)
    assert settled.failure == "no result was returned"


def test_run_settles_each_of_its_jobs_once_among_others(cache: EvaluationCache, pool: HandPool) -> None:
    jobs = [Job(edit(seed), (ONE,)) for seed in range(3)]
    cache.request([Job(IdentityEdit(), (ONE,)), jobs[1]])
    running = iter(cache.run(jobs))
    pool.answer(pool.requests[0])
    pool.answer(pool.requests[1], 0.25)
    assert next(running).evaluations[0].score == 0.25
    for request in reversed(pool.requests[2:]):
        pool.answer(request)
    assert {item.job.key for item in running} == {jobs[0].key, jobs[2].key}
    assert len(pool.requests) == 4


def test_unsaved_records_stay_until_they_are_saved(cache: EvaluationCache, pool: HandPool) -> None:
    cache.request([Job(edit(seed), (ONE,)) for seed in range(3)])
    for request in pool.requests:
        pool.answer(request)
    cache.poll(0.0)
    first, *rest = cache.unsaved
    assert cache.unsaved[0] == first
    cache.saved(1)
    assert cache.unsaved == rest and len(rest) == 2


def test_one_candidate_may_be_under_way_on_several_splits_at_once(cache: EvaluationCache, pool: HandPool) -> None:
    jobs = [Job(edit(), (ONE,)), Job(edit(), (TWO,))]
    assert cache.request(jobs) == [] and cache.in_flight == 2
    for request, score in zip(pool.requests, (0.25, 0.75), strict=True):
        pool.answer(request, score)
    scores = {item.job.key: item.evaluations[0].score for item in cache.poll(0.0)}
    assert scores == {jobs[0].key: 0.25, jobs[1].key: 0.75}
