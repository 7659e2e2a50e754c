"""Queues for work that takes seconds, done one piece at a time: drawings, previews of launches, and answers.

matplotlib's settings belong to the whole process, and a preview takes hundreds of megabytes. Requests that wait here
occupy none of the threads that answer other requests, and the length of a queue is limited.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from http import HTTPStatus
from typing import ParamSpec, TypeVar

from anyio import CapacityLimiter, to_thread
from starlette.exceptions import HTTPException

from moevolve.search.interface.answers import Answers, AnswersRequest
from moevolve.search.server.processes import BusyError
from moevolve.store.reader import StoreReader
from moevolve.workers.children.process import ChildProcess

MOST = 20
"""Pieces of work of one kind in progress or waiting; a browser sends up to six requests to a server at once."""
P = ParamSpec("P")
T = TypeVar("T")


class SerialQueue:
    """The work of one kind that a server was asked for.

    Args:
        what: Name of the pieces, in the plural.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._turn = CapacityLimiter(1)
        self._count = 0

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call `work` in a thread once the pieces before it are done.

        Raises:
            HTTPException: status 503, if `MOST` are in progress or waiting.
        """
        if self._count >= MOST:
            detail = f"{MOST} {self._what} are waited for; ask again in a moment"
            raise HTTPException(HTTPStatus.SERVICE_UNAVAILABLE, detail, {"retry-after": "10"})
        self._count += 1  # not the limiter's own count: a thread's start is waited for before that rises
        try:
            return await to_thread.run_sync(lambda: work(*args, **kwargs), limiter=self._turn)
        finally:
            self._count -= 1


_KEPT = 64
"""Requests whose answers are kept; the least recently used go first."""
_WAITING = 8
"""Requests that may wait while one is answered, each with a model to load: more would wait too long."""


class AnswerRunner:
    """Generates the answers that pages ask for, one request at a time, and keeps them in memory.

    Args:
        store: URL of the server's store.
    """

    def __init__(self, store: str) -> None:
        self._store = store
        self._kept: OrderedDict[str, Future[Answers]] = OrderedDict()
        self._threads = ThreadPoolExecutor(1, "answers")
        self._process = ChildProcess()
        self._lock = threading.Lock()

    def start(self, request: AnswersRequest) -> None:
        """Have a request answered, unless that was done or begun before; one that failed is tried again.

        Raises:
            BusyError: too many requests are waiting.
        """
        with self._lock:
            earlier = self._kept.get(repr(request))
            if earlier is not None and not (earlier.done() and earlier.exception()):
                return
            if sum(not each.done() for each in self._kept.values()) > _WAITING:
                raise BusyError(f"answers to {_WAITING} requests are waited for; ask again in a moment")
            self._kept[repr(request)] = self._threads.submit(self._run, request)
            done = [key for key, each in self._kept.items() if each.done()]
            for key in done[: max(0, len(self._kept) - _KEPT)]:
                del self._kept[key]

    def found(self, request: AnswersRequest) -> Future[Answers] | None:
        """What becomes of a request; None if nobody has asked for its answers."""
        with self._lock:
            if repr(request) in self._kept:
                self._kept.move_to_end(repr(request))
            return self._kept.get(repr(request))

    def close(self) -> None:
        """End what is running, and answer nothing more."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._process.close()

    def _run(self, request: AnswersRequest) -> Answers:
        try:
            return self._process.call(answers_from, self._store, request)
        finally:
            self._process.close()  # which frees the model's memory


def answers_from(store: str, request: AnswersRequest) -> Answers:
    """Generate answers in this process, which loads torch; see `AnswersRequest`."""
    with StoreReader.open(store) as reader:
        return request.answer(reader)
