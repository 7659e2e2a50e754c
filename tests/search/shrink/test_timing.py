"""The number of candidates that a time allows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moevolve.evaluators.errors import UserError
from moevolve.search.config.files import parse_run_config, with_preset
from moevolve.search.genomes.contract.phases import PrunePhase, RepairPhase
from moevolve.search.running.observer import Observer
from moevolve.search.running.plan.counts import final_models
from moevolve.search.running.plan.estimate import estimate
from moevolve.search.running.plan.records import Pilot
from moevolve.search.shrink.goal import read_goal, seconds_of
from moevolve.search.shrink.request import ShrinkRequest
from moevolve.search.shrink.timing import chosen, fewest, plan_time, shortened
from moevolve.store.records import Progress

DEMO = Path(__file__).parents[3] / "configs" / "demo" / "model"


def test_a_time_allows_as_many_candidates_as_fit_besides_everything_else() -> None:
    settings: dict[str, Any] = {
        "name": "timed",
        "model": {"path": str(DEMO), "device": "cpu"},
        "tasks": [{"name": "demo-count"}],
        "genome": {"kind": "eep", "experts": 2},
        "phases": [
            {
                "kind": "prune",
                "evaluations": 3,
                "initial": 3,
                "init": ["energy", "reap", "hope"],
                "repair": {"neurons": True},
            },
            {"kind": "repair", "evaluations": 24, "repair": {"neurons": True}},
        ],
        "final": {"rerank": 5},
    }
    config = parse_run_config(with_preset(settings, "test"), "test")
    tokens = {each.split: each.tokens for each in estimate(config).splits}
    found = Pilot({"prune": 2, "repair": 3}, 2, {"prune": 6.0, "repair": 3.0}, other_seconds=10.0, full_seconds=1.0)
    # On dev the full model and 5 repaired candidates; on test the full model, the best, and three one-shot choices.
    # What was fitted is kept, and two workers take half of all.
    dev, test = (tokens[split] / tokens["search"] for split in ("dev", "test"))
    final = (6 * dev + 5 * test) / 2
    # The two choices of the pilot are not made again, but which of them are repaired is only known after the third.
    needed = 2.0 + 7.0 + 3 * 10.0 + 6.0 + final + 5.0
    found = replace(found, final_seconds=found.final(final_models(config), tokens))
    besides = 2.0 + 7.0 + 5.0
    for extra in (2, 17, 100):
        time = needed + extra * 3.0 / 2
        count, takes, _ = chosen("--time", time + 0.01, config, found, besides)
        assert count == 3 + extra and takes == pytest.approx(time)
    calibrated = replace(found, other_seconds=14.0, calibration_seconds=4.0)
    count, takes, _ = chosen("--time", needed + 3.5, config, calibrated, besides)
    assert (count, takes) == (5, pytest.approx(needed + 3.0)), "a calibration is kept, too"
    measured = replace(found, counts={"prune": 3, "repair": 1})
    least = [chosen("--time 1s", 1.0, config, each, besides) for each in (found, measured)]
    assert [count for count, *_ in least] == [4, 4]
    assert least[0][1] - least[1][1] == 6.0 + 3.0, "nothing of the shortest search is left but its scores"
    count, _, said = chosen("--time 30d", 30 * 86400.0, config, found, besides)
    assert count == 10 * 27 and "10 times the preset's" in said
    slower = replace(found, workers=1)
    by_one, by_two = (chosen("--time 10m", 600.0, config, each, besides)[0] for each in (slower, found))
    assert by_one < by_two
    (first, last) = shortened(config.phases, 4)
    assert (first.evaluations, last.evaluations) == (3, 1)


def test_the_longest_phase_is_cut_or_extended() -> None:
    prune = PrunePhase(evaluations=60, initial=8)
    for evaluations, counts in ((200, (197, 3)), (63, (60, 3)), (9, (7, 2)), (4, (3, 1)), (1, (1, 1))):
        phases = shortened((prune, RepairPhase(evaluations=3)), evaluations)
        assert tuple(phase.evaluations for phase in phases) == counts
        assert all(phase.initial == min(most, phase.evaluations) for phase, most in zip(phases, (8, 0), strict=True))


def test_all_one_shot_choices_are_tried_however_little_time_there_is() -> None:
    for preset, least in (("repaired", 5), ("counts", 4), ("prune", 4)):
        genome = {"neuron_share": 0.25} if preset == "counts" else {"experts": 4}
        settings = {"name": "s", "model": {"path": "m"}, "tasks": [{"name": "demo-kin"}], "genome": genome}
        phases = parse_run_config(with_preset(settings | {"preset": preset}, "test"), "test").phases
        assert fewest(phases) == least
        assert sum(phase.evaluations for phase in shortened(phases, least)) == least


def test_times_have_units() -> None:
    assert [seconds_of(text) for text in ("2h", "90 min", "1.5d", "30s")] == [7200, 5400, 129600, 30]
    asked = ShrinkRequest("model", experts="50%", data=("chats.jsonl",))
    timed = replace(asked, time="5h")
    free, limited, given = map(read_goal, (asked, timed, replace(timed, guard_time="2m")))
    assert [goal.guard_seconds(1000.0) for goal in (free, limited, given)] == [250, 1800, 120]
    assert [free.guard_seconds(searched) for searched in (0.0, 100.0, 1e6)] == [60, 60, 1800]
    assert "at most 1800 s" in limited.guard_plan() and "from 60 s to 1,800 s" in free.guard_plan()
    for text in ("2", "h", "0h", "2 weeks"):
        with pytest.raises(UserError, match=r"--time .*: give a number with a unit"):
            seconds_of(text)


def test_a_time_that_cant_be_met_is_refused_with_what_it_takes_and_what_was_measured_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[Any] = []

    def no_pool(*_: Any) -> Any:
        raise AssertionError("nothing is measured here")

    def measured(
        _setup: Any, _count: int, _make_pool: Any, on_stage: Any, on_progress: Any, keep: Any, *_: Any
    ) -> Pilot:
        on_stage("pilot: calibrating")
        on_progress(Progress(1, 7, "prune", None, None, 0, 0, 1, None, None))
        kept.append(None if keep is None else keep.url)
        return Pilot({"prune": 4}, 1, {"prune": 6.0}, other_seconds=10.0)

    monkeypatch.setattr("moevolve.search.running.plan.pilot.measure", measured)
    monkeypatch.setattr(
        "moevolve.search.shrink.timing.set_up_new", lambda config, *_: SimpleNamespace(config=config, prepared={})
    )
    settings: dict[str, Any] = {
        "name": "timed",
        "model": {"path": str(DEMO), "device": "cpu"},
        "tasks": [{"name": "demo-count"}],
        "genome": {"experts": 2},
    }
    config = parse_run_config(with_preset(settings, "test"), "test")
    probe: Any = SimpleNamespace(call=None)
    notes: list[str] = []
    now = [100.0]
    monkeypatch.setattr("moevolve.search.shrink.timing.time", SimpleNamespace(monotonic=lambda: now[0]))
    observer = Observer(on_note=notes.append)
    asked = read_goal(ShrinkRequest("model", experts="50%", data=("chats.jsonl",), time="30s"))
    keep: Any = SimpleNamespace(url=config.store)
    with pytest.raises(UserError, match=r"--time 30s: 5 candidates, the fewest .*, everything about .* such as 1m, or"):
        plan_time(asked, config, now[0], probe, no_pool, observer, keep)
    assert not notes
    for late, done in (("on_stage", "no"), ("on_progress", "1 of 7")):
        now[0] = 100.0
        waiting = replace(observer, **{late: lambda _: now.append(now.pop() + 16)})
        with pytest.raises(UserError, match=f"50% of it is over, and {done} candidates are measured; .* as 2m, or"):
            plan_time(asked, config, 100.0, probe, no_pool, waiting, keep)
    forced = replace(asked, request=replace(asked.request, force=True))
    number, _, sentence = plan_time(forced, config, now[0], probe, no_pool, observer, None)
    assert number == 5 and notes[0].startswith(f"{sentence}, until ")
    assert kept == [config.store, None], "a dry run keeps nothing"
