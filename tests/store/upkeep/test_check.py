"""What betrays a damaged store, on every backend."""

from __future__ import annotations

import re
import sqlite3
from pathlib import Path

import pytest
from sqlalchemy import text
from store_samples import decided, evaluation, individual, search, split

from moevolve.store.errors import DamagedError
from moevolve.store.reader import StoreReader
from moevolve.store.records import StoredShrink
from moevolve.store.repository import Store
from moevolve.store.upkeep.check import check


def fill(store: Store) -> None:
    """A search with failed, pending and decided individuals, and one of a single individual."""
    store.create_search(search(), [split("rte"), split("rte", "dev")])
    rows = [decided(individual(index, [index - 1] if index else []), 0.5) for index in range(8)]
    rows += [decided(individual(8, [2, 3]), None), individual(9, [8, 0])]
    store.record("id-alpha", rows, [evaluation(0, 0.5), evaluation(8, None)])
    store.add_calibration("c" * 64, b"content")
    store.create_search(search("imported"), [])
    store.record("id-imported", [individual(0)])


def test_a_sound_store_has_no_problems_and_gaps_and_missing_leases_are_named(store: Store) -> None:
    assert check(store).problems == ()
    fill(store)
    found = check(store)
    assert found.problems == ()
    assert (found.searches, found.individuals, found.evaluations, found.calibrations) == (2, 11, 2, 1)
    assert found.bytes > 50_000
    with store.write_transaction() as connection:
        for table, column in (("parents", "child_idx"), ("parents", "parent_idx"), ("individuals", "idx")):
            connection.execute(text(f"DELETE FROM {table} WHERE {column} BETWEEN 4 AND 5"))
        connection.execute(text("DELETE FROM events WHERE search_id = 'id-imported'"))
        connection.execute(text("DELETE FROM leases WHERE search_id = 'id-imported'"))
        connection.execute(text("UPDATE searches SET winner = 4 WHERE name = 'alpha'"))
    assert check(store).problems == (
        "alpha: 2 of its first 10 individuals are missing",
        "imported: it has no row in leases",
        "alpha: its winner isn't among its individuals",
    )


def test_genomes_with_other_bytes_than_were_recorded_are_named(store: Store) -> None:
    fill(store)
    with store.write_transaction() as connection:
        bytes_of = "SELECT genome FROM individuals WHERE search_id = 'id-alpha' AND idx = "
        flipped = connection.execute(text(f"{bytes_of}3")).scalar_one()[:-1] + b"\xfe"
        change = "UPDATE individuals SET genome = :genome WHERE search_id = 'id-alpha' AND idx = :idx"
        other = connection.execute(text(f"{bytes_of}4")).scalar_one()
        for index, genome in ((3, flipped), (5, other)):
            connection.execute(text(change), {"genome": genome, "idx": index})
    assert check(store).problems == tuple(
        f"alpha:{index}: its genome isn't the one that was recorded" for index in (3, 5)
    )


def test_values_that_cannot_be_parsed_are_counted(store: Store) -> None:
    fill(store)
    store.record_shrink(StoredShrink("small", ("alpha",), "{}"))
    assert check(store).problems == ()
    changes = {
        "searches SET config = '{' WHERE name = 'imported'": "searches.config: 1 values .* that of imported",
        "searches SET model_facts = 'x'": "searches.model_facts: 2 values can't be read, the first that of alpha",
        "leases SET progress = '' WHERE search_id = 'id-imported'": "leases.progress: 1 values .* that of imported",
        "shrinks SET content = '[1,'": "shrinks.content: 1 values .* that of small",
    }
    if store.is_file:
        dates = "created_at = 'yesterday' WHERE search_id = 'id-alpha' AND idx > 4"
        changes[f"individuals SET {dates}"] = "individuals.created_at: 5 values .* that of alpha:5"
    with store.write_transaction() as connection:
        for change in changes:
            connection.execute(text(f"UPDATE {change}"))
    problems = check(store).problems
    assert len(problems) == len(changes)
    for said in changes.values():
        assert any(re.fullmatch(said, problem) for problem in problems), (said, problems)
    if store.is_file:
        with pytest.raises(DamagedError, match="the created_at 'yesterday' can't be read"):
            store.history("id-alpha")


WRONG = {
    "searches SET name = x'ff' WHERE name = 'alpha'": "searches.name: 1 .*",
    "searches SET status = 'bogus'": "searches.status: 2 values can't be read, the first that of alpha",
    "individuals SET fitness = 9e999 WHERE status = 'ok' AND idx < 3": "individuals.fitness: 3 .* that of alpha:0",
    "individuals SET parameters_full = 0 WHERE idx = 4": "individuals.parameters_full: 1 .* that of alpha:4",
    "individuals SET summary = x'ff' WHERE idx = 2": "individuals.summary: 1 .* that of alpha:2",
    "individuals SET depth = 'deep' WHERE idx = 9": "individuals.depth: 1 .* that of alpha:9",
    "individuals SET stock = 2 WHERE idx = 9": "individuals.stock: 1 .* that of alpha:9",
    "evaluations SET outcomes = x'0000c07f' WHERE score > 0": "evaluations.outcomes: 1 .*",
}


@pytest.mark.parametrize("change", WRONG)
def test_values_that_a_column_cannot_have_are_named_and_refused(tmp_path: Path, change: str) -> None:
    with Store.open(f"sqlite:///{tmp_path / 'store.db'}") as store:
        fill(store)
        with store.write_transaction() as connection:
            connection.execute(text(f"UPDATE {change}"))
        (problem,) = check(store).problems
        assert re.fullmatch(WRONG[change], problem), problem
        with pytest.raises(DamagedError, match="`moevolve db check` names what is damaged"):
            _ = store.searches(), store.individual("alpha:0"), store.history("id-alpha")


def test_an_error_of_the_caller_within_a_transaction_stays_what_it_is(store: Store) -> None:
    with pytest.raises(ValueError, match="of the caller"), store.transaction():
        raise ValueError("of the caller")


def test_rows_without_what_they_belong_to_are_counted(tmp_path: Path) -> None:
    with Store.open(f"sqlite:///{tmp_path / 'store.db'}") as store:
        store.create_search(search(), [split()])
        store.record("id-alpha", [individual(0), individual(1, [0])], [evaluation(0, 0.5)])
        plain = sqlite3.connect(tmp_path / "store.db")
        plain.execute("DELETE FROM individuals WHERE idx = 0")
        plain.execute("DELETE FROM evaluation_contexts")
        plain.commit()
        plain.close()
        problems = check(store).problems
    assert "parents: 1 rows belong to individuals that aren't there" in problems
    assert "evaluations: 1 rows belong to evaluation_contexts that aren't there" in problems


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    with Store.open(f"sqlite:///{path}") as store:
        store.create_search(search(), [split()])
        store.record("id-alpha", [individual(index, genome=bytes(900)) for index in range(500)])
    content = bytearray(path.read_bytes())
    middle = len(content) // 2 // 4096 * 4096
    content[middle : middle + 4096] = bytes([255]) * 4096
    path.write_bytes(content)
    with StoreReader.open(f"sqlite:///{path}") as damaged:
        found = check(damaged)
    assert any("SQLite: " in problem or "malformed" in problem for problem in found.problems)
