"""Background processes: searches and exports that users start from the server, and that outlive it."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from moevolve.evaluators.errors import UserError
from moevolve.store.errors import NotFoundError
from moevolve.store.events import ASKER_VARIABLE, asker
from moevolve.store.records import Control
from moevolve.store.repository import Store

# Bytes of a log's end that are read, some hundreds of lines: a page shows no more, and a log may grow for days.
_TAIL_BYTES = 1 << 16
# Environment variables that commands have no use for, and that programs of a checkpoint mustn't read.
_SERVER_VARIABLES = ("MOEVOLVE_READ_TOKEN", "MOEVOLVE_WRITE_TOKEN")
# Width of tables in a log, as pages show it.
_COLUMNS = "120"
# Characters by which an argument could write lines of its own into a log, or change a terminal that shows it.
_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
# Seconds after which a request may be repeated that was refused because a process was about to end.
RETRY_S = 5


class BusyError(UserError):
    """The search or individual is being worked on; the request may succeed later."""


@dataclass(frozen=True, slots=True)
class Job:
    """A process that was started for a search or for an export.

    Attributes:
        name: Name of the search, or SEARCH:INDEX of the exported individual.
        command: The moevolve command that runs: `launch`, `resume`, `shrink` or `export`.
        started_at: Start time in UTC.
        process: Process id on the server's machine.
        exit_code: None while the process runs.
        last_line: Last line of its log, as it stands there.
        stopped: Whether a user ended it before its search had a driver.
    """

    name: str
    command: str
    started_at: datetime
    process: int
    running: bool
    exit_code: int | None
    last_line: str
    stopped: bool = False


@dataclass(frozen=True, slots=True)
class _Started:
    arguments: tuple[str, ...]
    at: datetime
    process: subprocess.Popen[bytes]
    stopped: bool = False


class ProcessRunner:
    """Starts moevolve commands in the background, one at a time per name.

    Args:
        store: URL of the store that the commands use. It is passed in the environment, because other users of the
            machine can read command lines.
        logs: Folder for the log files.
    """

    def __init__(self, store: str, logs: Path) -> None:
        self._logs = logs
        self._environment = {"MOEVOLVE_STORE": store, "COLUMNS": _COLUMNS}
        self._started: dict[str, _Started] = {}
        self._lock = threading.Lock()

    def start(self, name: str, arguments: Sequence[str]) -> Job:
        """Run `moevolve ARGUMENTS` in the background, in a session of its own.

        Raises:
            BusyError: a process with this name is still running.
            UserError: the log can't be written, or an argument has control characters.
        """
        wrong = next(filter(_CONTROLS.search, arguments), None)
        if wrong is not None:
            raise UserError(f"{wrong!r} has a line break or another control character; leave it out")
        inherited = {name: value for name, value in os.environ.items() if name not in _SERVER_VARIABLES}
        with self._lock:
            earlier = self._started.get(name)
            if earlier is not None and earlier.process.poll() is None:
                raise BusyError(
                    f"{name} is being worked on by process {earlier.process.pid}; its log tells how far it is. If it "
                    f"was asked to stop, try again in {RETRY_S} s"
                )
            try:
                self._logs.mkdir(parents=True, exist_ok=True)
                now = datetime.now(UTC)
                with self._log_file(name).open("ab") as log:
                    # Imports take seconds before the command itself says anything.
                    log.write(f"{now:%Y-%m-%d %H:%M:%S} UTC: moevolve {shlex.join(arguments)}\n".encode())
                    log.flush()
                    process = subprocess.Popen(
                        [sys.executable, "-m", "moevolve.search.cli", *arguments],
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        env=inherited | self._environment | {ASKER_VARIABLE: asker()},
                        start_new_session=True,
                    )
            except OSError as error:
                raise UserError(f"logs: {self._log_file(name)} can't be written: {error.strerror}") from None
            # Replaced, not changed: other threads may be iterating over it.
            others = {other: started for other, started in self._started.items() if other != name}
            self._started = others | {name: _Started(tuple(arguments), now, process)}
        return self.job(name)

    def job(self, name: str) -> Job:
        """Return the state of the latest process with a name; raises KeyError if this server has started none."""
        started = self._started[name]
        code = started.process.poll()
        lines = self.log(name).strip().splitlines()
        command = started.arguments[0]
        last = lines[-1] if lines else ""
        return Job(name, command, started.at, started.process.pid, code is None, code, last, started.stopped)

    def knows(self, name: str) -> bool:
        """Return whether this server has started a process with a name."""
        return name in self._started

    def arguments(self, name: str) -> tuple[str, ...]:
        """Return the arguments of the latest process with a name; raise KeyError if none was started."""
        return self._started[name].arguments

    def stop(self, store: Store, search: str) -> Control | None:
        """End the process that starts a search, which has no driver yet that could be asked through the store.

        Args:
            store: The store of the search.
            search: Name of the search, or id of a stored one.

        Returns:
            What the process was asked for; None if this server is starting no such search.
        """
        try:
            name = store.search(search).name
        except NotFoundError:
            name = search
        with self._lock:
            started = self._started.get(name)
            if started is None or started.arguments[0] == "export" or started.process.poll() is not None:
                return None
            self._started = self._started | {name: replace(started, stopped=True)}
            started.process.terminate()
        return Control(f"process {started.process.pid} of the server", 0, True, "stopped", None, "starting")

    def jobs(self) -> list[Job]:
        """Return the latest process of each name that this server has started, the most recent last."""
        return [self.job(name) for name in list(self._started)]

    def log(self, name: str) -> str:
        """Return the last 64 KiB of a name's log, whichever server wrote it; empty without a log."""
        try:
            with self._log_file(name).open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
                return log.read().decode("utf-8", "replace")
        except FileNotFoundError:
            return ""

    def _log_file(self, name: str) -> Path:
        # A foreign store may have names that no search of ours has: with a slash they would lead out of the folder.
        return self._logs / f"{name.replace(':', '@').replace('/', '_')}.log"
