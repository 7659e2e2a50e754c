"""A queue that draws one figure at a time.

matplotlib's settings belong to the whole process, and a drawing takes seconds. Requests that wait here occupy none of
the threads that answer other requests, and the length of the queue is limited.
"""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from typing import ParamSpec, TypeVar

from anyio import CapacityLimiter, to_thread
from starlette.exceptions import HTTPException

MAX_DRAWINGS = 20
"""Drawings in progress or waiting; a browser sends up to six requests to a server at once."""
P = ParamSpec("P")
T = TypeVar("T")


class DrawingQueue:
    """The drawings that a server was asked for."""

    def __init__(self) -> None:
        self._turn = CapacityLimiter(1)
        self._count = 0

    async def run(self, draw: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call `draw` in a thread once the drawings before it are done.

        Raises:
            HTTPException: status 503, if `MAX_DRAWINGS` are in progress or waiting.
        """
        if self._count >= MAX_DRAWINGS:
            detail = f"{MAX_DRAWINGS} drawings are waited for; ask again in a moment"
            raise HTTPException(HTTPStatus.SERVICE_UNAVAILABLE, detail, {"retry-after": "10"})
        self._count += 1
        try:
            return await to_thread.run_sync(lambda: draw(*args, **kwargs), limiter=self._turn)
        finally:
            self._count -= 1
