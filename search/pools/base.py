"""The pool of workers as the driver sees it."""

from __future__ import annotations

from typing import Protocol

from moevolve.workers.messages import EvaluationReply, EvaluationRequest


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

    def resize(self, count: int, at_once: bool = False) -> None:
        """Have so many workers from now on.

        Those that are too many go when they are done with what they evaluate; `at_once` they go now, and that is
        evaluated again.
        """
        ...

    def close(self) -> None:
        """Stop all workers."""
        ...
