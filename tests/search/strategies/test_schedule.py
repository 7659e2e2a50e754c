"""The schedule: which phase an individual belongs to and what it may see."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from search_samples import many

from moevolve.search.config.run import RunConfig
from moevolve.search.strategies.schedule import Schedule, largest_window, make_schedule, rounds_notes

stretches = st.lists(
    st.integers(1, 30).flatmap(lambda size: st.tuples(st.just("prune"), st.just(size), st.integers(0, size))),
    min_size=1,
    max_size=4,
)
schedules = st.builds(Schedule.of, stretches, st.integers(1, 20), st.booleans())


@many
@given(schedules)
def test_spans_cover_every_index_once(schedule: Schedule) -> None:
    covered = [index for span in schedule.spans for index in range(span.start, span.stop)]
    assert covered == list(range(schedule.total))
    for index in covered:
        span = schedule.span(index)
        assert span.start <= index < span.stop
        assert schedule.is_initial(index) == (index - span.start < span.initial)
    assert [span.position for span in schedule.spans] == list(range(len(schedule.spans)))


@many
@given(schedules)
def test_an_individual_sees_ever_more_earlier_ones_and_no_more_than_a_window_can_wait(schedule: Schedule) -> None:
    seen = [schedule.visible(index) for index in range(schedule.total)]
    assert all(0 <= visible <= index for index, visible in enumerate(seen))
    assert seen == sorted(seen)
    for frontier in range(schedule.total):
        # All before the frontier are complete, the frontier itself is not: these may be under way.
        open_indices = [i for i in range(frontier, schedule.total) if seen[i] <= frontier]
        assert open_indices[0] == frontier, "the search would never end"
        assert len(open_indices) <= schedule.window


def test_a_steady_window_hides_exactly_the_last_ones() -> None:
    schedule = Schedule.of([("prune", 6, 2), ("merge", 4, 0)], window=3)
    assert [schedule.visible(index) for index in range(10)] == [0, 0, 0, 1, 2, 3, 4, 5, 6, 7]
    sequential = Schedule.of([("prune", 6, 2), ("merge", 4, 0)], window=1)
    assert [sequential.visible(index) for index in range(10)] == list(range(10))


def test_phases_wait_for_each_other_if_a_search_may_end_between_them() -> None:
    schedule = Schedule.of([("prune", 1, 1), ("prune", 6, 2), ("merge", 3, 0)], window=3, separate=True)
    assert [schedule.visible(index) for index in range(10)] == [0, 1, 1, 1, 2, 3, 4, 7, 7, 7]


def test_a_repair_phase_waits_for_those_whose_best_it_repairs() -> None:
    schedule = Schedule.of([("prune", 4, 4), ("repair", 3, 0), ("merge", 3, 0)], window=3)
    assert [schedule.visible(index) for index in range(10)] == [0, 0, 0, 1, 4, 4, 4, 5, 6, 7]


def test_the_schedule_of_a_configuration() -> None:
    phases = [{"kind": "prune", "evaluations": 40}, {"kind": "merge", "evaluations": 160}]
    steady = make_schedule(run_of(phases, window=5))
    assert (steady.total, steady.window) == (200, 5)
    assert [span.initial for span in steady.spans] == [31, 0]


def run_of(phases: list[dict[str, Any]], **settings: Any) -> RunConfig:
    data = {"name": "s", "model": {"path": "m"}, "tasks": [{"name": "t"}], "genome": {"experts": 4}, "phases": phases}
    return RunConfig.model_validate(data | settings)


PAPER: list[dict[str, Any]] = [
    {"kind": "prune", "evaluations": 71, "initial": 31},
    {"kind": "merge", "evaluations": 160},
]


def test_a_phase_of_few_rounds_is_warned_of_with_the_setting_that_would_do() -> None:
    (warned,) = rounds_notes(run_of(PAPER, window=16))
    assert warned == (
        "warning: phases.0 (prune) makes 71 individuals in 5 rounds of 16, and those of a round can't learn from each "
        "other; for 8 rounds set window: 10, or phases.0.evaluations: 113"
    )
    assert not rounds_notes(run_of(PAPER, window=10)) and rounds_notes(run_of(PAPER, window=11))
    assert len(rounds_notes(run_of(PAPER, window=23))) == 2


def test_some_phases_have_no_rounds_to_count() -> None:
    for phases in (
        [{"kind": "prune", "evaluations": 30, "initial": 30}],  # nothing is bred
        [{"kind": "prune", "evaluations": 7, "initial": 2}],  # no window would do
        [*PAPER, {"kind": "repair", "evaluations": 24}],
    ):
        assert not rounds_notes(run_of(phases, window=8))


def test_the_largest_window_leaves_all_phases_enough_rounds() -> None:
    for evaluations, window in ((7, 4), (12, 1), (22, 3), (60, 4)):  # of 7, no window makes enough
        phases = [{"kind": "prune", "evaluations": evaluations, "initial": 2}, PAPER[1]]
        assert largest_window(run_of(phases), 4) == window
