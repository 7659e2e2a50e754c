"""Failures that no candidate is to blame for: recorded as such, and taken back by a retry."""

from __future__ import annotations

from pathlib import Path

import pytest
from replies import loss
from search_lab import UnrulyPool, drive, make_lab_setup, population, run_config, start

from moevolve.evaluators.errors import FailureKind
from moevolve.search.running.resume import take_back_failures
from moevolve.store.records import ExportRecord
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


@pytest.mark.parametrize("kind", ["timeout", "worker"])
def test_a_retried_search_ends_as_if_nothing_had_happened(kind: FailureKind, tmp_path: Path) -> None:
    config = run_config()
    with Store.open(f"sqlite:///{tmp_path / 'calm.db'}") as store:
        setup = start(store, config)
        drive(store, setup, UnrulyPool(0))
        calm = population(store)
        assert any(status == "failed" for *_, status, _, _, _ in calm), "its own failures stay"
        assert take_back_failures(setup, store) == (0, 0) and population(store) == calm
    with Store.open(f"sqlite:///{tmp_path / 'bad.db'}") as store:
        setup = start(store, config)
        drive(store, setup, bad_day(kind))
        history = store.history(setup.search_id)
        lost = [row for row in history if row.failure_kind == kind]
        assert len(lost) >= 3 and population(store) != calm
        assert any(row.failure_kind == "candidate" for row in history)
        assert all(row.failure == "outran its time 3 times" and row.fitness is None for row in lost)
        for index in (0, 59):
            store.add_export(f"lab:{index}", ExportRecord(f"/tmp/{index}", "stock"))
        failures, later = take_back_failures(setup, store)
        kept = store.history(setup.search_id)
        assert failures == len(lost) and later == 60 - len(kept)
        first = lost[0].index
        assert all(setup.schedule.visible(row.index) <= first for row in kept)
        assert not [row for row in kept if row.failure_kind == kind] and kept[first].status == "pending"
        pool = UnrulyPool(2)
        drive(store, make_lab_setup(config), pool)
        assert population(store) == calm
        before = {row.phenotype_hash for row in history if row.status == "ok"}
        assert not before & set(pool.submitted), "what was evaluated stays evaluated"
        exports = [len(store.individual(f"lab:{index}").exports) for index in (0, 59)]
        assert exports == [1, 0], "those of what is made again are forgotten"
