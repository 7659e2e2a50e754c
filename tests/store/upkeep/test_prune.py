"""Deleting searches and what nobody needs, on every backend."""

from __future__ import annotations

from dataclasses import replace

import pytest
from sqlalchemy import text
from store_samples import decided, digest, evaluation, individual, search, split

from moevolve.store.errors import LeaseHeldError, StoreError
from moevolve.store.records import FULL_MODEL, ExportRecord
from moevolve.store.repository import Store
from moevolve.store.upkeep.prune import Pruned, prune


def alive(_: str) -> bool:
    return False


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
    expected = Pruned(1, 4, 3, 1, genomes + 2 * 8 + 100 + 1000)
    before = two.searches(), phenotypes(two), two.calibrations()
    assert prune(two, ["alpha"], ["a" * 64], alive, dry_run=True) == expected
    assert (two.searches(), phenotypes(two), two.calibrations()) == before
    assert prune(two, ["alpha", "id-alpha"], ["a" * 64], alive) == replace(expected, vacuumed=two.is_file)
    assert [row.search.name for row in two.searches()] == ["beta"]
    assert phenotypes(two) == of(2, 3, 4, 5) | {FULL_MODEL}
    assert two.calibrations() == ["b" * 64] and two.individual("beta:1").exports
    assert prune(two, [], [], alive) == Pruned(0, 0, 0, 0, 0)
    assert two.best("rte", by="search")[0].ref == "beta:3"
    # Its name is free again.
    two.create_search(search(), [split()])


def test_what_is_left_over_goes_alone(two: Store) -> None:
    assert prune(two, [], ["b" * 64], alive) == Pruned(0, 0, 1, 1, 1100, two.is_file)
    assert phenotypes(two) == of(0, 1, 2, 3, 4, 5) | {FULL_MODEL}
    assert len(two.searches()) == 2


def test_the_last_search_leaves_nothing(two: Store) -> None:
    found = prune(two, ["alpha", "beta"], ["a" * 64, "b" * 64], alive)
    assert (found.searches, found.individuals, found.evaluations, found.calibrations) == (2, 8, 8, 2)
    with two.transaction() as connection:
        for table in (
            *("individuals", "parents", "leases", "events"),
            *("search_tasks", "exports", "evaluation_contexts"),
        ):
            assert connection.execute(text(f"SELECT count(*) FROM {table}")).scalar() == 0


def test_evaluations_of_another_model_are_not_this_ones(two: Store) -> None:
    other = "n" * 64
    two.create_search(search("gamma", model_fingerprint=other), [split()])
    two.add_evaluations([evaluation(p, 0.5, model_fingerprint=other) for p in (0, 1)])
    two.record("id-gamma", [decided(individual(0), 0.5)])
    assert prune(two, ["alpha"], [], alive).evaluations == 4
    with two.transaction() as connection:
        query = "SELECT e.phenotype_hash FROM evaluations e JOIN evaluation_contexts c ON c.id = e.context_id "
        left = connection.execute(text(f"{query} WHERE c.model_fingerprint = '{other}'")).scalars()
        assert set(left) == of(0)


def test_what_is_run_is_not_pruned(two: Store) -> None:
    lease = two.acquire("id-alpha", "driver", 60)
    before = phenotypes(two)
    with pytest.raises(LeaseHeldError, match="alpha is being run by driver: stop it first"):
        prune(two, ["beta", "alpha"], [], alive)
    assert len(two.searches()) == 2 and phenotypes(two) == before
    # Another one may go; evaluations of the same model stay, for the driver may be about to use them.
    assert prune(two, ["beta"], [], alive).evaluations == 0
    assert phenotypes(two) == before
    two.release(lease)
    assert prune(two, [], [], alive).evaluations == 3
    two.acquire("id-alpha", "driver", 60)
    assert prune(two, ["alpha"], [], lambda _: True).searches == 1


def test_unknown_names_prune_nothing(two: Store) -> None:
    with pytest.raises(StoreError, match="no search 'alpa': did you mean alpha"):
        prune(two, ["beta", "alpa"], [], alive)
    assert len(two.searches()) == 2


def test_a_file_shrinks(two: Store, url: str) -> None:
    if not two.is_file:
        pytest.skip("PostgreSQL gives room back by itself")
    two.add_calibration("d" * 64, bytes(2**20))
    with two.transaction() as connection:
        before = connection.execute(text("PRAGMA page_count")).scalar_one()
    assert prune(two, [], ["d" * 64], alive).vacuumed
    with two.transaction() as connection:
        assert connection.execute(text("PRAGMA page_count")).scalar_one() < before - 200
