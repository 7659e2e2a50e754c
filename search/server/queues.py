"""Queues for work that takes seconds, done one piece at a time: drawings, and checks of launches and files.

matplotlib's settings belong to the whole process, and a check takes hundreds of megabytes. Requests that wait here
occupy none of the threads that answer other requests, and the length of a queue is limited.
"""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from typing import TypeVar, TypeVarTuple

from anyio import CapacityLimiter, to_thread
from starlette.exceptions import HTTPException

from moevolve.evaluators.errors import UserError
from moevolve.workers.children.process import ChildError, ChildProcess

# Pieces of work of one kind in progress or waiting; a browser sends up to six requests to a server at once.
MOST = 20
T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class SerialQueue:
    """The work of one kind that a server was asked for.

    Args:
        what: Name of the pieces, in the plural.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._turn = CapacityLimiter(1)
        self._count = 0

    async def run(self, work: Callable[[], T]) -> T:
        """Call `work` in a thread once the pieces before it are done.

        Raises:
            HTTPException: status 503, if `MOST` are in progress or waiting.
        """
        if self._count >= MOST:
            detail = f"{MOST} {self._what} are waited for; ask again in a moment"
            raise HTTPException(HTTPStatus.SERVICE_UNAVAILABLE, detail, {"retry-after": "10"})
        self._count += 1  # not the limiter's own count: a thread's start is waited for before that rises
        try:
            return await to_thread.run_sync(work, limiter=self._turn)
        finally:
            self._count -= 1


class ChildQueue(SerialQueue):
    """Functions that a server calls in a child process, which gives its memory back after a while without calls.

    Args:
        what: Name of the calls, in the plural.
        process: The process.
    """

    def __init__(self, what: str, process: ChildProcess) -> None:
        super().__init__(what)
        self._process = process

    async def call(self, function: Callable[[*Ts], T], *arguments: *Ts) -> T:
        """Call a function once the calls before it are done.

        Raises:
            UserError: The function has raised it, has failed, or took too long.
            HTTPException: status 503, if `MOST` are in progress or waiting.
        """

        def work() -> T:
            try:
                return self._process.call(function, *arguments)
            except ChildError as error:
                raise UserError(f"checking it failed: {error}; the server's log may have a reason") from None

        return await self.run(work)

    def close(self) -> None:
        """End the process."""
        self._process.close()
