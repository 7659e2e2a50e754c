"""Deleting searches and what nobody needs, on every backend."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import text
from store_samples import ENGINE, MODEL, decided, digest, evaluation, gone_owner, individual, search, split
from waiting import PATIENT_S

from moevolve.store.errors import LeaseHeldError, LeaseLostError, StoreError
from moevolve.store.records import FULL_MODEL, EvaluationRecord, ExportRecord, SearchRecord
from moevolve.store.repository import Store
from moevolve.store.upkeep.prune import PruneReport, prune


def of_all(*letters: str) -> Callable[[SearchRecord], list[str]]:
    """Every search starts from these calibrations."""
    return lambda _: [letter * 64 for letter in letters]


both = of_all("a", "b")


@pytest.fixture
def two(store: Store) -> Store:
    """Two searches of one model: phenotypes 0 to 3 and 2 to 5; and what an earlier one left: phenotype 9."""
    for name, span in (("alpha", range(4)), ("beta", range(2, 6))):
        store.create_search(search(name), [split()])
        rows = [decided(individual(place, [place - 1] if place else [], p), p / 10) for place, p in enumerate(span)]
        store.record(f"id-{name}", rows, [evaluation(p, p / 10, outcomes=bytes(8)) for p in span])
        store.add_export(f"{name}:1", ExportRecord(name, "stock"))
    store.add_evaluations([evaluation(9, 0.9, outcomes=bytes(100)), evaluation(0, 0.1, phenotype_hash=FULL_MODEL)])
    for letter in "ab":
        store.add_calibration(letter * 64, bytes(1000))
    return store


def phenotypes(store: Store) -> set[str]:
    with store.transaction() as connection:
        return set(connection.execute(text("SELECT phenotype_hash FROM evaluations")).scalars())


def of(*numbers: int) -> set[str]:
    return {digest("phenotype", number) for number in numbers}


def test_a_search_goes_with_what_is_its_own(two: Store) -> None:
    genomes = sum(len(row.genome) for row in two.history("id-alpha"))
    expected = PruneReport(1, 4, 3, 1, genomes + 2 * 8 + 100 + 1000)
    before = two.searches(), phenotypes(two), two.calibrations()
    assert prune(two, ["alpha"], of_all("b"), dry_run=True) == expected
    assert (two.searches(), phenotypes(two), two.calibrations()) == before
    assert prune(two, ["alpha", "id-alpha"], of_all("b")) == replace(expected, vacuumed=two.is_file)
    assert [row.search.name for row in two.searches()] == ["beta"]
    assert phenotypes(two) == of(2, 3, 4, 5) | {FULL_MODEL}
    assert two.calibrations() == ["b" * 64] and two.individual("beta:1").exports
    assert prune(two, [], both) == PruneReport(0, 0, 0, 0, 0)
    assert two.best("rte", by="search")[0].ref == "beta:3"
    # Its name is free again.
    two.create_search(search(), [split()])


def test_unknown_names_prune_nothing_and_the_last_search_leaves_nothing(two: Store) -> None:
    with pytest.raises(StoreError, match="no search 'alpa': did you mean alpha"):
        prune(two, ["beta", "alpa"], both)
    assert len(two.searches()) == 2
    found = prune(two, ["alpha", "beta"], of_all("a"))
    assert (found.searches, found.individuals, found.evaluations, found.calibrations) == (2, 8, 8, 2)
    with two.transaction() as connection:
        for table in (
            *("individuals", "parents", "leases", "events"),
            *("search_tasks", "exports", "evaluation_contexts"),
        ):
            assert connection.execute(text(f"SELECT count(*) FROM {table}")).scalar() == 0


def test_what_is_run_is_not_pruned_nor_what_another_model_needs(two: Store) -> None:
    other = "n" * 64
    two.create_search(search("gamma", model_fingerprint=other), [split()])
    two.add_evaluations([evaluation(p, 0.5, model_fingerprint=other) for p in (0, 1)])
    two.record("id-gamma", [decided(individual(0), 0.5)])
    lease = two.acquire("id-alpha", "driver", 60)
    before = phenotypes(two)
    with pytest.raises(LeaseHeldError, match="alpha is being run by driver: stop it first"):
        prune(two, ["beta", "alpha"], both)
    assert len(two.searches()) == 3 and phenotypes(two) == before
    # Another one may go; evaluations of the same model stay, for the driver may be about to use them. Of another
    # model goes what no search of it needs.
    assert prune(two, ["beta"], both).evaluations == 1
    assert phenotypes(two) == before
    two.release(lease)
    assert prune(two, [], both).evaluations == 3
    with two.transaction() as connection:
        query = "SELECT e.phenotype_hash FROM evaluations e JOIN evaluation_contexts c ON c.id = e.context_id "
        left = connection.execute(text(f"{query} WHERE c.model_fingerprint = '{other}'")).scalars()
        assert set(left) == of(0)
    two.acquire("id-alpha", gone_owner(), 60)
    assert prune(two, ["alpha"], both).searches == 1


def test_no_search_begins_while_it_is_pruned(two: Store) -> None:
    """A driver that starts meanwhile would take evaluations for known that are then gone."""
    two.create_search(search("gamma"), [split()])
    reached, go_on = threading.Event(), threading.Event()

    def needed(_: SearchRecord) -> list[str]:
        reached.set()
        assert go_on.wait(PATIENT_S)
        return []

    def start(store: Store) -> list[EvaluationRecord]:
        store.acquire("id-gamma", "driver", 60)
        return store.evaluations(digest("phenotype", 9), MODEL, ENGINE, [digest("rte", "search")])

    def add(store: Store) -> None:
        store.create_search(search("delta"), [split()])

    with ThreadPoolExecutor(3) as threads, Store.open(two.url) as one, Store.open(two.url) as another:
        pruned = threads.submit(prune, two, ["alpha"], needed)
        assert reached.wait(PATIENT_S)
        waiting = [threads.submit(start, one), threads.submit(add, another)]
        time.sleep(0.2)
        assert not any(each.done() for each in waiting)
        go_on.set()
        assert pruned.result(30).evaluations == 3
        assert [each.result(30) for each in waiting] == [[], None]


def test_a_driver_that_slept_past_its_lease_has_lost_its_search(two: Store) -> None:
    """It may hold evaluations for known that are gone."""
    late = two.acquire("id-alpha", "driver", 0)
    assert prune(two, ["beta"], both, dry_run=True).evaluations == 3
    two.renew(late, 0)
    assert prune(two, ["beta"], both).evaluations == 3
    with pytest.raises(LeaseLostError, match="lost search alpha to another one"):
        two.renew(late, 60)


def test_a_file_shrinks(tmp_path: Path) -> None:
    with Store.open(f"sqlite:///{tmp_path / 'store.db'}") as store:
        store.add_calibration("d" * 64, bytes(2**20))
        with store.transaction() as connection:
            before = connection.execute(text("PRAGMA page_count")).scalar_one()
        assert prune(store, [], both).vacuumed
        with store.transaction() as connection:
            assert connection.execute(text("PRAGMA page_count")).scalar_one() < before - 200
