"""The yardstick is honest: it finds the same answers right as the engine does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from authors_way import AuthorsWay

from moevolve.evaluators.preparation.prepare import prepare_split
from moevolve.evaluators.preparation.registry import load_task
from moevolve.workers.contract.messages import EvaluationRequest
from moevolve.workers.contract.settings import EngineConfig, ModelConfig
from moevolve.workers.methods.eep.edit import EepEdit
from moevolve.workers.worker import EvaluationWorker

pytestmark = pytest.mark.bench

MODEL = ModelConfig(path=str(Path(__file__).parents[2] / "configs" / "demo" / "model"), dtype="float32", device="cpu")


def edits() -> list[EepEdit]:
    """A pruned and a merged candidate of 4 of 8 experts, near enough to pruning that no mapped weights vanish."""
    rng = np.random.default_rng(0)
    made = []
    for spread in (0.0, 0.01):
        kept = np.stack([rng.permutation(8)[:4] for _ in range(5)])
        mapping, merging = (np.eye(8, dtype=np.float32)[kept] for _ in range(2))
        mapping = mapping + spread * rng.normal(size=mapping.shape)
        merging = merging + spread * rng.normal(size=merging.shape)
        made.append(EepEdit(mapping.astype(np.float32), merging.astype(np.float32), active=2))
    return made


@pytest.mark.parametrize("task", ["demo-span", "demo-relation"])
def test_scores_are_those_of_the_engine(task: str) -> None:
    split = prepare_split(load_task(task).with_counts({"search": 40}), "search")
    authors, worker = AuthorsWay(MODEL, EngineConfig(), rows=16), EvaluationWorker(MODEL, EngineConfig())
    for edit in edits():
        request = EvaluationRequest(edit, (split.ref,))
        theirs, ours = authors.evaluate(request, (split,)), worker.evaluate(request, (split,))
        assert theirs.failure is None and ours.failure is None
        np.testing.assert_array_equal(
            theirs.results[split.fingerprint].outcomes, ours.results[split.fingerprint].outcomes
        )
    assert authors.plain_forward(split) > 0
