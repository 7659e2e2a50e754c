"""Looking after stores of real searches: what the store alone can't know of them, and copies that are resumed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from local_workers import interrupted_after, local_pool
from report_lab import KINDS, finished

import moevolve
from moevolve.evaluators.errors import UserError
from moevolve.search.config.files import load_run_config
from moevolve.search.loop.setup import SearchSetup
from moevolve.search.pools.local import LocalPool
from moevolve.search.running.calibration import calibrated_setup
from moevolve.search.running.execute import execute
from moevolve.search.running.launch import register, set_up_new
from moevolve.search.running.observer import Observer
from moevolve.search.running.resume import set_up_stored
from moevolve.store.errors import DamagedError
from moevolve.store.repository import Store


def file_of(url: str) -> Path:
    return Path(url.removeprefix("sqlite:///"))


@pytest.fixture
def kinds(all_kinds: str, tmp_path: Path) -> str:
    """A copy of the store of all kinds, which may be changed."""
    shutil.copy(file_of(all_kinds), tmp_path / "kinds.db")
    return f"sqlite:///{tmp_path / 'kinds.db'}"


def test_real_searches_of_every_kind_are_sound_and_damage_is_told_by_the_exit_code(kinds: str, in_process: Any) -> None:
    found = moevolve.db.check(kinds)
    assert (found.problems, found.searches, found.calibrations) == ((), len(KINDS), 2)
    with Store.open(kinds) as store, store.write_transaction() as connection:
        connection.exec_driver_sql("DELETE FROM leases")
    checked = in_process("db", "check", "--store", kinds)
    assert checked.returncode == 1
    for kind in KINDS:
        assert f"{kind}: it has no row in leases" in checked.stdout
    assert in_process("db", "upgrade", "--store", kinds).stdout.startswith("nothing to do: the store has schema ")


def test_a_genome_that_was_changed_in_the_store_is_not_exported_or_shown(kinds: str, tmp_path: Path) -> None:
    with Store.open(kinds) as store, store.write_transaction() as connection:
        rows = "individuals WHERE search_id IN (SELECT id FROM searches WHERE name = 'eep') AND idx ="
        connection.exec_driver_sql(
            f"UPDATE individuals SET genome = (SELECT genome FROM {rows} 1) WHERE (search_id, idx) IN "
            f"(SELECT search_id, idx FROM {rows} 3)"
        )
    said = "eep:3: its genome isn't the one that was recorded"
    with pytest.raises(UserError, match=said):
        moevolve.export(kinds, "eep:3", tmp_path / "small")
    with pytest.raises(UserError, match=said):
        moevolve.genome(kinds, "eep:3")
    assert not (tmp_path / "small").exists() and moevolve.genome(kinds, "eep:1")
    assert moevolve.db.check(kinds).problems == (said,)


def test_a_damaged_calibration_is_named(kinds: str) -> None:
    with Store.open(kinds) as store, store.write_transaction() as connection:
        connection.exec_driver_sql("UPDATE calibrations SET content = x'00'")
    with pytest.raises(DamagedError, match="the calibration of search tomoe can't be read"):
        moevolve.genome(kinds, "tomoe:0")


def test_a_search_is_pruned_with_its_calibration(kinds: str, in_process: Any) -> None:
    size = file_of(kinds).stat().st_size
    said = in_process("db", "prune", "tomoe", "--dry-run", "--store", kinds).stdout
    assert said.startswith("would delete: 1 searches, 14 individuals") and "1 calibrations" in said
    assert file_of(kinds).stat().st_size == size
    assert moevolve.db.prune(kinds, searches=["tomoe"]).calibrations == 1
    assert [row.search.name for row in moevolve.searches(kinds)] == [kind for kind in KINDS if kind != "tomoe"]
    assert file_of(kinds).stat().st_size < size
    found = moevolve.db.check(kinds)
    assert (found.problems, found.calibrations) == ((), 1)
    refused = in_process("db", "prune", "tomoe", "--store", kinds)
    assert refused.returncode == 2 and "no search 'tomoe'" in refused.stderr


def test_one_file_for_a_colleague(all_kinds: str, tmp_path: Path, in_process: Any) -> None:
    to = f"sqlite:///{tmp_path / 'given.db'}"
    said = in_process("db", "copy", "tomoe", "eep", "--store", all_kinds, "--to", to)
    assert said.returncode == 0 and said.stdout.startswith("copied tomoe, eep: 38 new individuals, 0 decided")
    with moevolve.open_store(to) as store:
        assert store.calibrations() != [] and len(store.calibrations()) == 1
    for search in ("tomoe", "eep"):
        here, there = (moevolve.best(url, search=search, limit=50) for url in (all_kinds, to))
        assert here == there
    assert moevolve.db.check(to).problems == ()
    refused = in_process("db", "copy", "--store", to, "--to", to)
    assert refused.returncode == 2 and "can't be copied to itself" in refused.stderr
    assert moevolve.db.copy(all_kinds, to=to).searches == KINDS


PHASES = [{"kind": "prune", "evaluations": 5, "initial": 3}, {"kind": "merge", "evaluations": 3, "sigma": 0.2}]


def test_a_copy_of_a_search_in_the_middle_ends_as_the_search_does(
    tiny: Any, tmp_path: Path, empty_postgres: str
) -> None:
    here = f"sqlite:///{tmp_path / 'here.db'}"
    final = {"rerank": 2, "random_baselines": 1}
    run = load_run_config(tiny.write_run(tmp_path / "run.yaml", "calm", phases=PHASES, final=final))
    setup = set_up_new(run)

    def pool(of: SearchSetup) -> LocalPool:
        return local_pool(of, interrupted_after(4))

    with Store.open(here) as store:
        register(setup, store)
        with pytest.raises(KeyboardInterrupt):
            execute(calibrated_setup(setup, store, local_pool(setup).calibrate), store, Observer(), pool)
    moevolve.db.copy(here, ["calm"], to=empty_postgres)
    ends = []
    for url in (here, empty_postgres):
        with Store.open(url) as store:
            assert 0 < store.searches()[0].evaluated < 8
            execute(set_up_stored(store, "calm"), store, Observer(), local_pool)
            rows = [
                (r.index, r.genome, r.content_hash, r.fitness, r.tie_break, r.parents)
                for r in store.history(setup.search_id)
            ]
            best = [(row.ref, row.score, row.dev_score, row.test_score) for row in store.best(limit=30)]
            ends.append((rows, best))
    assert ends[0] == ends[1] and len(ends[0][0]) == 8
    with Store.open(f"sqlite:///{tmp_path / 'whole.db'}") as store:
        finished(store, run)
        assert [row.content_hash for row in store.history(store.search("calm").id)] == [row[2] for row in ends[0][0]]
