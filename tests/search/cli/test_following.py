"""`show SEARCH` and `watch SEARCH`: what a search is about, and following it to its end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from search_lab import UnrulyPool, drive, run_config, start
from store_samples import search, split

import moevolve
from moevolve.search.interface import control
from moevolve.search.interface.control import SearchState, WatchRequest
from moevolve.store.records import Progress
from moevolve.store.repository import Store


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """With a finished search `lab`, and `odd`, whose driver is gone."""
    with Store.open(f"sqlite:///{tmp_path_factory.mktemp('followed') / 'lab.db'}") as opened:
        setup = start(opened, run_config())
        drive(opened, setup, UnrulyPool(seed=1), opened.search("lab").engine_fingerprint)
        opened.set_status(opened.search("lab").id, "finished")
        opened.create_search(search("odd"), [split()])
        opened.set_status("id-odd", "running")
        yield opened


def test_a_search_is_shown_with_its_settings_phases_and_best(store: Store, in_process: Any) -> None:
    assert in_process("show", "lab", "--store", store.url).returncode == 0
    found = json.loads(in_process("show", "lab", "--store", store.url, "--json").stdout)
    assert found["search"]["name"] == "lab"
    assert sum(phase["individuals"] for phase in found["phases"]) == 60
    missing = in_process("show", "lap", "--store", store.url)
    assert missing.returncode == 2 and "no search 'lap'" in missing.stderr


def test_watching_ends_with_the_search(store: Store, in_process: Any) -> None:
    done = in_process("watch", "lab", "--store", store.url)
    assert done.returncode == 0, done.stderr
    assert "lab: finished" in done.stdout and "Next:" in done.stdout
    gone = in_process("watch", "odd", "--store", store.url)
    assert gone.returncode == 1 and "odd: orphaned (its driver is gone: resume it)" in gone.stdout
    assert in_process("watch", "ghost", "--store", store.url).returncode == 2


def states(store: Store) -> list[SearchState]:
    """A search that starts, evaluates, stands still for a moment, and is stopped."""
    record = replace(store.search("lab"), status="running")
    driven = replace(store.control(record.id), alive=True, desired_state="running", stage="calibrating", progress=None)
    progress = Progress(3, 60, "prune", (2, 0.5), 0.9, 0, 0, 3, 1.0, 57.0)
    evaluating = replace(driven, stage="evaluating", progress=progress)
    further = replace(evaluating, progress=replace(progress, done=4, left=56.0))
    slower = replace(further, progress=replace(progress, done=4, left=99.0))
    stopped = replace(record, status="interrupted", status_reason="stopped by someone")
    return [
        SearchState(record, driven),
        *(SearchState(record, each) for each in (evaluating, evaluating, further, slower)),
        SearchState(stopped, replace(further, alive=False)),
    ]


def test_states_are_yielded_when_they_change(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "_POLL_S", 0.0)
    found = states(store)
    searches, controls = iter(found), iter(found)
    monkeypatch.setattr(Store, "search", lambda *_: next(searches).search)
    monkeypatch.setattr(Store, "control", lambda *_: next(controls).control)
    seen = list(WatchRequest("lab").answer(store))
    assert seen == [each for place, each in enumerate(found) if place != 2]


def test_ctrl_c_ends_the_watching_only(store: Store, in_process: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> Iterator[SearchState]:
        yield states(store)[0]
        raise KeyboardInterrupt

    monkeypatch.setattr(moevolve, "ask", interrupted)
    done = in_process("watch", "lab", "--store", store.url)
    assert done.returncode == 130 and "the search goes on" in done.stderr
    assert store.control(store.search("lab").id).desired_state == "running"
