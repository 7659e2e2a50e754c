"""A pool under control: it does what is asked, once, and changes no reply."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from moevolve.search.pools.base import ControlledPool, StopRequested
from moevolve.store.errors import LeaseLostError
from moevolve.store.records import Control


@dataclass
class Counting:
    """A pool that notes what is done with it."""

    done: list[Any] = field(default_factory=list)
    count: int = 2

    def submit(self, request: Any) -> None:
        self.done.append(request)

    def poll(self, timeout: float) -> list[Any]:
        return ["reply"]

    def calibrate(self, measurement: Any, splits: Any, check: Callable[[], object]) -> bytes:
        for _ in range(3):
            check()
        return b"made"

    def resize(self, count: int, at_once: bool = False) -> None:
        if count != self.count:
            self.done.append(count if at_once == (count == 0) else "wrongly")
        self.count = count

    def close(self) -> None:
        self.done.append("closed")


class Asked:
    """What is asked now."""

    def __init__(self) -> None:
        self.desired_state: Any = "running"
        self.workers: int | None = None

    def __call__(self) -> Control:
        if self.desired_state == "lost":
            raise LeaseLostError("lost")
        return Control("somebody", 1, True, self.desired_state, self.workers)


def due(control: Control) -> int:
    return control.workers or 2


def test_workers_come_and_go_as_asked() -> None:
    pool, asked, paused = Counting(), Asked(), list[bool]()
    steered: Any = ControlledPool(lambda: pool, due, asked, paused.append)
    steered.submit("request")
    assert [steered.poll(0) for _ in range(2)] == [["reply"]] * 2 and pool.done == ["request"]
    for asked.workers in (5, 5, 1):
        assert steered.poll(0) == ["reply"]
    assert pool.done == ["request", 5, 1]
    asked.desired_state = "paused"
    assert [steered.poll(0) for _ in range(3)] == [[]] * 3
    assert pool.done == ["request", 5, 1, 0] and paused == [True]
    asked.desired_state = "running"
    assert steered.poll(0) == ["reply"]
    assert pool.done == ["request", 5, 1, 0, 1] and paused == [True, False]
    asked.desired_state, asked.workers = "paused", None
    steered.poll(0)
    asked.desired_state = "running"
    steered.poll(0)
    steered.close()
    assert pool.done[5:] == [0, 2, "closed"] and paused == [True, False] * 2


def test_a_search_ends_as_asked_or_when_it_is_lost() -> None:
    asked, pool = Asked(), Counting()
    steered: Any = ControlledPool(lambda: pool, due, asked, lambda _: None)  # type: ignore[arg-type]
    for asked.desired_state, status in (("stopped", "interrupted"), ("cancelled", "cancelled")):
        for use in (lambda: steered.poll(0), lambda: steered.calibrate(None, ())):
            with pytest.raises(StopRequested) as end:
                use()
            assert end.value.status == status and isinstance(end.value, KeyboardInterrupt)
    asked.desired_state = "lost"
    with pytest.raises(LeaseLostError):
        steered.poll(0)
    assert pool.done == []


def test_a_pause_waits_until_a_calibration_is_made() -> None:
    """It is made on one worker then; on as many as are due otherwise."""
    pool, asked, paused = Counting(), Asked(), list[bool]()
    steered: Any = ControlledPool(lambda: pool, due, asked, paused.append)
    asked.workers = 4
    assert steered.calibrate(None, ()) == b"made" and pool.done == [4]
    asked.desired_state = "paused"
    assert steered.calibrate(None, ()) == b"made" and pool.done == [4, 1] and paused == []
    assert steered.poll(0) == [] and pool.done == [4, 1, 0] and paused == [True]
