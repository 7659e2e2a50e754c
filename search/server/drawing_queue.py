"""Drawing one thing after the other: what draws has settings for its whole process, and takes seconds.

Whoever waits holds none of the threads that answer other requests, and no more wait than are served in bearable time.
"""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from typing import ParamSpec, TypeVar

from anyio import CapacityLimiter, to_thread
from starlette.exceptions import HTTPException

MOST_ASKED = 20
"""Drawings that are under way or waited for; a browser asks a server for six things at once."""
P = ParamSpec("P")
T = TypeVar("T")


class DrawingQueue:
    """The drawings that a server was asked for."""

    def __init__(self) -> None:
        self._turn = CapacityLimiter(1)
        self._asked = 0

    async def run(self, draw: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call `draw` in a thread, when it is its turn.

        Raises:
            HTTPException: 503, `MOST_ASKED` are asked for already.
        """
        if self._asked >= MOST_ASKED:
            detail = f"{MOST_ASKED} drawings are waited for; ask again in a moment"
            raise HTTPException(HTTPStatus.SERVICE_UNAVAILABLE, detail, {"retry-after": "10"})
        self._asked += 1
        try:
            return await to_thread.run_sync(lambda: draw(*args, **kwargs), limiter=self._turn)
        finally:
            self._asked -= 1
