"""Servers in threads of this process: real ones on a port, without the seconds that new processes take to import."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import pytest
import uvicorn
from killing import Forked
from waiting import PATIENT_S

from moevolve.search.server import processes
from moevolve.search.server.app import make_app
from moevolve.search.server.connections import BoundedProtocol
from moevolve.search.server.settings import ServerSettings
from moevolve.store.repository import Store
from moevolve.workers.children.process import ChildProcess


@contextmanager
def served_here(settings: ServerSettings, pool: str) -> Iterator[str]:
    """The URL of a server on a free port.

    The commands that it starts are processes of their own, forked from one which has imported torch and its like, and
    their searches have a pool of `disturbed_lab`. It checks launches in this process, which has torch.
    """
    with pytest.MonkeyPatch.context() as patch, Store.open(settings.store) as store:
        popen = partial(forked_command, pool)
        patch.setattr(processes, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": popen}))
        patch.setattr(ChildProcess, "call", lambda _, function, *arguments: function(*arguments))
        app = make_app(store, settings)
        with in_thread(app, http=BoundedProtocol, ws="none", timeout_graceful_shutdown=1) as (port, _):
            yield f"http://127.0.0.1:{port}"


@contextmanager
def in_thread(app: Any, **settings: Any) -> Iterator[tuple[int, uvicorn.Server]]:
    """A server of an application with settings of uvicorn, and its port."""
    server = uvicorn.Server(uvicorn.Config(app, **{"log_level": "error"} | settings))
    # It listens from now on: requests wait until the server is ready for them.
    listening = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, args=([listening],))
    thread.start()
    try:
        yield listening.getsockname()[1], server
    finally:
        server.should_exit = True
        thread.join(PATIENT_S)


def forked_command(
    pool: str,
    command: list[str],
    *,
    stdin: int,
    stdout: BinaryIO,
    stderr: int,
    env: Mapping[str, str],
    start_new_session: bool,
) -> Forked:
    """In the place of `subprocess.Popen`, for commands whose output goes to a log."""
    assert command[:3] == [sys.executable, "-m", "moevolve.search.cli"] and start_new_session
    assert (stdin, stderr) == (subprocess.DEVNULL, subprocess.STDOUT)
    return Forked(command[3:], Path.cwd(), pool, log=Path(stdout.name), env=env)
