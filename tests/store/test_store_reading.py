"""Stores that are opened to be read: nothing is written or left behind, whoever is at work, wherever the file is."""

from __future__ import annotations

import inspect
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select, text
from store_samples import ENGINE, MODEL, decided, digest, evaluation, individual, search, split

from moevolve.store.errors import StoreError
from moevolve.store.reader import StoreReader
from moevolve.store.records import FULL_MODEL, UNBOUND, ExportRecord, Lease, StoredShrink
from moevolve.store.repository import Store
from moevolve.store.tables import METADATA

ARGUMENTS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("searches", "controls", "running", "latest_events", "calibrations", "shrinks"), ()),
    **dict.fromkeys(("individual", "ancestors", "children"), ("alpha:0",)),
    **dict.fromkeys(("best", "full_score", "pareto"), ("rte",)),
    "search": ("alpha",),
    "events": ({"id-alpha": 0},),
    "evaluations": (digest("phenotype", 0), MODEL, ENGINE, [digest("rte", "search")]),
    "costs": (search(created_at=datetime(2026, 1, 1, tzinfo=UTC)),),
    "calibration": ("k" * 64,),
}
"""Of a reader's methods that ask for something else than the id of a search."""
BETA = Lease("id-beta", "driver", 1)
WRITES: dict[str, Callable[[Store], Any]] = {
    "create_search": lambda store: store.create_search(search("gamma"), []),
    "amend_search": lambda store: store.amend_search("id-alpha", "{}", []),
    "set_status": lambda store: store.set_status("id-alpha", "finished"),
    "acquire": lambda store: store.acquire(BETA.search_id, BETA.owner, 60),
    "renew": lambda store: store.renew(BETA, 60, stage="searching"),
    "note": lambda store: store.note("id-beta", "asked", "to run, by somebody"),
    "ask": lambda store: store.ask("id-beta", workers=3),
    "release": lambda store: store.release(BETA),
    "record": lambda store: store.record("id-alpha", [individual(1)]),
    "add_evaluations": lambda store: store.add_evaluations([evaluation(1, 0.5)]),
    "retry": lambda store: store.retry("id-alpha", 1),
    "add_calibration": lambda store: store.add_calibration("c" * 64, b"content"),
    "record_shrink": lambda store: store.record_shrink(StoredShrink("other", (), "{}")),
    "add_export": lambda store: store.add_export("alpha:0", ExportRecord("here", "stock")),
}
"""Each method that a store has beside, but those that begin transactions and make files smaller; one after another."""


def fill(store: Store) -> None:
    store.create_search(search(), [split()], '{"experts": 8}')
    full = evaluation(0, 0.5, phenotype_hash=FULL_MODEL)
    store.record("id-alpha", [decided(0, 0.5)], [evaluation(0, 0.5), full])
    store.create_search(search("beta", model_fingerprint=f"{UNBOUND}shapes"), [])
    store.add_calibration("k" * 64, b"known")
    store.record_shrink(StoredShrink("small", ("alpha",), "{}"))


def filled_file(path: Path) -> str:
    with Store.open(f"sqlite:///{path}") as store:
        fill(store)
    return f"sqlite:///{path}"


@pytest.fixture
def filled(store: Store) -> str:
    """URL of a store that nobody has open."""
    fill(store)
    store.close()
    return store.url


def methods(kind: type[StoreReader]) -> set[str]:
    return {name for name, _ in inspect.getmembers(kind, inspect.isroutine) if not name.startswith("_")}


def rows(store: StoreReader) -> list[list[str]]:
    """All that is in a store."""
    with store.transaction() as connection:
        return [sorted(map(repr, connection.execute(select(table)))) for table in METADATA.sorted_tables]


def read(store: StoreReader) -> dict[str, Any]:
    """The answers of each method of a reader but those that open, close and begin transactions."""
    names = methods(StoreReader) - {"open", "close", "transaction"}
    return {name: getattr(store, name)(*ARGUMENTS.get(name, ("id-alpha",))) for name in names}


