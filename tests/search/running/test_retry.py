"""Failures that no candidate is to blame for: recorded as such, and taken back by a retry."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from replies import loss
from search_lab import UnrulyPool, drive, make_lab_setup, population, run_config, start

from moevolve.search.config.run import RunConfig
from moevolve.search.running.resume import take_back_failures
from moevolve.store.records import ExportRecord, FailureKind
from moevolve.store.repository import Store
from moevolve.workers.contract.messages import EvaluationReply, EvaluationRequest


def bad_day(kind: FailureKind = "timeout") -> UnrulyPool:
    """Loses one candidate in five."""
    pool = UnrulyPool(1)
    kept = pool.reply

    def reply(request: EvaluationRequest) -> EvaluationReply:
        if request.edit.phenotype_hash != "full" and int(request.edit.phenotype_hash[4:8], 16) % 5 == 2:
            return loss(request, kind, "outran its time 3 times")
        return kept(request)

    pool.reply = reply
    return pool


MODES: dict[str, dict[str, Any]] = {
    "steady": {},
    "generations": {"strategy": {"kind": "evolution", "mode": "generations", "generation": 7}},
    "nevergrad": {"strategy": "nevergrad:TwoPointsDE"},
    "surrogate": {"strategy": "surrogate"},
}


@pytest.fixture
def calm(request: pytest.FixtureRequest, tmp_path: Path) -> list[tuple[Any, ...]]:
    """The population of a search to which nothing happened."""
    with Store.open(f"sqlite:///{tmp_path / 'calm.db'}") as store:
        drive(store, start(store, run_config(**MODES[request.param])), UnrulyPool(0))
        return population(store)


@pytest.mark.parametrize(
    ("calm", "mode", "kind"),
    [(mode, mode, kind) for mode, kind in zip(MODES, ("timeout", "worker", "timeout", "worker"), strict=True)],
    indirect=["calm"],
)
def test_a_retried_search_ends_as_if_nothing_had_happened(
    calm: list[tuple[Any, ...]], mode: str, kind: FailureKind, tmp_path: Path
) -> None:
    config = run_config(**MODES[mode])
    with Store.open(f"sqlite:///{tmp_path / 'bad.db'}") as store:
        setup = start(store, config)
        drive(store, setup, bad_day(kind))
        lost = [row for row in store.history(setup.search_id) if row.failure_kind == kind]
        own = [row for row in store.history(setup.search_id) if row.failure_kind == "candidate"]
        assert len(lost) >= 3 and own and population(store) != calm
        assert all(row.failure == "outran its time 3 times" and row.fitness is None for row in lost)
        before = {row.phenotype_hash for row in store.history(setup.search_id) if row.status == "ok"}
        failures, later = take_back_failures(setup, store)
        kept = store.history(setup.search_id)
        assert failures == len(lost) and later == 60 - len(kept)
        first = lost[0].index
        assert all(setup.schedule.visible(row.index) <= first for row in kept)
        assert not [row for row in kept if row.failure_kind == kind] and kept[first].status == "pending"
        pool = UnrulyPool(2)
        drive(store, make_lab_setup(config), pool)
        assert population(store) == calm
        assert not before & set(pool.submitted), "what was evaluated stays evaluated"


def test_an_undisturbed_search_has_nothing_to_retry(tmp_path: Path) -> None:
    with Store.open(f"sqlite:///{tmp_path / 'calm.db'}") as store:
        setup = start(store, run_config())
        drive(store, setup, UnrulyPool(0))
        expected = population(store)
        assert any(status == "failed" for *_, status, _, _, _ in expected), "its own failures stay"
        assert take_back_failures(setup, store) == (0, 0)
        assert population(store) == expected


def test_exports_of_what_is_made_again_are_forgotten(tmp_path: Path) -> None:
    config: RunConfig = run_config()
    with Store.open(f"sqlite:///{tmp_path / 'bad.db'}") as store:
        setup = start(store, config)
        drive(store, setup, bad_day())
        for index in (0, 59):
            store.add_export(f"lab:{index}", ExportRecord(f"/tmp/{index}", "stock"))
        take_back_failures(setup, store)
        drive(store, make_lab_setup(config), UnrulyPool(2))
        assert [len(store.individual(f"lab:{index}").exports) for index in (0, 59)] == [1, 0]
