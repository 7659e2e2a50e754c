"""What betrays a damaged store, on every backend."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Sequence
from pathlib import Path

import pytest
from sqlalchemy import text
from store_samples import decided, digest, evaluation, individual, search, split

from moevolve.store.reader import StoreReader
from moevolve.store.records import ExportRecord, SearchRecord
from moevolve.store.repository import Store
from moevolve.store.upkeep import check as checking
from moevolve.store.upkeep import pages as paging
from moevolve.store.upkeep.check import Checked, Reader, check

COUNT = 140
"""More than are read at once here."""


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paging, "CHUNK", 60)


def reader(content: bytes) -> tuple[str, float]:
    """Of the samples' genomes: `genome INDEX` and two bytes."""
    return digest("content", int(content[:-2].split()[1])), 0.0


def looked_through(store: StoreReader, read: Reader | None = reader) -> Checked:
    def reader_of(_: SearchRecord) -> Reader | None:
        return read

    return check(store, reader_of)


@pytest.fixture
def sound(store: Store) -> Store:
    """A search on two tasks with failed, pending and repeated individuals, and one without tasks."""
    store.create_search(search(), [split("rte"), split("copa", weight=3.0), split("rte", "dev"), split("x", weight=0)])
    rows, found = [], []
    for index in range(COUNT):
        parents = [] if index == 0 else [index - 1, index // 2]
        if index % 10 == 3:
            rows.append(decided(individual(index, parents), None))
            found.append(evaluation(index, None))
        elif index < COUNT - 2:
            phenotype = index - 1 if index % 50 == 2 else index
            first, second = (phenotype % 7) / 7, (phenotype % 5) / 5
            rows.append(decided(individual(index, parents, phenotype), (first + 3 * second) / 4))
            found += [evaluation(phenotype, first), evaluation(phenotype, second, "copa")]
        else:
            rows.append(individual(index, parents))
    store.record("id-alpha", rows, found)
    store.add_export("alpha:0", ExportRecord("here", "stock"))
    store.add_calibration("c" * 64, b"content")
    store.create_search(search("imported"), [])
    store.record("id-imported", [individual(0)])
    return store


def test_a_sound_store_has_no_problems(sound: Store) -> None:
    found = looked_through(sound)
    assert (found.problems, found.found, found.unread) == ((), 0, ())
    assert (found.searches, found.individuals, found.calibrations) == (2, COUNT + 1, 1)
    assert found.evaluations == sum(row.failed + 2 * row.evaluated for row in sound.searches()) - 2 * 3
    assert found.bytes > 50_000
    assert looked_through(sound, None).unread == ("alpha", "imported")


def test_an_empty_store_has_none_either(store: Store) -> None:
    assert looked_through(store).problems == ()


DAMAGES = {
    "UPDATE individuals SET fitness = 0.99 WHERE idx = 121 AND search_id = 'id-alpha'": [
        r"alpha:121: its fitness is 0\.99, its scores make 0\.22"
    ],
    "UPDATE individuals SET genome = (SELECT genome FROM individuals WHERE idx = 7) WHERE idx = 8": [
        "alpha:8: its genome is not the one that its content hash is of"
    ],
    "UPDATE parents SET parent_idx = 132 WHERE child_idx = 132 AND position = 1": [
        "alpha:132: its parent 132 is not earlier"
    ],
    "DELETE FROM parents WHERE child_idx = 132 AND position = 0": ["alpha:132: a parent is missing"],
    "DELETE FROM evaluations WHERE context_id IN (SELECT id FROM evaluation_contexts WHERE task = 'copa')": [
        "alpha:0: it has a fitness, and no score on copa"
    ],
    "UPDATE individuals SET status = 'pending' WHERE idx = 11": ["alpha:11: it is pending, and has a fitness"],
    "DELETE FROM leases WHERE search_id = 'id-imported'": ["imported: it has no row in leases"],
}


@pytest.mark.parametrize(("damage", "said"), DAMAGES.items(), ids=range(len(DAMAGES)))
def test_damage_is_named(damage: str, said: Sequence[str], sound: Store) -> None:
    with sound.write_transaction() as connection:
        connection.execute(text(damage))
    found = looked_through(sound)
    assert found.found == len(found.problems) >= len(said)
    for line in said:
        assert any(re.search(line, problem) for problem in found.problems), found.problems


def test_a_gap_is_named(sound: Store) -> None:
    with sound.write_transaction() as connection:
        for table, column in (("parents", "child_idx"), ("parents", "parent_idx"), ("individuals", "idx")):
            connection.execute(text(f"DELETE FROM {table} WHERE {column} BETWEEN 100 AND 101"))
    assert "alpha: individuals 100 to 101 are missing" in looked_through(sound).problems


def test_without_its_model_a_fitness_can_only_be_too_large(sound: Store) -> None:
    """What a search takes off a score is then not known."""
    for value, problems in ((0.0, 0), (0.99, 1)):
        with sound.write_transaction() as connection:
            connection.execute(text(f"UPDATE individuals SET fitness = {value} WHERE idx = 121"))
        assert looked_through(sound, None).found == problems


def test_penalties_are_known_with_it(store: Store) -> None:
    store.create_search(search(), [split()])
    store.record("id-alpha", [decided(0, 0.4), decided(1, 0.4)], [evaluation(0, 0.5), evaluation(1, 0.6)])
    found = looked_through(store, lambda content: (reader(content)[0], 0.1))
    assert found.problems == ("alpha:1: its fitness is 0.4, its scores make 0.5",)


def test_a_genome_that_cannot_be_read_is_named(store: Store) -> None:
    store.create_search(search(), [])
    store.record("id-alpha", [individual(0, genome=b"scrambled")])
    (problem,) = looked_through(store).problems
    assert problem.startswith("alpha:0: its genome can't be read: ")


def test_rows_without_what_they_belong_to_are_counted(tmp_path: Path) -> None:
    with Store.open(f"sqlite:///{tmp_path / 'store.db'}") as store:
        store.create_search(search(), [split()])
        store.record("id-alpha", [individual(0), individual(1, [0])], [evaluation(0, 0.5)])
        plain = sqlite3.connect(tmp_path / "store.db")
        plain.execute("DELETE FROM individuals WHERE idx = 0")
        plain.execute("DELETE FROM evaluation_contexts")
        plain.commit()
        plain.close()
        problems = looked_through(store).problems
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
        found = looked_through(damaged)
    assert any("SQLite: " in problem or "malformed" in problem for problem in found.problems)


def test_so_many_problems_are_counted_and_not_all_listed(sound: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "LISTED", 10)
    with sound.write_transaction() as connection:
        connection.execute(text("UPDATE individuals SET content_hash = 'x' WHERE search_id = 'id-alpha'"))
    found = looked_through(sound)
    assert (len(found.problems), found.found) == (10, COUNT)
