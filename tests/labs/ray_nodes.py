"""Ray nodes of the tests' own, started as users start them, with `ray start`.

Several on one machine need nothing but free ports. What the user has stays untouched: home and temporary folder are
the test's own, the latter with a short path, because sockets lie in it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from waiting import PATIENT_S

RAY = str(Path(sys.executable).with_name("ray"))
SETTINGS = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_ADDRESS")
"""What Ray reads of its users' environment."""


FRUGAL: dict[str, Any] = {
    "no_monitor": True,
    "include_dashboard": False,
    "include_log_monitor": False,
    "_system_config": {"enable_worker_prestart": False, "prestart_worker_first_driver": False},
}
"""Of a head: no processes for an autoscaler, a dashboard, logs, and workers that might be wanted one day."""


def free_ports(count: int) -> list[int]:
    """So many different ones."""
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [int(server.getsockname()[1]) for server in servers]


class Nodes:
    """Nodes that end with the test.

    Attributes:
        env: what their users have in their environment, no mode and no token.
    """

    def __init__(self, home: Path, scratch: Path) -> None:
        clean = {key: value for key, value in os.environ.items() if key not in SETTINGS}
        self.env = clean | {"HOME": str(home), "RAY_TMPDIR": str(scratch), "RAY_USAGE_STATS_ENABLED": "0"}
        self._groups: list[int] = []

    def start(self, env: Mapping[str, str], *options: str) -> int:
        """`ray start` on 127.0.0.1, whose processes stay behind in the group of the command; the group's id."""
        process = subprocess.Popen(
            [RAY, "start", *options, "--node-ip-address", "127.0.0.1"],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._groups.append(process.pid)
        output, _ = process.communicate(timeout=PATIENT_S)
        assert process.returncode == 0, output
        return process.pid

    def kill(self, group: int) -> None:
        """End a node as a power cut does."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)

    def kill_all(self) -> None:
        for group in self._groups:
            self.kill(group)


@contextlib.contextmanager
def own_nodes(home: Path) -> Iterator[Nodes]:
    """Nodes to be started; they are gone afterwards, and what they wrote."""
    scratch = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
    nodes = Nodes(home, scratch)
    try:
        yield nodes
    finally:
        nodes.kill_all()
        shutil.rmtree(scratch, ignore_errors=True)