def test_a_reader_has_the_methods_that_read_and_a_store_those_that_write_beside(filled: str) -> None:
    """What a method is, the database tells: those of a reader change no row where they could, each other does."""
    assert methods(Store) - methods(StoreReader) == {*WRITES, "write_transaction", "vacuum"}
    with Store.open(filled) as store:
        before, answers = rows(store), read(store)
        assert rows(store) == before
    with StoreReader.open(filled) as reader:
        assert read(reader) == answers
    assert {name for name, answer in answers.items() if not answer} == {"children", "hours", "running"}
    with Store.open(filled) as store:
        for name, write in WRITES.items():
            before = rows(store)
            write(store)
            assert rows(store) != before, name


def test_a_reader_writes_nothing_and_sees_what_is_written(filled: str) -> None:
    """It began when nobody wrote; a driver comes, writes, goes, and another one comes."""
    with StoreReader.open(filled) as reader:
        assert reader.individual("alpha:0").individual.fitness == 0.5
        # The database itself refuses, too.
        statement = text("UPDATE searches SET status = 'failed'")
        with pytest.raises(StoreError, match=r"read-?only"), reader.transaction() as connection:
            connection.execute(statement)
        assert reader.search("alpha").status == "created"
        for number in (1, 2):
            with Store.open(filled) as writer:
                assert len(writer.history("id-alpha")) == number
                writer.record("id-alpha", [individual(number)])
                assert len(reader.history("id-alpha")) == number + 1
            assert len(reader.history("id-alpha")) == number + 1


def test_a_reader_leaves_nothing_beside_the_file(tmp_path: Path) -> None:
    url = filled_file(tmp_path / "store.db")
    state = (tmp_path / "store.db").stat()
    with StoreReader.open(url) as store:
        assert len(store.history("id-alpha")) == 1
    with pytest.raises(StoreError, match="no store at"):
        StoreReader.open(f"sqlite:///{tmp_path / 'none.db'}")
    assert [one.name for one in tmp_path.iterdir()] == ["store.db"]
    assert (tmp_path / "store.db").stat().st_mtime_ns == state.st_mtime_ns


def test_readers_and_a_driver_at_once(filled: str) -> None:
    stop = threading.Event()

    def read() -> int:
        seen = 0
        while not stop.is_set():
            with StoreReader.open(filled) as store:
                rows = store.history("id-alpha")
                assert [row.index for row in rows] == list(range(len(rows))) and len(rows) >= seen
                seen = len(rows)
        return seen

    with ThreadPoolExecutor(1) as threads:
        reader = threads.submit(read)
        for number in range(1, 16):
            # Opened anew each time: readers meet a store that nobody has open, and one that somebody has.
            with Store.open(filled) as store:
                store.record("id-alpha", [individual(number)])
        stop.set()
        assert reader.result(60) > 1


@contextmanager
def nobody(folder: Path) -> Iterator[None]:
    """As a user who may read the folder and change nothing; root may write anywhere."""
    folder.chmod(0o555)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        if user == 0:
            os.seteuid(0)
        folder.chmod(0o755)


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that other users can reach."""
    folder = Path(tempfile.mkdtemp(prefix="moevolve-read-"))
    yield folder
    shutil.rmtree(folder)


def test_a_store_in_a_folder_that_can_only_be_read_is_refused(shared: Path) -> None:
    url = filled_file(shared / "store.db")
    with nobody(shared):
        for name in ("store.db", "new.db"):
            for open_store in (Store.open, StoreReader.open):
                with pytest.raises(StoreError, match=r"needs permission to write .*; copy it|no store at .*new\.db"):
                    open_store(f"sqlite:///{shared / name}")
    assert [one.name for one in shared.iterdir()] == ["store.db"]
    with StoreReader.open(url) as store:
        assert len(store.history("id-alpha")) == 1
