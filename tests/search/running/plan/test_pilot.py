"""What a pilot says of the evaluations that it has made."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from moevolve.evaluators.errors import UserError
from moevolve.search.running.plan.pilot import _measured


def evaluated(phase: str, seconds: float, worker: str, failure: str | None = None) -> tuple[str, Any]:
    return phase, [SimpleNamespace(split="search", seconds=seconds, worker=worker, failure=failure)]


def test_workers_that_wait_for_the_last_evaluation_of_a_phase_do_nothing_else() -> None:
    formulas = [evaluated("prune", seconds, worker) for seconds, worker in ((2.0, "a"), (3.0, "b"), (3.0, "a"))]
    found = _measured([*formulas, evaluated("repair", 30.0, "b"), evaluated("repair", 9.0, "a", "broken")], wall=50.0)
    assert (found.counts, found.workers, found.individuals) == ({"prune": 3, "repair": 1}, 2, 4)
    assert found.of("prune") == pytest.approx(8 / 3) and found.of("repair") == 30.0
    assert found.other_seconds == 50.0 - 8.0 / 2 - 30.0
    assert found.together("prune", 4) == pytest.approx(2 * 8 / 3) and found.together("repair", 1) == 30.0
    with pytest.raises(UserError, match="no individual could be evaluated"):
        _measured([evaluated("prune", 1.0, "a", "broken")], wall=5.0)
