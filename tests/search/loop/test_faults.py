"""A whole search on Ray among whose candidates some fail and some kill their worker."""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path

import disturbed_lab
import pytest
import ray
import search_lab
from disturbed_lab import CheapWorker, setup_of
from search_lab import fails

from moevolve.search.loop.setup import SearchSetup
from moevolve.search.pools.base import Pool
from moevolve.search.pools.ray_pool import RayPool
from moevolve.search.running.execute import execute
from moevolve.search.running.launch import register
from moevolve.search.running.observer import Observer
from moevolve.store.repository import Store
from moevolve.workers.contract.messages import EvaluationReply, EvaluationRequest

pytestmark = pytest.mark.slow

for module in (sys.modules[__name__], disturbed_lab, search_lab):
    ray.cloudpickle.register_pickle_by_value(module)  # workers can't import what is the tests' own

REASONS = {"dies": "killed its worker 1 times", "fails": "logits are not finite"}


def fate(phenotype_hash: str) -> str:
    """What becomes of a candidate; the same for equal candidates, as bad ones are."""
    if phenotype_hash == "full":
        return "fine"
    if int(phenotype_hash[-4:], 16) % 11 == 0:
        return "dies"
    return "fails" if fails(phenotype_hash) else "fine"


class UnluckyWorker(CheapWorker):
    """Misbehaves by the candidate's fate."""

    def reply(self, request: EvaluationRequest) -> EvaluationReply:
        if fate(request.edit.phenotype_hash) == "dies":
            os._exit(1)
        return super().reply(request)


def unlucky_pool(setup: SearchSetup) -> Pool:
    config = setup.config
    workers = config.workers.model_copy(update={"max_attempts": 1})
    return RayPool(workers, config.model, config.engine, setup.all_prepared, worker=UnluckyWorker)


def test_bad_candidates_are_recorded_and_the_search_completes(ray_address: str, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'unlucky.db'}"
    setup = setup_of(url, "unlucky", ray_address)
    with Store.open(url) as store:
        register(setup, store)
        try:
            report = execute(setup, store, Observer(), unlucky_pool)
        finally:
            ray.shutdown()
        rows = store.history(setup.search_id)
        assert store.search("unlucky").status == "finished"
    fates = {row.index: fate(row.phenotype_hash) for row in rows}
    assert set(Counter(fates.values())) == {"fine", *REASONS}, "every fate occurs"
    for row in rows:
        assert row.status == ("ok" if fates[row.index] == "fine" else "failed")
        assert REASONS.get(fates[row.index], "") in (row.failure or "")
        assert all(fates[parent] == "fine" for parent in row.parents)
    assert report.winner is not None and fates[int(report.winner.partition(":")[2])] == "fine"
