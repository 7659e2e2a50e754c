"""The interface of a pool of workers, and the pool that carries out the desired state of its search."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from moevolve.evaluators.types import PreparedSplit
from moevolve.store.records import Control, SearchStatus
from moevolve.workers.contract.edits import Measurement
from moevolve.workers.contract.messages import EvaluationReply, EvaluationRequest


class PoolError(Exception):
    """No worker is available; the search stops and stays resumable."""


class Pool(Protocol):
    """Evaluates the driver's requests."""

    def submit(self, request: EvaluationRequest) -> None:
        """Queue a request until a worker is free."""
        ...

    def poll(self, timeout: float) -> list[EvaluationReply]:
        """Wait up to `timeout` seconds for at least one reply, and return all that have arrived.

        Raises:
            PoolError: No worker is available.
        """
        ...

    def calibrate(
        self,
        measurement: Measurement,
        splits: tuple[PreparedSplit, ...],
        check: Callable[[], object] = lambda: None,
    ) -> bytes:
        """Calibrate on one of the workers, and return a safetensors file; see `EvaluationWorker.calibrate`.

        Args:
            measurement: The statistics to measure.
            splits: The splits whose prompts are run.
            check: Called about once a second during the wait; its errors end the calibration.

        Raises:
            NoRoomError: The model doesn't fit on any worker.
            UserError: The measurement isn't for the model.
            PoolError: No worker is available, or calibrating fails, kills its workers or takes too long.
        """
        ...

    def resize(self, count: int, at_once: bool = False) -> None:
        """Change the number of workers.

        Surplus workers finish their evaluation first. With `at_once` they stop now, and their candidates are evaluated
        again.
        """
        ...

    def close(self) -> None:
        """Stop all workers."""
        ...


class StopRequested(KeyboardInterrupt):
    """The search's desired state is to stop or be cancelled; like Ctrl-C, but not from its terminal.

    Attributes:
        status: Status that the search ends with.
    """

    def __init__(self, status: SearchStatus) -> None:
        super().__init__(status)
        self.status = status


def check_not_ended(control: Control) -> Control:
    """Return the control of a search that may go on; StopRequested if it is to be stopped or cancelled."""
    if control.desired_state in ("stopped", "cancelled"):
        raise StopRequested("interrupted" if control.desired_state == "stopped" else "cancelled")
    return control


class ControlledPool:
    """Resizes, pauses and stops another pool as its search's control says.

    Args:
        make: Makes the pool that evaluates, at its first use: a finished search seldom needs one.
        due: Returns the number of workers for a control while the search isn't paused.
        control: Returns the present control; its errors end the search.
        on_pause: Called with True when the search pauses, and with False when it goes on.
    """

    def __init__(
        self,
        make: Callable[[], Pool],
        due: Callable[[Control], int],
        control: Callable[[], Control],
        on_pause: Callable[[bool], None],
    ) -> None:
        self._make, self._due, self._control, self._on_pause = make, due, control, on_pause
        self._pool: Pool | None = None
        self._paused = False

    def start(self) -> Pool:
        """Make the inner pool unless it is there, so that its workers begin to load; and return it."""
        if self._pool is None:
            self._pool = self._make()
        return self._pool

    def submit(self, request: EvaluationRequest) -> None:
        self.start().submit(request)

    def poll(self, timeout: float) -> list[EvaluationReply]:
        """Poll the inner pool, or wait without replies while the search is paused.

        Raises:
            StopRequested: The desired state is to stop or cancel the search.
        """
        control = check_not_ended(self._control())
        paused = control.desired_state == "paused"
        self.resize(0 if paused else self._due(control), at_once=paused)
        if paused != self._paused:
            self._paused = paused
            self._on_pause(paused)
        if paused:
            time.sleep(timeout)
            return []
        return self.start().poll(timeout)

    def calibrate(
        self,
        measurement: Measurement,
        splits: tuple[PreparedSplit, ...],
        check: Callable[[], object] = lambda: None,
    ) -> bytes:
        """Calibrate with the inner pool; a pause reduces it to one worker, and begins after the calibration."""

        def check_control() -> None:
            check()
            control = check_not_ended(self._control())
            self.resize(1 if control.desired_state == "paused" else max(1, self._due(control)))

        return self.start().calibrate(measurement, splits, check_control)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()

    def resize(self, count: int, at_once: bool = False) -> None:
        self.start().resize(count, at_once)
