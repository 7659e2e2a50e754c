"""Searches taken from one store to another, between all backends."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from sqlalchemy import text
from store_samples import decided, evaluation, individual, search, split

from moevolve.store.errors import LeaseHeldError, StoreError
from moevolve.store.reader import StoreReader
from moevolve.store.records import FULL_MODEL, ExportRecord
from moevolve.store.repository import Store
from moevolve.store.upkeep import copy as copying
from moevolve.store.upkeep.copy import CopyReport, copy

COUNT = 60
"""More than are read at once here."""


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "CHUNK", 25)


def needed(_: object) -> list[str]:
    return ["c" * 64]


@pytest.fixture
def there(tmp_path: Path) -> Iterator[Store]:
    """Another store; of SQLite, whatever the first one is."""
    with Store.open(f"sqlite:///{tmp_path / 'there.db'}") as opened:
        yield opened


def fill(store: Store, count: int = COUNT) -> None:
    tasks = [split("rte"), split("copa", weight=0.5), split("x", "test", weight=0)]
    store.create_search(search(created_at=datetime(2026, 1, 2, tzinfo=UTC)), tasks)
    rows = [decided(individual(i, [i - 1, i // 2] if i else []), (i % 7) / 7, -1 - i / 3) for i in range(count - 2)]
    rows += [individual(i, [0]) for i in (count - 2, count - 1)]
    store.record(
        "id-alpha", rows, [evaluation(i, (i % 7) / 7, outcomes=bytes([i % 256, 0, 0, 0])) for i in range(count - 2)]
    )
    extra = [evaluation(5, 0.3, "y", "test"), evaluation(6, None, "y", "test")]
    store.add_evaluations([*extra, evaluation(0, 0.9, phenotype_hash=FULL_MODEL)])
    store.add_export("alpha:3", ExportRecord("here", "stock", '{"max": 1}'))
    store.add_calibration("c" * 64, b"content")
    store.add_calibration("d" * 64, b"of another search")
    store.set_status("id-alpha", "finished", "a reason")


def contents(store: StoreReader) -> object:
    """All that is said of the search `alpha`, as readers get it."""
    alpha = store.search("alpha")
    hashes = [row.phenotype_hash for row in store.history(alpha.id)]
    prints = sorted({task.task_fingerprint for task in store.search_tasks(alpha.id, auxiliary=True)})
    return (
        alpha,
        store.search_tasks(alpha.id, auxiliary=True),
        store.history(alpha.id),
        store.evaluations([*hashes, FULL_MODEL], alpha.model_fingerprint, alpha.engine_fingerprint, prints),
        [store.individual(f"alpha:{index}") for index in (0, 3, 5, 6)],
        store.best("rte", by="search", limit=50),
        store.best_of_search(alpha.id, 30),
        store.pareto("rte"),
        store.costs(alpha),
        store.calibration("c" * 64),
    )


def test_a_copy_is_the_same_and_back_again(store: Store, there: Store, tmp_path: Path) -> None:
    fill(there)
    store.add_evaluations([evaluation(77, 0.5, "z")])  # so that contexts have other ids there
    with pytest.raises(StoreError, match="no search 'beta'"):
        copy(there, store, ["alpha", "beta"], needed)
    assert store.searches() == []
    expected = CopyReport(("alpha",), COUNT, 0, COUNT - 2 + 3, 1, 1)
    with StoreReader.open(there.url) as reader:
        assert copy(reader, store, ["alpha"], needed) == expected
    assert contents(store) == contents(there)
    assert store.calibrations() == ["c" * 64]
    before = contents(store)
    assert copy(there, store, ["id-alpha", "alpha"], needed).individuals == 0
    assert contents(store) == before
    with Store.open(f"sqlite:///{tmp_path / 'back.db'}") as back:
        assert copy(store, back, ["alpha"], needed) == expected
        assert contents(back) == before
    # It can be driven there.
    lease = store.acquire("id-alpha", "driver", 60)
    store.record(lease, [individual(COUNT, [0])])


def test_a_copy_is_brought_up_to_date(store: Store, there: Store) -> None:
    fill(store)
    copy(store, there, ["alpha"], needed)
    later = [decided(individual(COUNT - 2, [0]), 0.5), individual(COUNT, [1])]
    store.record("id-alpha", later, [evaluation(COUNT - 2, 0.5)])
    assert copy(store, there, ["alpha"], needed) == CopyReport(("alpha",), 1, 1, 1, 0, 0)
    assert contents(there) == contents(store)
    # The other way round there is nothing new, and what is decided stays so.
    there.record("id-alpha", [decided(individual(COUNT - 1, [0]), 0.25)], [evaluation(COUNT - 1, 0.25)])
    before = contents(there)
    assert copy(store, there, ["alpha"], needed).decided == 0
    assert contents(there) == before


def test_a_running_search_is_copied_as_it_stands(store: Store, there: Store) -> None:
    fill(store, 10)
    lease = store.acquire("id-alpha", "driver", 60)
    store.set_status(lease, "running")
    copy(store, there, ["alpha"], needed)
    found = there.search("alpha")
    assert (found.status, found.status_reason) == ("interrupted", "copied while it was run")
    assert not there.control("id-alpha").alive and there.acquire("id-alpha", "another", 60).epoch == 1
    with pytest.raises(LeaseHeldError, match="alpha is being run by another"):
        copy(store, there, ["alpha"], needed)


CLASHES = {
    "UPDATE individuals SET content_hash = 'x' WHERE idx = 50": "individual 50 .* already recorded with another genome",
    "UPDATE individuals SET fitness = 0.75 WHERE idx = 50": "individual 50 .* already is ok with fitness 0.75",
    "UPDATE evaluation_contexts SET metric = 'f1'": "task fingerprint .* by f1, not",
    "UPDATE searches SET config_hash = 'other'": "another search alpha",
    "UPDATE searches SET id = 'id-other'": "another search alpha",
}


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Store, Path]]:
    """A store with a search more than a copy that was made of it."""
    folder = tmp_path_factory.mktemp("copied")
    with Store.open(f"sqlite:///{folder / 'here.db'}") as here:
        fill(here)
        with Store.open(f"sqlite:///{folder / 'there.db'}") as there:
            copy(here, there, ["alpha"], needed)
        here.create_search(search("beta"), [])
        yield here, folder / "there.db"


@pytest.mark.parametrize(("change", "said"), CLASHES.items(), ids=range(len(CLASHES)))
def test_what_differs_is_refused(change: str, said: str, copied: tuple[Store, Path], tmp_path: Path) -> None:
    here, made = copied
    shutil.copy(made, tmp_path / "there.db")
    with Store.open(f"sqlite:///{tmp_path / 'there.db'}") as there:
        with there.write_transaction() as connection:
            connection.exec_driver_sql("PRAGMA defer_foreign_keys=ON")
            connection.execute(text(change))
            if "id-other" in change:
                for table in ("individuals", "parents", "exports", "leases", "events", "search_tasks"):
                    connection.execute(text(f"UPDATE {table} SET search_id = 'id-other'"))
        with pytest.raises(StoreError, match=said):
            copy(here, there, ["beta", "alpha"], needed)
        assert [row.search.name for row in there.searches()] == ["alpha"], "all or nothing"
