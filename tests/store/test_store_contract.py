"""The contract of `Store` for writing and reading back, on every backend."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import numpy as np
import pytest
from store_samples import ENGINE, MODEL, decided, digest, evaluation, individual, search, split

from moevolve.store.errors import StoreError
from moevolve.store.records import FULL_MODEL, ExportRecord, StoredShrink
from moevolve.store.repository import Store
from moevolve.store.session import CHUNK


def test_a_search_comes_back_as_it_went_in_or_is_refused(store: Store) -> None:
    given = search(created_at=datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC))
    tasks = [split("rte"), split("copa", weight=0.5), split("rte", "dev")]
    store.create_search(given, tasks)
    assert store.search("alpha") == store.search("id-alpha") == replace(given, updated_at=given.created_at)
    assert store.search_tasks("id-alpha") == tasks
    # Names and ids are unique, also crosswise.
    for name, key in (("alpha", "new"), ("new", "id-alpha"), ("id-alpha", "new"), ("new", "alpha")):
        with pytest.raises(StoreError, match=r"alpha.*already"):
            store.create_search(search(name, id=key), [])
    for bad in (search(""), search("a:b"), search(seed=2**64)):
        with pytest.raises(StoreError):
            store.create_search(bad, [])
    assert [one.search.name for one in store.searches()] == ["alpha"]


def test_what_is_unknown_is_named_with_the_nearest(store: Store) -> None:
    with pytest.raises(StoreError, match="no search 'rte-tiny'"):
        store.search("rte-tiny")
    store.create_search(search("rte-tiny"), [])
    with pytest.raises(StoreError, match="no search 'rte-tyni': did you mean rte-tiny"):
        store.search("rte-tyni")
    with pytest.raises(StoreError, match="no search"):
        store.record("nothing", [individual(0)])
    with pytest.raises(StoreError, match="its id is needed"):
        store.record("rte-tiny", [individual(0)])
    with pytest.raises(StoreError, match="no individuals yet"):
        store.individual("rte-tiny:0")
    store.record("id-rte-tiny", [individual(0), individual(1), individual(7)])
    with pytest.raises(StoreError, match="nearest: rte-tiny:1, rte-tiny:7"):
        store.individual("rte-tiny:4")
    for bad in ("alpha", "alpha:", ":3", "alpha:-1", "alpha:x", ""):
        with pytest.raises(StoreError, match="SEARCH:INDEX"):
            store.individual(bad)


def test_what_is_beside_the_fitness_may_change(store: Store) -> None:
    fitness_splits = [split("rte"), split("rte", "dev")]
    store.create_search(search(), [*fitness_splits, split("rte@agreement", weight=0)])
    assert store.search_tasks("id-alpha") == fitness_splits
    assert store.searches()[0].tasks == ("rte",)
    beside = [split("copa", "test", weight=0), split("boolq", "test", weight=0)]
    store.amend_search("id-alpha", '{"seed": 8}', beside)
    assert store.search_tasks("id-alpha", auxiliary=True) == [*fitness_splits, *beside]
    assert store.search("alpha").config == '{"seed": 8}'
    store.amend_search("id-alpha", '{"seed": 8}', [])
    assert store.search_tasks("id-alpha", auxiliary=True) == fitness_splits
    with pytest.raises(StoreError, match="no search"):
        store.amend_search("id-gamma", "{}", [])


def test_status_changes_and_counts(store: Store) -> None:
    store.create_search(search(), [split("rte"), split("copa"), split("rte", "dev")])
    store.create_search(search("beta"), [])
    store.record("id-alpha", [*(individual(i) for i in range(4)), decided(0, 0.5), decided(1, 0.75), decided(2, None)])
    store.set_status("id-alpha", "failed", "no worker left")
    alpha, beta = store.searches()
    assert (alpha.search.status, alpha.search.status_reason) == ("failed", "no worker left")
    assert (alpha.individuals, alpha.evaluated, alpha.failed, alpha.pending, alpha.best_fitness) == (4, 2, 1, 1, 0.75)
    assert alpha.tasks == ("rte", "copa")
    assert (beta.individuals, beta.best_fitness, beta.tasks) == (0, None, ())
    store.set_status("id-alpha", "running")
    assert store.search("alpha").status_reason is None
    assert [(one.owner, one.state == "orphaned") for one in store.searches()] == [(None, True), (None, False)]
    lease = store.acquire("id-alpha", "me", 60)
    assert [(one.owner, one.state == "orphaned") for one in store.searches()] == [("me", False), (None, False)]
    store.release(lease)
    with pytest.raises(StoreError, match="no search"):
        store.set_status("id-gamma", "running")


@pytest.mark.parametrize(
    ("metric", "mean"), [("accuracy", (3 * 0.75 + 0.25) / 4), ("inverse_perplexity", (0.75**3 * 0.25) ** (1 / 4))]
)
def test_a_finished_search_is_listed_with_its_winners_scores(store: Store, metric: str, mean: float) -> None:
    tasks = [split(), split("rte", "dev", 3.0), split("cb", "dev", 1.0), split("rte", "test"), split("held", "test", 0)]
    store.create_search(search(), tasks)
    scores = [("rte", "search", 0.5), ("rte", "dev", 0.75), ("cb", "dev", 0.25), ("held", "test", 1.0)]
    evaluations = [evaluation(1, score, task, name, metric=metric) for task, name, score in scores]
    store.record("id-alpha", [decided(0, 0.75), decided(1, 0.5)], [evaluation(0, 0.75, metric=metric), *evaluations])
    assert (store.searches()[0].dev, store.searches()[0].size) == (None, None), "it has no winner yet"
    store.set_status("id-alpha", "finished", winner=1)
    (found,) = store.searches()
    assert found.search.winner == 1 and found.best_fitness == 0.75 and found.size == pytest.approx(2000 / 2**40)
    assert (found.dev, found.test) == (pytest.approx(mean), None), "its own test split isn't scored"
    store.add_evaluations([evaluation(0, 1.0, "rte", "test"), evaluation(1, 0.125, "rte", "test")])
    assert store.searches()[0].test == 0.125
    store.set_status("id-alpha", "running")
    assert store.search("alpha").winner is None


def test_texts_may_hold_what_databases_cannot_keep(store: Store) -> None:
    store.create_search(search(), [split()])
    bad, kept = "ValueError: \x00 in \udcff", "ValueError: \ufffd in ?"
    failed = replace(individual(0), status="failed", failure=bad, failure_kind="candidate")
    store.record("id-alpha", [failed], [evaluation(0, None, failure=bad)])
    store.set_status("id-alpha", "failed", bad)
    assert store.history("id-alpha")[0].failure == kept
    found = store.evaluations(failed.phenotype_hash, MODEL, ENGINE, [digest("rte", "search")])
    assert [row.failure for row in found] == [kept]
    assert store.search("alpha").status_reason == kept
    assert store.latest_events("id-alpha")[0].text == f"failed: {kept}"


def test_history_gives_back_bytes_parents_gaps_and_pending(store: Store) -> None:
    store.create_search(search(), [split()])
    batch = [individual(0), individual(1), individual(3, [1, 0, 1], depth=1)]
    store.record("id-alpha", [*batch, decided(1, 0.5, -float("inf"))])
    store.record("id-alpha", [decided(3, None)])
    zero, one, three = found = store.history("id-alpha")
    assert [row.index for row in found] == [0, 1, 3]
    assert (zero.status, zero.fitness, zero.parents) == ("pending", None, ())
    assert (one.status, one.fitness, one.tie_break) == ("ok", 0.5, -float("inf"))
    assert (three.parents, three.depth, three.status) == ((1, 0, 1), 1, "failed")
    assert three.failure == "logits are not finite"
    assert [row.genome for row in found] == [given.genome for given in batch]
    assert store.history("id-nothing") == []


def test_recording_again_changes_nothing_and_the_first_evaluation_rules(store: Store) -> None:
    store.create_search(search(), [split()])
    batch = (
        [individual(0), individual(1, [0]), decided(0, 0.5), decided(1, None)],
        [evaluation(0, 0.5, worker="first"), evaluation(1, None)],
    )
    store.record("id-alpha", *batch)
    before = store.history("id-alpha"), store.individual("alpha:0"), store.individual("alpha:1")
    store.record("id-alpha", *batch)
    store.record("id-alpha", *[[*part, *part] for part in batch])
    after = store.history("id-alpha"), store.individual("alpha:0"), store.individual("alpha:1")
    assert after[0] == before[0]
    assert [replace(one, search=search()) for one in after[1:]] == [replace(one, search=search()) for one in before[1:]]
    store.record("id-alpha", evaluations=[evaluation(0, 0.9, worker="second"), evaluation(2, 0.25)])
    found = store.evaluations(
        [digest("phenotype", 0), digest("phenotype", 2)], MODEL, ENGINE, [digest("rte", "search")]
    )
    assert {(one.worker, one.score) for one in found} == {("first", 0.5), ("", 0.25)}


REFUSED = {
    "another genome": ([individual(0, content_hash="x")], []),
    "another edit": ([individual(0, phenotype="x")], []),
    "unknown parent": ([individual(9, [5])], []),
    "parent from the future": ([individual(5, [6]), individual(6)], []),
    "own parent": ([individual(5, [5])], []),
    "second fitness": ([decided(0, 0.75)], []),
    "failed after ok": ([decided(0, None)], []),
    "two fitnesses at once": ([decided(9, 0.5), decided(9, 0.25)], []),
    "pending with a fitness": ([individual(9, fitness=0.5)], []),
    "not a number": ([decided(1, float("nan"))], []),
    "no tie-break": ([individual(1, status="ok", fitness=0.5)], []),
    "score not finite": ([], [evaluation(1, float("inf"))]),
    "log-probability not a number": ([], [evaluation(1, 0.5, gold_logprob=float("nan"))]),
    "scored and failed": ([], [evaluation(1, 0.5, failure="both")]),
    "neither": ([], [evaluation(1, None, failure=None)]),
    "failed by nobody's fault": ([individual(1, status="failed", failure="lost")], []),
    "another metric": ([], [evaluation(1, 0.5, name="dev", metric="mean")]),
    "fingerprint of another split": ([], [evaluation(1, 0.5, task_fingerprint=digest("rte", "dev"))]),
}


def test_a_refused_batch_writes_nothing(store: Store) -> None:
    store.create_search(search(), [split()])
    store.record("id-alpha", [decided(0, 0.5), individual(1)], [evaluation(0, 0.5, name="dev")])
    before = store.history("id-alpha"), store.search("alpha").updated_at
    fresh = [individual(2), individual(3, [0, 2])]
    for case, (individuals, evaluations) in REFUSED.items():
        said = ""
        try:
            store.record("id-alpha", [*fresh, decided(2, 0.5), *individuals], [evaluation(2, 0.5), *evaluations])
        except StoreError as error:
            said = str(error)
        assert said and "\n" not in said, case
        assert (store.history("id-alpha"), store.search("alpha").updated_at) == before, case
        assert store.evaluations(digest("phenotype", 2), MODEL, ENGINE, [digest("rte", "search")]) == [], case
    # The refused transactions made a context too; its id must not have been remembered.
    store.record("id-alpha", [*fresh, decided(2, 0.5)], [evaluation(2, 0.5)])
    assert store.evaluations(digest("phenotype", 2), MODEL, ENGINE, [digest("rte", "search")])[0].score == 0.5


def test_more_phenotypes_than_a_statement_may_name_are_looked_up_at_once(store: Store) -> None:
    store.create_search(search(), [split(), split("copa")])
    count = 2 * CHUNK + 2
    batch = [evaluation(i, i / count, task) for i in range(0, count, 2) for task in ("rte", "copa")]
    store.record("id-alpha", evaluations=batch)
    hashes = [digest("phenotype", i) for i in range(count)]
    prints = [digest("rte", "search"), digest("copa", "search"), digest("unknown", "search")]
    found = store.evaluations(hashes + hashes, MODEL, ENGINE, prints)
    assert {(one.phenotype_hash, one.task, one.score) for one in found} == {
        (one.phenotype_hash, one.task, one.score) for one in batch
    }
    assert len(found) == count
    assert found == sorted(found, key=lambda one: (one.phenotype_hash, one.task_fingerprint))
    assert {one.task for one in store.evaluations(hashes, MODEL, ENGINE, prints[:1])} == {"rte"}
    assert store.evaluations(hashes, "other", ENGINE, prints) == []
    assert store.evaluations(hashes, MODEL, "other", prints) == []
    assert store.evaluations([], MODEL, ENGINE, prints) == store.evaluations(hashes, MODEL, ENGINE, []) == []


def test_an_evaluation_keeps_everything_and_numbers_of_numpy_as_numbers(store: Store) -> None:
    store.create_search(search(), [split()])
    outcomes = np.array([0, 1, 0.5], dtype="<f4").tobytes()
    details = {"examples_seen": 3, "seconds": 1.25, "worker": "node/3", "attempt": 2, "created_at": datetime.now(UTC)}
    given = evaluation(0, 0.5, outcomes=outcomes, **details)
    full = replace(given, phenotype_hash=FULL_MODEL, experts=None, active=None, parameters=None)
    store.record("id-alpha", evaluations=[given, full])
    prints = [digest("rte", "search")]
    assert store.evaluations(given.phenotype_hash, MODEL, ENGINE, prints) == [given]
    assert store.evaluations(FULL_MODEL, MODEL, ENGINE, prints) == [full]
    half = np.float32(0.25)
    shape = {"experts": np.int64(5), "active": np.int64(2), "parameters": np.int64(2_000)}
    store.record("id-alpha", [decided(individual(1, **shape), half, -half)], [evaluation(1, half, **shape)])
    detail = store.individual("alpha:1")
    assert (detail.individual.fitness, detail.individual.tie_break) == (0.25, -0.25)
    assert (detail.evaluations[0].score, detail.evaluations[0].experts) == (0.25, 5)
    assert [row.index for row in store.best("rte", experts=5, active=2)] == [1]


def test_an_individual_in_detail(store: Store) -> None:
    store.create_search(search(), [split(), split("copa")])
    given = individual(1, [0], created_at=datetime.now(UTC), depth=1)
    test, dev, copa = evaluation(1, 0.4, name="test"), evaluation(1, 0.6, name="dev"), evaluation(1, None, "copa")
    store.record("id-alpha", [individual(0), decided(given, None)], [test, dev, evaluation(1, 0.5), copa])
    store.record("id-alpha", evaluations=[evaluation(1, 0.9, model_fingerprint="other")])
    for ref in ("alpha:1", "id-alpha:1"):
        detail = store.individual(ref)
        assert detail.ref == "alpha:1"
        assert detail.individual == decided(given, None)
        assert [(one.task, one.split, one.score) for one in detail.evaluations] == [
            ("copa", "search", None),
            ("rte", "search", 0.5),
            ("rte", "dev", 0.6),
            ("rte", "test", 0.4),
        ]


def test_exports_are_replaced_and_calibrations_stay_as_they_were_first(store: Store) -> None:
    store.create_search(search(), [split()])
    store.record("id-alpha", [individual(0), individual(1)])
    first = ExportRecord("out/a", "stock", '{"max_abs": 0.0}', datetime(2026, 1, 1, tzinfo=UTC))
    second = ExportRecord("out/b", "native", "{}", datetime(2026, 1, 2, tzinfo=UTC))
    for record in (second, replace(first, checks="old"), first):
        store.add_export("alpha:0", record)
    assert store.individual("alpha:0").exports == (first, second)
    assert store.individual("alpha:1").exports == ()
    with pytest.raises(StoreError, match="alpha:5"):
        store.add_export("alpha:5", first)
    assert store.calibration("f") is None
    for fingerprint, content in (("f", b"first"), ("f", b"second"), ("g", b"")):
        store.add_calibration(fingerprint, content)
    assert (store.calibration("f"), store.calibration("g")) == (b"first", b"")


def test_a_shrink_is_stored_by_its_last_state(store: Store) -> None:
    first = StoredShrink("small", (), "{}", datetime(2026, 1, 2, tzinfo=UTC))
    last = StoredShrink("small", ("small-4", "small-2"), '{"a": 1}', datetime(2026, 1, 3, tzinfo=UTC))
    other = StoredShrink("other", (), "{}", datetime(2026, 1, 4, tzinfo=UTC))
    for each in (first, last, other):
        store.record_shrink(each)
        store.record_shrink(each)
    assert store.shrinks() == [other, last]
