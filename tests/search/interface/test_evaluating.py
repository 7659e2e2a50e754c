"""Checkpoints from anywhere beside stored individuals: their scores on tasks, and tests against the first."""

from __future__ import annotations

from math import comb
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moevolve
from moevolve.workers.worker import EvaluationWorker


@pytest.fixture(scope="module")
def written(all_kinds: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with fewer experts, of an individual."""
    folder = tmp_path_factory.mktemp("written") / "small"
    moevolve.export(all_kinds, "eep:0", folder)
    return folder


def outcomes(record: Any) -> Any:
    return np.frombuffer(record.outcomes or b"", dtype="<f4")


def mcnemar(one: Any, other: Any) -> float:
    """The exact test: gains and losses are equally likely."""
    gained, lost = int((one > other).sum()), int((one < other).sum())
    tail = sum(comb(gained + lost, k) for k in range(min(gained, lost) + 1)) / 2 ** (gained + lost)
    return min(1.0, 2 * tail)


def test_a_checkpoint_scores_as_the_individual_that_it_was_written_from(
    written: Path, all_kinds: str, tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Other tests need a store without these scores on `dev` and `test`.
    tasks, full = (f"{tiny.task}@generate", f"{tiny.task}@perplexity"), str(tiny.model)
    found = moevolve.evaluate(
        all_kinds, [full, str(written), "eep:0"], tasks=tasks, split="search", page=tmp_path / "table.html"
    )
    first, small, stored = found.models
    assert [len(each.records) for each in found.models] == [2, 2, 2] and found.tasks == (
        "pick@generate",
        "pick@perplexity",
    )
    assert small.parameters == stored.parameters < first.parameters
    for mine, theirs in zip(small.records, stored.records, strict=True):
        assert mine.model_fingerprint != theirs.model_fingerprint and mine.task_fingerprint == theirs.task_fingerprint
        assert outcomes(mine) == pytest.approx(outcomes(theirs), rel=1e-4)
    # Four tests: two models on two tasks. The largest p-value stays, whatever Holm does to the others.
    assert first.p_values == (None, None)
    plain = mcnemar(outcomes(small.records[0]), outcomes(first.records[0]))
    assert small.p_values[0] is not None and plain <= small.p_values[0] <= min(1.0, 4 * plain)
    page = (tmp_path / "table.html").read_text()
    assert str(written) in page and f"{small.scores[0].score:.1%}".rstrip("%") in page and "Holm" in page

    def fail(*_: object) -> None:
        pytest.fail("all scores are stored")

    monkeypatch.setattr(EvaluationWorker, "__init__", fail)
    again = moevolve.evaluate(all_kinds, [full, str(written)], tasks=tasks, split="search")
    assert [each.records for each in again.models] == [first.records, small.records]


def test_a_store_is_made_for_checkpoints_alone(written: Path, tiny: Any, tmp_path: Path, in_process: Any) -> None:
    store = tmp_path / "new.db"
    asked = ("--task", tiny.task, "--store", f"sqlite:///{store}", "--set", "engine.threads=2")
    missing = in_process("evaluate", tmp_path / "nowhere", *asked)
    assert missing.returncode == 2 and "nowhere" in missing.stderr
    for task, said in (("boolk", "did you mean boolq"), (f"{tiny.task}@kl", "pick@perplexity")):
        refused = in_process("evaluate", written, "--task", task, *asked[2:])
        assert refused.returncode == 2 and said in refused.stderr
    assert in_process("evaluate", written, "eep:0", *asked).returncode == 2
    done = in_process("evaluate", written, tiny.model, *asked)
    assert done.returncode == 0, done.stderr
    assert "p = " in done.stdout and store.is_file()
