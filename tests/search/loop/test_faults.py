"""A whole search on Ray among whose candidates some raise, some yield non-finite logits and some kill their worker."""

from __future__ import annotations

import os
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import broken_models
import numpy as np
import pytest
import ray
from broken_models import broken

from moevolve.evaluators.types import PreparedSplit
from moevolve.search.config.files import load_run_config
from moevolve.search.loop.setup import SearchSetup
from moevolve.search.pools.base import Pool
from moevolve.search.pools.ray_pool import RayPool
from moevolve.search.running.execute import execute
from moevolve.search.running.launch import register, set_up_new
from moevolve.search.running.observer import Observer
from moevolve.store.repository import Store
from moevolve.workers.contract.messages import EvaluationReply, EvaluationRequest
from moevolve.workers.worker import EvaluationWorker

pytestmark = pytest.mark.slow

# Workers can't import this file, nor labs: what is in them travels by value.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
ray.cloudpickle.register_pickle_by_value(broken_models)

REASONS = {"dies": "killed its worker 1 times", "raises": "ValueError: a bad candidate", "explodes": "finite"}


def fate(phenotype_hash: str) -> str:
    """What becomes of a candidate; the same for equal candidates, as bad ones are."""
    if phenotype_hash == "full":
        return "fine"
    return {0: "dies", 1: "raises", 2: "explodes"}.get(int(phenotype_hash[:6], 16) % 11, "fine")


class UnluckyWorker(EvaluationWorker):
    """Misbehaves by the candidate's fate."""

    def evaluate(self, request: EvaluationRequest, splits: tuple[PreparedSplit, ...]) -> EvaluationReply:
        match fate(request.edit.phenotype_hash):
            case "dies":
                os._exit(1)
            case "raises":
                with broken(self.resident.model, ValueError("a bad candidate")):
                    return super().evaluate(request, splits)
            case "explodes":
                edit: Any = request.edit
                request = replace(request, edit=replace(edit, expert_merging=edit.expert_merging * np.float32(1e30)))
        return super().evaluate(request, splits)


def unlucky_pool(setup: SearchSetup) -> Pool:
    config = setup.config
    splits = {split.fingerprint: split for group in setup.prepared.values() for split in group}
    model, engine = config.model, config.engine
    return RayPool(config.workers, model, engine, splits, worker=UnluckyWorker)


def test_bad_candidates_are_recorded_and_the_search_completes(tiny: Any, ray_address: str, tmp_path: Path) -> None:
    workers = {"count": 1, "num_cpus": 0.5, "max_attempts": 1, "address": ray_address}
    store_url = f"sqlite:///{tmp_path / 'unlucky.db'}"
    run = tiny.write_run(tmp_path / "run.yaml", "unlucky", workers=workers, store=store_url)
    setup = set_up_new(load_run_config(run))
    store = Store.open(setup.config.store)
    register(setup, store)
    try:
        report = execute(setup, store, Observer(), unlucky_pool)
    finally:
        ray.shutdown()
    rows = store.history(setup.search_id)
    fates = {row.index: fate(row.phenotype_hash) for row in rows}
    assert set(Counter(fates.values())) == {"fine", *REASONS}, "every fate occurs"
    for row in rows:
        assert row.status == ("ok" if fates[row.index] == "fine" else "failed")
        assert REASONS.get(fates[row.index], "") in (row.failure or "")
        assert all(fates[parent] == "fine" for parent in row.parents)
    assert store.search("unlucky").status == "finished"
    assert report.winner is not None and fates[int(report.winner.partition(":")[2])] == "fine"
