"""SQLite stores that are damaged in one seeded way, as disks, other programs and older versions damage them.

`moevolve db check` names the damage, and a server that has the store open answers every request, and never with 500.
"""

from __future__ import annotations

import re
import shutil
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from numpy.random import Generator, default_rng
from search_lab import UnrulyPool, drive, run_config, start
from shrink_samples import put, stages_of
from starlette.testclient import TestClient
from store_samples import scored, search, split

import moevolve
from moevolve.search.server.app import make_app, make_routes
from moevolve.search.server.settings import ServerSettings
from moevolve.store.errors import StoreError
from moevolve.store.records import ExportRecord
from moevolve.store.repository import Store

JSON = ("searches.config", "searches.model_facts", "exports.checks", "shrinks.content", "leases.progress")
WORDS = ("searches.status", "individuals.status", "leases.desired_state", "events.kind", "evaluation_contexts.split")
FOREIGN = (
    *("search_tasks.search_id", "leases.search_id", "events.search_id", "exports.search_id", "individuals.search_id"),
    *("evaluations.context_id", "parents.parent_idx", "exports.idx", "searches.winner", "parents.search_id"),
)
NUMBERS = ("individuals.fitness", "individuals.tie_break", "evaluations.score", "evaluations.gold_logprob")
DATES: tuple[Any, ...] = ("yesterday", "2024-13-45 00:00:00.000000", "", 5, b"x")
OTHERS: tuple[Any, ...] = (b"\xff\x00", b"7", "many", "", "12x", 1.5)


class Damage:
    """What one seed does to a file."""

    def __init__(self, file: Path, rng: Generator) -> None:
        self.file = file
        self.rng = rng
        self.done: list[str] = []

    def pick(self, items: Sequence[Any]) -> Any:
        return items[int(self.rng.integers(len(items)))]

    @contextmanager
    def opened(self) -> Iterator[sqlite3.Connection]:
        """The file, without any of the constraints that SQLite lets go."""
        with closing(sqlite3.connect(self.file, isolation_level=None)) as connection:
            for pragma in ("foreign_keys=OFF", "ignore_check_constraints=ON", "wal_checkpoint(TRUNCATE)"):
                connection.execute(f"PRAGMA {pragma}")
            yield connection

    def columns(self, *declared: str, filled: bool = False) -> list[str]:
        """The columns of tables with rows, or those whose type contains one of some words, or that must be filled."""
        with self.opened() as connection:
            names = "SELECT name FROM sqlite_schema WHERE type = 'table' AND name NOT GLOB 'sqlite_*'"
            tables = [name for (name,) in connection.execute(f"{names} AND name <> 'alembic_version'")]
            with_rows = [name for name in tables if connection.execute(f"SELECT 1 FROM {name}").fetchone()]
            return [
                f"{table}.{column}"
                for table in with_rows
                for _, column, kind, needed, *_ in connection.execute(f"PRAGMA table_info({table})")
                if (not declared or any(word in kind for word in declared)) and (needed or not filled)
            ]

    def put(self, column: str, value: Any) -> None:
        """A value in a column of up to all rows."""
        table, _, name = column.partition(".")
        with self.opened() as connection:
            rows = [rowid for (rowid,) in connection.execute(f"SELECT rowid FROM {table}")]
            some = self.rng.permutation(rows)[: int(self.pick((1, 1, 3, len(rows))))]
            for rowid in some.tolist():
                connection.execute(f"UPDATE OR IGNORE {table} SET {name} = ? WHERE rowid = ?", (value, rowid))
        self.done.append(f"{column} = {value!r} in {len(some)} of {len(rows)} rows")


def flipped_bits(damage: Damage) -> None:
    with damage.opened():
        pass
    content = bytearray(damage.file.read_bytes())
    for _ in range(int(damage.rng.integers(1, 30))):
        content[int(damage.rng.integers(len(content)))] ^= 1 << int(damage.rng.integers(8))
    damage.file.write_bytes(content)


def cut_file(damage: Damage) -> None:
    with damage.opened():
        pass
    content = damage.file.read_bytes()
    damage.file.write_bytes(content[: int(damage.rng.integers(len(content)))])


