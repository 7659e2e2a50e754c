"""A pool that does what is asked of its search from outside: other numbers of workers, none for a while, an end."""

from __future__ import annotations

import time
from collections.abc import Callable

from moevolve.evaluators.types import PreparedSplit
from moevolve.search.pools.base import Pool
from moevolve.store.records import Control, SearchStatus
from moevolve.workers.contract.edits import CalibrationRecipe
from moevolve.workers.contract.messages import EvaluationReply, EvaluationRequest


class StopAsked(KeyboardInterrupt):
    """The search is to stop, by who isn't at its terminal.

    Attributes:
        status: that it ends with.
    """

    def __init__(self, status: SearchStatus) -> None:
        super().__init__(status)
        self.status = status


def unless_ended(control: Control) -> Control:
    """What is asked of a search, if it is not to end.

    Raises:
        StopAsked: it is.
    """
    if control.desired_state in ("stopped", "cancelled"):
        raise StopAsked("interrupted" if control.desired_state == "stopped" else "cancelled")
    return control


class ControlledPool:
    """Another pool, under control.

    Args:
        pool: the pool.
        due: workers that it is to have while the search isn't paused.
        control: what is asked now; its errors end the search.
        on_pause: told when the search pauses and when it goes on.
    """

    def __init__(
        self,
        pool: Pool,
        due: Callable[[Control], int],
        control: Callable[[], Control],
        on_pause: Callable[[bool], None],
    ) -> None:
        self._pool, self._due, self._control, self._on_pause = pool, due, control, on_pause
        self._paused = False

    def submit(self, request: EvaluationRequest) -> None:
        self._pool.submit(request)

    def poll(self, timeout: float) -> list[EvaluationReply]:
        """As the pool's; while the search is paused there are no replies.

        Raises:
            StopAsked: the search is to stop.
            StoreError: it is another driver's now.
        """
        control = unless_ended(self._control())
        paused = control.desired_state == "paused"
        self.resize(0 if paused else self._due(control), at_once=paused)
        if paused != self._paused:
            self._paused = paused
            self._on_pause(paused)
        if paused:
            time.sleep(timeout)
            return []
        return self._pool.poll(timeout)

    def calibrate(
        self,
        recipe: CalibrationRecipe,
        splits: tuple[PreparedSplit, ...],
        check: Callable[[], object] = lambda: None,
    ) -> bytes:
        """As the pool's; a pause waits until it is made, on one worker.

        Raises:
            StopAsked: the search is to stop.
            StoreError: it is another driver's now.
        """

        def fit() -> None:
            check()
            control = unless_ended(self._control())
            self.resize(1 if control.desired_state == "paused" else max(1, self._due(control)))

        return self._pool.calibrate(recipe, splits, fit)

    def close(self) -> None:
        self._pool.close()

    def resize(self, count: int, at_once: bool = False) -> None:
        self._pool.resize(count, at_once)
