"""A child process that calls functions for this one."""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Self, TypeVar, TypeVarTuple, get_type_hints

from pydantic import TypeAdapter
from pydantic_core import to_json

# Time between two looks at a process's memory.
_LOOK_S = 0.1

R = TypeVar("R")
Ts = TypeVarTuple("Ts")

_MAIN = str(Path(__file__).with_name("main.py"))


class ChildError(Exception):
    """The process ended or was too slow, or a function raised an error that isn't one of moevolve's own.

    Attributes:
        killed: Whether the process was killed, as the system does when memory runs out.
    """

    def __init__(self, message: str, killed: bool = False) -> None:
        super().__init__(message)
        self.killed = killed


class ChildProcess:
    """Calls functions in a Python process of their own, one at a time.

    The first call starts the process, and so does the first call after it has ended. Between calls it keeps what
    modules hold. It ends with `close`, with the last reference to this object, and with this process, even if that is
    killed. Ctrl-C doesn't reach it.

    Args:
        python: Python executable of another environment, where moevolve can't be imported. The functions that are
            called there are those of a file that imports nothing of moevolve, and take and return plain JSON.
        environment: Environment variables to set.
        log: File that gets what the process prints; None for the standard error of this process.
        limit_s: Time limit of a call, which ends the process; None for no limit.
        idle_s: Time without a call after which the process ends; None for no limit.
        memory: Bytes in memory beyond which a call ends the process; None for no limit.
    """

    def __init__(
        self,
        python: str | None = None,
        environment: Mapping[str, str] | None = None,
        log: Path | None = None,
        limit_s: float | None = None,
        idle_s: float | None = None,
        memory: int | None = None,
    ) -> None:
        self._python, self._environment, self._log = python, environment or {}, log
        self._limit_s, self._idle_s, self._memory = limit_s, idle_s, memory
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def call(self, function: Callable[[*Ts], R], *arguments: *Ts) -> R:
        """Call a function of a module in the process. Arguments and results are plain data or dataclasses.

        Errors of moevolve's own, such as a `UserError`, are raised here as what they are, made of their messages.

        Raises:
            ChildError: The process ended or was too slow, or the function raised another error.
        """
        # By file in another environment, which may have another version of moevolve, or none.
        module = function.__module__ if self._python is None else function.__code__.co_filename
        reply = json.loads(self._exchange(to_json([module, function.__name__, arguments])))
        if "result" in reply:
            kind = TypeAdapter(get_type_hints(function)["return"])
            result: R = kind.validate_python(reply["result"])
            return result
        place, name = reply["kind"]
        if place.startswith("moevolve."):
            raise getattr(importlib.import_module(place), name)(reply["error"])
        raise ChildError(f"{name}: {' '.join(reply['error'].split())}")

    def close(self) -> None:
        """End the process, if there is one, whatever it is doing."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(BrokenPipeError), process:
                process.kill()

    def __del__(self) -> None:
        self.close()

    def _exchange(self, request: bytes) -> bytes:
        """Send a line, and return the one that the process replies with."""
        process = self._running()
        assert process.stdin is not None and process.stdout is not None
        reply, excess = b"", ""
        try:
            with contextlib.suppress(BrokenPipeError, ValueError):  # it has ended, or another thread has closed it
                process.stdin.write(request + b"\n")
                process.stdin.flush()
                waiting = select.poll()  # `select.select` can't wait for the descriptors of a busy server
                waiting.register(process.stdout)
                excess = self._excess(process, waiting)
                reply = b"" if excess else process.stdout.readline()
        finally:
            if not reply:  # also after a Ctrl-C: the next call would get this one's reply
                self.close()
        if excess:
            raise ChildError(f"it took more than {excess}")
        if not reply:
            raise self._ended(process.wait())
        return reply

    def _excess(self, process: subprocess.Popen[bytes], waiting: select.poll) -> str:
        """Wait for a reply; returns the limit that the process exceeds first, empty if it replies."""
        end = math.inf if self._limit_s is None else time.monotonic() + self._limit_s
        # Not a limit of the process's own, which counts what libraries reserve for threads and never touch.
        look_s = math.inf if self._memory is None else _LOOK_S
        while True:
            left = min(look_s, end - time.monotonic())
            if waiting.poll(None if left == math.inf else max(0.0, 1000 * left)):
                return ""
            if time.monotonic() >= end:
                return f"{self._limit_s:g} s"
            if self._memory is not None and _resident(process.pid) > self._memory:
                return f"{self._memory >> 20:,} MiB of memory"

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self.close()
            with contextlib.nullcontext() if self._log is None else self._log.open("ab") as log:
                self._process = subprocess.Popen(
                    [self._python or sys.executable, _MAIN, *([] if self._idle_s is None else [str(self._idle_s)])],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env={**os.environ, **self._environment},
                    start_new_session=True,  # a Ctrl-C is for this process alone, which then ends the child
                )
        return self._process

    def _ended(self, code: int) -> ChildError:
        if code == -signal.SIGKILL:
            return ChildError("its process was killed, for want of memory perhaps", killed=True)
        lines = [] if self._log is None else self._log.read_text("utf-8", "replace").strip().splitlines()
        return ChildError(f"its process ended with exit code {code}{f': {lines[-1]}' if lines else ''}")


def _resident(process: int) -> int:
    """Return the bytes that a process has in memory; 0 where the system doesn't tell."""
    try:
        return int(Path(f"/proc/{process}/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0