def other_type(damage: Damage) -> None:
    column = damage.pick(damage.columns())
    # SQLite makes text of numbers in columns of text.
    damage.put(column, damage.pick(OTHERS if column not in damage.columns("CHAR", "TEXT") else OTHERS[:2]))


def nulls(damage: Damage) -> None:
    column = damage.pick(damage.columns(filled=True))
    with damage.opened() as connection:
        schema = connection.execute("SELECT name, sql FROM sqlite_schema WHERE type = 'table'").fetchall()
        connection.execute("PRAGMA writable_schema=ON")
        free = [(re.sub("(?<! IS) NOT NULL", "", sql), name) for name, sql in schema]
        connection.executemany("UPDATE sqlite_schema SET sql = ? WHERE name = ?", free)
    damage.put(column, None)
    with damage.opened() as connection:
        connection.execute("PRAGMA writable_schema=ON")
        connection.executemany("UPDATE sqlite_schema SET sql = ? WHERE name = ?", [(sql, name) for name, sql in schema])


def foreign_keys(damage: Damage) -> None:
    column = damage.pick(FOREIGN)
    damage.put(column, 77 if column.endswith(("idx", "winner", "context_id")) else "nothing")


def lost_rows(damage: Damage) -> None:
    table = damage.pick(("searches", "individuals", "leases", "evaluation_contexts"))  # other rows belong to these
    with damage.opened() as connection:
        rows = [rowid for (rowid,) in connection.execute(f"SELECT rowid FROM {table}")]
        few = damage.rng.permutation(rows)[: int(damage.pick((1, 3, len(rows))))].tolist()
        connection.executemany(f"DELETE FROM {table} WHERE rowid = ?", [(rowid,) for rowid in few])
    damage.done.append(f"{len(few)} rows of {table}")


def own_parents(damage: Damage) -> None:
    later = damage.pick((0, 1))
    with damage.opened() as connection:
        connection.execute(f"UPDATE parents SET parent_idx = child_idx + {later}")
    damage.done.append(f"later by {later}")


def short_genomes(damage: Damage) -> None:
    with damage.opened() as connection:
        most = int(damage.pick((0, 3, 40)))
        connection.execute("UPDATE individuals SET genome = substr(genome, 1, ?) WHERE idx % 3 = 0", (most,))
    damage.done.append(f"{most} bytes")


def malformed_json(damage: Damage) -> None:
    damage.put(damage.pick(JSON), damage.pick(("{", "[1]", "", "7", "null", "{}", '{"name": NaN}', '{"stage": [1]}')))


def no_numbers(damage: Damage) -> None:
    # SQLite stores NaN as NULL.
    damage.put(damage.pick(NUMBERS), damage.pick((None, None, float("inf"), float("-inf"), "nan")))


def no_dates(damage: Damage) -> None:
    damage.put(damage.pick(damage.columns("DATETIME")), damage.pick(DATES))


def unknown_words(damage: Damage) -> None:
    damage.put(damage.pick(WORDS), damage.pick(("bogus", "OK", "", "ok\n")))


def other_integers(damage: Damage) -> None:
    counts = [column for column in damage.columns("INT") if column != "searches.seed"]
    damage.put(damage.pick(counts), damage.pick((-(2**62), -1)))


def no_table(damage: Damage) -> None:
    table = damage.pick(sorted({name.partition(".")[0] for name in damage.columns()}))
    with damage.opened() as connection:
        connection.execute(f"DROP TABLE {table}")
    damage.done.append(table)


def other_revision(damage: Damage) -> None:
    change = damage.pick(("UPDATE alembic_version SET version_num = 'moevolve_v0'", "DELETE FROM alembic_version"))
    with damage.opened() as connection:
        connection.execute(change)
    damage.done.append(change)


KINDS: tuple[Callable[[Damage], None], ...] = (
    *(flipped_bits, other_type, nulls, foreign_keys, own_parents, short_genomes, malformed_json, no_numbers, no_dates),
    *(unknown_words, other_integers, lost_rows, no_table, other_revision, cut_file),
)


def damage(file: Path, seed: int) -> str:
    """Damage a store, and say how. Seeds that differ by the number of kinds are of one kind."""
    kind = KINDS[seed % len(KINDS)]
    doing = Damage(file, default_rng(seed))
    kind(doing)
    return f"{kind.__name__}: {'; '.join(doing.done)}"


