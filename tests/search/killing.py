"""Searches as processes of their own, which tests interrupt in the middle."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

MOEVOLVE = str(Path(sys.executable).with_name("moevolve"))


def start(command: list[str], folder: Path) -> subprocess.Popen[str]:
    """The command line as the leader of a process group."""
    return subprocess.Popen(
        [MOEVOLVE, *command],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def count(database: Path) -> int:
    """Individuals whose evaluation is recorded."""
    try:
        with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as connection:
            query = "select count(*) from individuals where status <> 'pending'"
            return int(connection.execute(query).fetchone()[0])
    except sqlite3.OperationalError:
        return 0


def last_worker(database: Path) -> int:
    """Process id of the worker that ran the newest evaluation."""
    with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as connection:
        worker = connection.execute("select worker from evaluations order by rowid desc limit 1").fetchone()[0]
    return int(worker.rpartition("/")[2])


def wait_for(database: Path, goal: int, process: subprocess.Popen[str]) -> None:
    """Until so many individuals are evaluated."""
    deadline = time.monotonic() + 400
    while count(database) < goal:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "the search makes no progress"
        time.sleep(0.02)


def kill_at(command: list[str], folder: Path, database: Path, goal: int, delay: float) -> None:
    """Start a driver, and kill it `delay` seconds after so many individuals are evaluated."""
    process = start(command, folder)
    wait_for(database, goal, process)
    time.sleep(delay)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    # What Ray left behind would only slow the next attempt down.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
