"""Searches as processes of their own, which tests interrupt in the middle."""

from __future__ import annotations

import multiprocessing
import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from waiting import Process, until

MOEVOLVE = str(Path(sys.executable).with_name("moevolve"))
PRELOADED = [
    "moevolve.search.running.launch",
    "moevolve.search.pools.ray_pool",
    "moevolve.workers.worker",
]
"""What the process that drivers are forked from imports of the product; where tests have their modules it doesn't know.
There is one such process, so tests of all kinds name the same modules."""


def forked(function: Callable[..., None], *arguments: Any) -> Any:
    """A running process, forked from one that has imported torch and its like already, that calls a function of the
    labs."""
    context = multiprocessing.get_context("forkserver")
    # Not the command line itself, which asks at its import whether it writes to a terminal.
    context.set_forkserver_preload(PRELOADED)
    process = context.Process(target=function, args=arguments)
    process.start()
    return process


def start(command: list[str], folder: Path) -> subprocess.Popen[str]:
    """The installed command line, as users start it."""
    return subprocess.Popen(
        [MOEVOLVE, *command],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def serving(url: str, folder: Path) -> tuple[subprocess.Popen[str], str]:
    """`moevolve serve` on a free port, once it listens, and its address."""
    command = [MOEVOLVE, "serve", "--store", url, "--port", "0"]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline().split()[2].rstrip(";")


class Forked:
    """The command line in a process that is forked from one which has imported torch and its like already.

    For tests of what a driver leaves behind, which start many: a process of its own in all, but the first seconds.

    Args:
        command: Arguments of `moevolve`.
        folder: Working directory.
        pool: Function of `disturbed_lab` that makes the pool of workers that score by a formula; None for Ray.
        log: File to which its output is appended; None for one in `folder`.
        env: Its environment; None for that of the process that it is forked from.
    """

    def __init__(
        self,
        command: list[str],
        folder: Path,
        pool: str | None = None,
        log: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._log = log or folder / f"driver-{time.monotonic_ns()}.log"
        self._process = forked(_run_command, command, folder, self._log, pool, env)
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def terminate(self) -> None:
        self._process.terminate()

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        self._process.join(timeout)
        assert self._process.exitcode is not None, f"still running: {self._log.read_text()}"
        return self._log.read_text(), None


def _run_command(
    command: list[str],
    folder: Path,
    log: Path,
    pool: str | None,
    env: Mapping[str, str] | None,
) -> None:
    os.setsid()
    os.chdir(folder)
    if env is not None:
        os.environ.clear()
        os.environ.update(env)
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv = ["moevolve", *command]

    from moevolve.search.cli import main
    from moevolve.search.running import execute

    if pool is not None:
        import disturbed_lab

        execute.ray_pool = getattr(disturbed_lab, pool)
        vars(execute)["LEASE_S"] = disturbed_lab.LEASE_S
    main()


def count(database: Path) -> int:
    """Individuals whose evaluation is recorded."""
    try:
        with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as connection:
            query = "select count(*) from individuals where status <> 'pending'"
            return int(connection.execute(query).fetchone()[0])
    except sqlite3.OperationalError:
        return 0


def wait_for(database: Path, goal: int, process: Process) -> None:
    """Until so many individuals are evaluated."""
    until(lambda: count(database) >= goal, process, lambda: "the search makes no progress")
