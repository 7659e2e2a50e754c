"""Opening: migrations, schema versions, and everything that is not a store."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from killing import forked
from sqlalchemy import Engine, text
from store_samples import gone_owner, individual, search, split
from store_writers import open_once
from waiting import PATIENT_S

from moevolve.store import schema
from moevolve.store.errors import LeaseHeldError, StoreError, UnreachableError
from moevolve.store.reader import StoreReader
from moevolve.store.records import Upgrade
from moevolve.store.repository import Store
from moevolve.store.session import insert_all, make_engine, transaction
from moevolve.store.tables import METADATA, contexts


def test_migrations_end_with_exactly_the_models_that_a_new_store_is_built_from(url: str) -> None:
    engine = make_engine(url, create=True)
    with transaction(engine, write=True) as connection:
        command.upgrade(schema.alembic_config(connection), schema.newest_revision())
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, METADATA) == []
    engine.dispose()
    with Store.open(url) as migrated:
        assert not migrated.is_new


def test_the_migrations_are_one_line_of_the_known_revisions() -> None:
    scripts = ScriptDirectory.from_config(schema.alembic_config())
    assert scripts.get_heads() == [schema.newest_revision()]
    assert [script.revision for script in scripts.walk_revisions()] == list(reversed(schema.REVISIONS))


def test_an_older_store_is_upgraded_only_if_asked(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with Store.open(url) as store:
        store.create_search(search(), [split()])
    newest, before = schema.newest_revision(), contents(url)
    assert schema.upgrade(url) == Upgrade(newest, newest)
    with monkeypatch.context() as patched:
        patched.setattr("alembic.command.upgrade", lambda *_: pytest.fail("ran a migration"))
        with Store.open(url, create=False) as store:
            assert store.search("alpha").name == "alpha" and not store.is_new
    monkeypatch.setattr(schema, "newest_revision", lambda: "moevolve_v99")
    for opened in (Store.open, partial(Store.open, create=False), StoreReader.open):
        with pytest.raises(StoreError, match=rf"schema {newest}, older .* `moevolve db upgrade --store ") as caught:
            opened(url)
        assert re.search(r"--store '?(sqlite|postgresql)://", str(caught.value)) and "\n" not in str(caught.value)
        assert contents(url) == before


def test_no_store_is_upgraded_that_is_used(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with Store.open(url) as store:
        for name in ("alpha", "beta", "gamma"):
            store.create_search(search(name), [split()])
        leases = [store.acquire(f"id-{name}", f"driver of {name}", 60) for name in ("alpha", "beta")]
        store.acquire("id-gamma", gone_owner(), 60)
        monkeypatch.setattr(schema, "newest_revision", lambda: "moevolve_v99")
        ran: list[str] = []
        monkeypatch.setattr("alembic.command.upgrade", lambda _, revision: ran.append(revision))
        with pytest.raises(LeaseHeldError, match=r"\(alpha by driver of alpha, beta by driver of beta\): stop them"):
            schema.upgrade(url)
        assert not ran
        for lease in leases:
            store.release(lease)
        schema.upgrade(url)
        assert ran == ["moevolve_v99"]


def test_an_empty_database_becomes_a_store_only_if_asked(url: str, tmp_path: Path) -> None:
    if url.startswith("sqlite"):
        Path(url.removeprefix("sqlite:///")).touch()
    with pytest.raises(StoreError, match="an empty database"):
        schema.upgrade(url)
    with pytest.raises(StoreError, match="no store at"):
        schema.upgrade(f"sqlite:///{tmp_path / 'none.db'}")
    with pytest.raises(StoreError, match="an empty database, not a store"):
        Store.open(url, create=False)
    with Store.open(url) as store:
        assert store.searches() == []


def test_unknown_revisions_and_other_programs_databases_are_refused_untouched(url: str) -> None:
    def refused(said: str) -> None:
        before = contents(url)
        for create in (True, False):
            with pytest.raises(StoreError, match=said):
                Store.open(url, create)
        assert contents(url) == before

    with Store.open(url) as store, transaction(store._engine, write=True) as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = 'moevolve_9999'"))
    refused(r"schema version moevolve_9999, which this moevolve .* does not know")
    with engine_of(url) as engine, transaction(engine, write=True) as connection:
        connection.execute(text("ALTER TABLE alembic_version RENAME TO aaa_customers"))
    refused(r"not a store of moevolve: it holds other tables \(aaa_customers,")


@contextmanager
def engine_of(url: str) -> Iterator[Engine]:
    engine = make_engine(url, create=True)
    yield engine
    engine.dispose()


def contents(url: str) -> object:
    """The whole SQLite file, or the tables and the revision on PostgreSQL."""
    with engine_of(url) as engine:
        if engine.dialect.name == "sqlite":
            path = Path(str(engine.url.database))
            return hashlib.sha256(path.read_bytes()).hexdigest(), sorted(one.name for one in path.parent.iterdir())
        with transaction(engine) as connection:
            tables = connection.execute(text("SELECT tablename FROM pg_tables WHERE schemaname = 'public' ORDER BY 1"))
            found = [list(tables.scalars())]
            if "alembic_version" in found[0]:
                found.append(list(connection.execute(text("SELECT version_num FROM alembic_version")).scalars()))
    return found


def test_a_missing_file_or_folder_is_named_and_not_made(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"no store at .*gone\.db"):
        Store.open(f"sqlite:///{tmp_path / 'gone.db'}", create=False)
    with pytest.raises(StoreError, match=r"folder .*nowhere of the store x\.db does not exist"):
        Store.open(f"sqlite:///{tmp_path / 'nowhere' / 'x.db'}")
    with pytest.raises(StoreError, match="is a folder"):
        Store.open(f"sqlite:///{tmp_path}")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "notes.txt").write_text("not a database at all, but long enough to have a header" * 20)
    with pytest.raises(StoreError, match="file is not a database"):
        Store.open(f"sqlite:///{tmp_path / 'notes.txt'}")
    assert (tmp_path / "notes.txt").read_text().startswith("not a database")


def test_a_file_is_set_up_for_many_readers_whatever_its_name_and_memory_is_a_store_too(tmp_path: Path) -> None:
    path = tmp_path / "100% größe" / "my store.db"
    path.parent.mkdir()
    with Store.open(f"sqlite:///{path}") as store, transaction(store._engine) as connection:
        asked = ("journal_mode", "synchronous", "foreign_keys", "busy_timeout")
        found = [connection.exec_driver_sql(f"PRAGMA {name}").scalar() for name in asked]
    assert found == ["wal", 1, 1, 60_000] and path.exists()
    with Store.open("sqlite://") as store:
        store.create_search(search(), [split()])
        store.record("id-alpha", [individual(0)])
        assert len(store.history("id-alpha")) == 1
        with ThreadPoolExecutor(1) as other:
            with store.transaction():
                done = other.submit(store.set_status, "id-alpha", "running")
                wait([done], timeout=0.2)
            done.result(PATIENT_S)
        assert store.search("id-alpha").status == "running", "threads wait for each other"


def test_urls_that_lead_nowhere() -> None:
    for url, reason in (
        ("runs.db", "not a database URL; write sqlite:///FILE"),
        ("mysql://me@host/db", "mysql is not supported"),
        ("postgresql+unheard://host/db", "cannot be used"),
        ("postgresql://me:secret@127.0.0.1:1/none", "connection"),
        ("postgresql://127.0.0.1:1/none?user=me&password=secret", "connection"),
        ("postgresql://me:secret@host:port/none", "not a database URL"),
    ):
        with pytest.raises(StoreError, match=reason) as caught:
            Store.open(url)
        assert "\n" not in str(caught.value) and "secret" not in str(caught.value)


def test_many_processes_may_create_one_store(url: str) -> None:
    started = [forked(open_once, url) for _ in range(4)]
    for one in started:
        one.join(PATIENT_S)
    assert [one.exitcode for one in started] == [0, 0, 0, 0]
    with Store.open(url, create=False) as store:
        assert store.searches() == []


@pytest.mark.timeout(60)
def test_a_postgres_transaction_does_not_wait_for_ever_for_its_client(
    empty_postgres: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver that is suspended in the middle of a write holds its search's row no longer than that."""
    with Store.open(empty_postgres) as store, Store.open(empty_postgres) as other:
        store.create_search(search(), [split()])
        monkeypatch.setattr("moevolve.store.session._IDLE_S", 0.3)
        names = [column.name for column in contexts.c if column.name != "id"]
        rows = [dict.fromkeys(names, str(number)) for number in range(3)]

        def late() -> None:
            with store.write_transaction() as connection:
                connection.execute(text("SELECT * FROM leases FOR UPDATE"))
                insert_all(connection, contexts, rows)
                assert other.acquire("id-alpha", "driver", 60).epoch == 1
                connection.execute(text("UPDATE searches SET status = 'failed'"))

        with pytest.raises(UnreachableError):
            late()
        assert store.search("alpha").status == "created"


