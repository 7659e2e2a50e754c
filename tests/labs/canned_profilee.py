"""Stands for `moevolve.workers.profiling.process`: answers as it does, holds no model, writes down what it is asked.

`CannedProfilees` starts this file in the place of the profiler's processes. Every one appends lines to one log: the
model's path and what was asked of it. A path that ends in `killed` is of a process that is killed when it should load.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from moevolve.workers.profiling.report import LoadReply, MeasureReply


class CannedProfilees:
    """Puts this file where the profiler finds Python.

    Attributes:
        log: what all of them were asked, in order.
    """

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path) -> None:
        self.log = folder / "asked.log"
        self.log.touch()
        python = folder / "python"
        command = shlex.join([sys.executable, "-P", __file__, str(self.log)])
        # The last argument is the number of the connection.
        python.write_text(f"#!/bin/sh\nfor last; do :; done\nexec {command} $last\n")
        python.chmod(0o755)
        patch.setattr(sys, "executable", str(python))

    @property
    def events(self) -> list[str]:
        return self.log.read_text().splitlines()


def main(log: Path, connection: Connection) -> None:
    name = ""
    while True:
        try:
            request = connection.recv()
        except EOFError:
            return
        before = log.read_text().splitlines()
        if isinstance(request, tuple):
            model, _ = request
            name = model.path
            if name.endswith("killed"):
                os.kill(os.getpid(), signal.SIGKILL)
            others = sum(_runs(int(event.split()[-1])) for event in before if "loads" in event)
            spread = f" {model.device_map}" if model.device_map else ""
            event = f"{name} loads{spread} beside {others}, pid {os.getpid()}"
            free = 79 if name == "crowded" else 80  # another one and what it runs in take 80
            reply: LoadReply | MeasureReply = LoadReply(
                10, 5, 40, 8, 2, "llama", "float32", "cpu", "CPU", 1, "sdpa", "-", free
            )
        else:
            event = f"{name} {request}"
            unknown = name == "two" and request == 3
            reply = MeasureReply(2.0, 1.0, None if unknown else 101 + len(before))
        with log.open("a") as file:
            file.write(f"{event}\n")
        connection.send(reply)


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


if __name__ == "__main__":
    main(Path(sys.argv[1]), Connection(int(sys.argv[2])))
