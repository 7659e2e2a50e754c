"""The pool of workers as the driver sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from moevolve.evaluators.types import PreparedSplit
from moevolve.workers.contract.edits import CalibrationRecipe
from moevolve.workers.contract.messages import EvaluationReply, EvaluationRequest


class PoolError(Exception):
    """No worker can be had; the search stops and stays resumable."""


class Pool(Protocol):
    """Where the driver sends requests."""

    def submit(self, request: EvaluationRequest) -> None:
        """Queue a request; it is dispatched when a worker is free."""
        ...

    def poll(self, timeout: float) -> list[EvaluationReply]:
        """Wait up to `timeout` seconds for at least one reply and return all that are there.

        Raises:
            PoolError: no worker can be had.
        """
        ...

    def calibrate(
        self,
        recipe: CalibrationRecipe,
        splits: tuple[PreparedSplit, ...],
        check: Callable[[], object] = lambda: None,
    ) -> bytes:
        """Make a calibration on one of the workers, as a safetensors file; see `EvaluationWorker.calibrate`.

        Args:
            recipe: what is measured.
            splits: on whose prompts.
            check: called every second or so while it is waited for; its errors end the calibration.

        Raises:
            NoRoomError: the model doesn't fit on any worker.
            UserError: the model can't be loaded, or isn't one that the recipe is for.
            PoolError: no worker can be had, or measuring fails, kills its workers or takes too long.
        """
        ...

    def resize(self, count: int, at_once: bool = False) -> None:
        """Have so many workers from now on.

        Those that are too many go when they are done with what they evaluate; `at_once` they go now, and that is
        evaluated again.
        """
        ...

    def close(self) -> None:
        """Stop all workers."""
        ...
