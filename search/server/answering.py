"""Answers that pages show: `moevolve answers` generates them in a process of its own; they are kept in memory."""

from __future__ import annotations

import subprocess
import threading
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from pydantic import TypeAdapter

from moevolve.evaluators.errors import UserError
from moevolve.search.requests.answers import Answers
from moevolve.search.requests.models import AnswersRequest
from moevolve.search.server.processes import BusyError, ProcessRunner

_KEPT = 64
"""Requests whose answers are kept; the least recently asked for go first."""
_WAITING = 8
"""Requests that may wait while one is answered."""


class AnswerRunner:
    """Generates the answers that pages ask for, one request at a time, and keeps them in memory.

    Args:
        processes: What runs commands on the server's store.
    """

    def __init__(self, processes: ProcessRunner) -> None:
        self._processes = processes
        self._kept: OrderedDict[str, Future[Answers]] = OrderedDict()
        self._threads = ThreadPoolExecutor(1, "answers")
        self._process: subprocess.Popen[bytes] | None = None
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
        with self._lock:
            if self._process is not None:
                self._process.kill()

    def _run(self, request: AnswersRequest) -> Answers:
        process = self._processes.command(list(_arguments(request)), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        with self._lock:
            self._process = process
        with process:
            printed, said = process.communicate()
        if process.returncode:
            lines = said.decode("utf-8", "replace").strip().splitlines()
            raise UserError(lines[-1] if lines else f"moevolve answers ended with {process.returncode}")
        return TypeAdapter(Answers).validate_json(printed)


def _arguments(request: AnswersRequest) -> Iterator[str]:
    """A request as arguments of `moevolve`."""
    yield from ("answers", *request.individuals, "--task", request.task, "--split", request.split, "--json")
    for row in request.rows:
        yield from ("--row", str(row))
