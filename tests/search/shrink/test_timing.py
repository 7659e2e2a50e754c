"""The number of candidates that a time allows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moevolve.evaluators.errors import UserError
from moevolve.search.config.files import parse_run_config, with_preset
from moevolve.search.running.pilot import Measured
from moevolve.search.running.set_up import set_up
from moevolve.search.shrink.timing import chosen, seconds_of

DEMO = Path(__file__).parents[3] / "configs" / "demo" / "model"


def test_a_time_allows_as_many_candidates_as_fit_besides_everything_else() -> None:
    settings: dict[str, Any] = {
        "name": "timed",
        "model": {"path": str(DEMO), "device": "cpu"},
        "tasks": [{"name": "demo-count"}],
        "genome": {"kind": "eep", "experts": 2},
        "preset": "best",
        "final": {"rerank": 5},
    }
    setup = set_up(parse_run_config(with_preset(settings, "test"), "test"), "an-id")
    rows = {split: sum(len(each.examples) for each in tasks) for split, tasks in setup.prepared.items()}
    found = Measured(5, 2, {"allocate": 6.0, "repair": 3.0}, other_seconds=10.0)
    # On dev 5 candidates; on test the full model, the best, and three one-shot choices.
    final = (5 * rows["dev"] + 5 * rows["test"]) / rows["search"] * 3.0 / 2
    needed = 7.0 + 3 * 10.0 + final + 3 * 6.0 / 2
    for extra in (1, 17, 100):
        plan = chosen(f"{needed + extra * 3.0 / 2 + 0.01:.3f}s", setup, found, spent=7.0)
        assert plan.evaluations == 3 + extra
    assert chosen("1s", setup, found, spent=7.0).evaluations == 4
    assert "10 times the preset's" in chosen("30d", setup, found, spent=7.0).text
    assert chosen("30d", setup, found, spent=7.0).evaluations == 10 * 27
    slower = replace(found, workers=1)
    assert chosen("10m", setup, slower, spent=7.0).evaluations < chosen("10m", setup, found, spent=7.0).evaluations


def test_times_have_units() -> None:
    assert [seconds_of(text) for text in ("2h", "90 min", "1.5d", "30s")] == [7200, 5400, 129600, 30]
    for text in ("2", "h", "0h", "2 weeks"):
        with pytest.raises(UserError, match=r"--time .*: give a number with a unit"):
            seconds_of(text)
