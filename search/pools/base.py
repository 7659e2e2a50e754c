"""The interface of a pool of workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from moevolve.evaluators.types import PreparedSplit
from moevolve.workers.contract.edits import CalibrationRecipe
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
        recipe: CalibrationRecipe,
        splits: tuple[PreparedSplit, ...],
        check: Callable[[], object] = lambda: None,
    ) -> bytes:
        """Calibrate on one of the workers; see `EvaluationWorker.calibrate`.

        Args:
            recipe: The statistics to measure.
            splits: The splits whose prompts are run.
            check: Called about once a second during the wait; its errors end the calibration.

        Returns:
            The calibration as a safetensors file.

        Raises:
            NoRoomError: The model doesn't fit on any worker.
            UserError: The model can't be loaded, or the recipe isn't for it.
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