def write_sound(file: Path) -> None:
    """Write a store with two searches, an export, a calibration and a shrink."""
    with Store.open(f"sqlite:///{file}") as store:
        drive(store, start(store, run_config()), UnrulyPool(seed=1))
        store.create_search(search("alpha", config=run_config(name="alpha").canonical_json()), [split()])
        for index, score in enumerate((0.5, 0.75, 0.25, None, 0.75)):
            scored(store, "id-alpha", index, score, parameters=1000 + index % 2)
        put(store, stages_of(file.parent)["finished"])
        store.add_export("lab:7", ExportRecord("/exports/lab-7", "stock"))
        store.add_calibration("c" * 64, b"content")


PAGES = (
    "/",
    "/best",
    "/pareto?task=rte",
    "/compare?one=lab&two=alpha",
    "/launch",
    "/shrink",
    "/shrinks/small",
)
PAGES += ("/metrics",)
PARTS = ("", "/now", "/events", "/individuals", "/individuals?order=newest", "/individuals?order=failed", "/standings")
PARTS += ("/effects", "/report", "/costs", "/settings", "/kept", "/checkpoint")
OF_ONE = ("", "/genome", "/genome.svg", "/exports", "/lineage")
QUERIES = {"/api/pareto": "?task=rte", "/api/compare": "?searches=lab&searches=alpha"}
UNENDING = "/api/news"


def requests_of(store: Store, settings: ServerSettings) -> list[tuple[str, str]]:
    """Requests of browsers and programs by method and path; those that write come last."""
    paths = [*PAGES, *(f"/searches/{name}{part}" for name in ("lab", "alpha") for part in PARTS)]
    paths += [f"/individuals/{ref}{part}" for ref in ("lab:7", "lab:50", "alpha:1") for part in OF_ONE]
    found = [("GET", path) for path in paths]
    described = make_routes(store, settings).openapi()["paths"]
    named = {"{search}": "lab", "{ref}": "lab:7", "{individual}": "lab:7", "{name}": "small"}
    for path, methods in described.items():
        if path != UNENDING:
            filled = re.sub("{[a-z]+}", lambda name: named[name[0]], path) + QUERIES.get(path, "")
            found += [(method.upper(), filled) for method in methods]
    return sorted(found, key=lambda one: one[0] != "GET")


def faults(sound: Path, folder: Path, seed: int) -> list[str]:
    """What is wrong with how the product takes a damaged copy of a store; begins with the damage."""
    file = folder / "damaged.db"
    shutil.copy(sound, file)
    before, done, url = content(file), damage(file, seed), f"sqlite:///{file}"
    changed = content(file) != before
    try:
        problems: Sequence[str] = moevolve.db.check(url).problems
        with Store.open(url) as store:
            found = list(_wrong_answers(store, ServerSettings(store=url, logs=folder / "logs")))
    except StoreError as error:
        problems, found = [str(error)], []
    if changed and not problems:
        found.append("`db check` finds nothing")
    return [done, *found] if found else []


def _wrong_answers(store: Store, settings: ServerSettings) -> Iterator[str]:
    requests = requests_of(store, settings)
    client = TestClient(make_app(store, settings), "http://localhost", raise_server_exceptions=False)
    for method, path in requests:
        # Without what they need, requests that would start a process are refused after they have read the store.
        answer = client.request(method, path, headers={"accept": "text/html", "x-moevolve": "1"})
        if answer.status_code == 500:
            yield f"{method} {path}: {answer.status_code} {answer.text[-200:]}"


def content(file: Path) -> dict[str, list[Any]] | None:
    """All rows of all tables; None if SQLite can't read them."""
    try:
        with closing(sqlite3.connect(file)) as connection:
            connection.text_factory = bytes
            names = connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'").fetchall()
            tables = [name.decode() for (name,) in names]
            return {name: connection.execute(f"SELECT * FROM {name}").fetchall() for name in sorted(tables)}
    except (sqlite3.Error, UnicodeDecodeError):  # SQLite's errors quote values, which may not be UTF-8
        return None