def test_readers_on_postgres_may_take_their_time(empty_postgres: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moevolve.store.session._IDLE_S", 0.1)
    with Store.open(empty_postgres) as store, store.transaction() as slow:
        for pause in (0.3, 0.0):
            assert slow.execute(text("SELECT 1")).scalar() == 1
            time.sleep(pause)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("postgresql://me:one@two@three@host/db", "postgresql://me:***@host/db: an @ in a user's name or password is "),
        (
            "postgresql+psycopg2://me@host/db",
            "postgresql+psycopg2 needs psycopg2: write postgresql:// instead, for the",
        ),
        ("sqlite:////proc/none/x.db", "folder /proc/none of the store x.db does not exist"),
        ("sqlite:////proc/x.db", "/proc/x.db: SQLite can't make the store: unable to open database file"),
    ],
)
def test_an_address_that_opens_no_store_is_explained(url: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda *_, **__: True)  # as for root
    with pytest.raises(StoreError, match=f"^{re.escape(said)}") as refused:
        make_engine(url, create=True)
    assert not any(part in str(refused.value) for part in ("one", "two", "three")) or "proc" in url


def test_a_path_may_begin_with_several_slashes(tmp_path: Path) -> None:
    for slashes in ("", "/", "//"):
        with Store.open(f"sqlite:///{slashes}{tmp_path / 'store.db'}") as store:
            assert store.searches() == []
