"""Searches that are launched from the server: each in a process of its own, which outlives the server."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from moevolve.evaluators.errors import UserError
from moevolve.search.running.webhooks import WebhookSection, environment_of

_TAIL_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Launch:
    """A process that was started for a search, or for an export.

    Attributes:
        name: what it is for: a search's name, or an individual.
        command: of moevolve that it runs: `launch`, `resume` or `export`.
        started_at: when, in UTC.
        process: its number on the server's machine.
        running: whether it still runs.
        exit_code: how it ended; None while it runs.
        last_line: of its log.
    """

    name: str
    command: str
    started_at: datetime
    process: int
    running: bool
    exit_code: int | None
    last_line: str


@dataclass(frozen=True, slots=True)
class _Started:
    command: str
    at: datetime
    process: subprocess.Popen[bytes]


class Drivers:
    """Starts commands of moevolve in the background.

    Args:
        store: URL of the store that they work on; it goes through the environment, since anybody may read a command.
        logs: folder of their logs.
        webhooks: whom they tell how searches end.

    Raises:
        UserError: the key of a webhook isn't in the environment.
    """

    def __init__(self, store: str, logs: Path, webhooks: Sequence[WebhookSection] = ()) -> None:
        for target in webhooks:
            _ = target.secret
        self._logs = logs
        self._environment = {"MOEVOLVE_STORE": store, **environment_of(webhooks)}
        self._started: dict[str, _Started] = {}
        self._lock = threading.Lock()

    def start(self, name: str, arguments: Sequence[str]) -> Launch:
        """Run `moevolve ARGUMENTS` in the background, in a session of its own.

        Args:
            name: what for; there is one process at a time for a name.
            arguments: of the command line, the command first.

        Raises:
            UserError: one for this name still runs, or the log can't be written.
        """
        with self._lock:
            earlier = self._started.get(name)
            if earlier is not None and earlier.process.poll() is None:
                raise UserError(
                    f"{name} is being worked on by process {earlier.process.pid}; its log tells how far it is"
                )
            try:
                self._logs.mkdir(parents=True, exist_ok=True)
                with self.log_file(name).open("ab") as log:
                    process = subprocess.Popen(
                        [sys.executable, "-m", "moevolve.search.cli", *arguments],
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        env=_inherited() | self._environment,
                        start_new_session=True,
                    )
            except OSError as error:
                raise UserError(f"logs: {self.log_file(name)} can't be written: {error.strerror}") from None
            others = {other: started for other, started in self._started.items() if other != name}
            # In one step: others may be reading it.
            self._started = others | {name: _Started(arguments[0], datetime.now(UTC), process)}
        return self.launch(name)

    def launch(self, name: str) -> Launch:
        """What became of what was started for a name.

        Raises:
            KeyError: nothing was, by this server.
        """
        started = self._started[name]
        code = started.process.poll()
        lines = self.log(name).strip().splitlines()
        last = lines[-1] if lines else ""
        return Launch(name, started.command, started.at, started.process.pid, code is None, code, last)

    def launches(self) -> list[Launch]:
        """All that this server started, the latest last, and what became of it."""
        return [self.launch(name) for name in list(self._started)]

    def log_file(self, name: str) -> Path:
        """Where what is started for a name writes to; names are checked before, and have no folders in them."""
        return self._logs / f"{name.replace(':', '@')}.log"

    def log(self, name: str) -> str:
        """The last of the log of what was started for a name, by this server or one before it; empty if nothing was."""
        try:
            with self.log_file(name).open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
                return log.read().decode("utf-8", "replace")
        except FileNotFoundError:
            return ""


def _inherited() -> dict[str, str]:
    """The server's environment, without what is its own: commands would ask a server in the place of the store."""
    own = ("MOEVOLVE_SERVER", "MOEVOLVE_TOKEN", "MOEVOLVE_READ_TOKEN", "MOEVOLVE_WRITE_TOKEN")
    return {name: value for name, value in os.environ.items() if name not in own}
