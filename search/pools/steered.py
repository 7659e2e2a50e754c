"""A pool that does what is asked of its search from outside: other numbers of workers, none for a while, an end."""

from __future__ import annotations

import time
from collections.abc import Callable

from moevolve.search.pools.base import Pool
from moevolve.store.records import Control, SearchStatus
from moevolve.workers.messages import EvaluationReply, EvaluationRequest


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
    if control.wanted in ("stopped", "cancelled"):
        raise StopAsked("interrupted" if control.wanted == "stopped" else "cancelled")
    return control


class SteeredPool:
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
        paused = control.wanted == "paused"
        self.resize(0 if paused else self._due(control), at_once=paused)
        if paused != self._paused:
            self._paused = paused
            self._on_pause(paused)
        if paused:
            time.sleep(timeout)
            return []
        return self._pool.poll(timeout)

    def close(self) -> None:
        self._pool.close()

    def resize(self, count: int, at_once: bool = False) -> None:
        self._pool.resize(count, at_once)
