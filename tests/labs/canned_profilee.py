"""Stands for child processes that profile: answers as they do, holds no model, writes down what it is asked.

`CannedProfilees` starts this file in the place of the profiler's processes. Every one appends lines to one log: the
model's path and what was asked of it. A path that ends in `killed` is of a process that is killed when it should load,
and one that ends in `gone` of a model that doesn't load.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from moevolve.workers.profiling.report import LoadReply, MeasureReply

if TYPE_CHECKING:
    import pytest


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
        python.write_text(f"#!/bin/sh\nexec {command}\n")
        python.chmod(0o755)
        patch.setattr(sys, "executable", str(python))

    @property
    def events(self) -> list[str]:
        return self.log.read_text().splitlines()


def main(log: Path) -> None:
    name = ""
    for line in sys.stdin:
        _, function, arguments = json.loads(line)
        before = log.read_text().splitlines()
        if function == "load":
            model, _ = arguments
            name = model["path"]
            if name.endswith("killed"):
                os.kill(os.getpid(), signal.SIGKILL)
            if name.endswith("gone"):
                kind = ["moevolve.evaluators.errors", "UserError"]
                print(json.dumps({"error": f"it doesn't load: {name}", "kind": kind}), flush=True)
                continue
            others = sum(_runs(int(event.split()[-1])) for event in before if "loads" in event)
            spread = f" {model['device_map']}" if model["device_map"] else ""
            event = f"{name} loads{spread} beside {others}, pid {os.getpid()}"
            free = 79 if name == "crowded" else 80  # another one and what it runs in take 80
            reply: LoadReply | MeasureReply = LoadReply(
                10, 5, 40, "llama", "float32", "cpu", "CPU", 1, "sdpa", "-", free
            )
        else:
            (size,) = arguments
            event = f"{name} {size}"
            unknown = name == "two" and size == 3
            reply = MeasureReply(2.0, 1.0, None if unknown else 101 + len(before))
        with log.open("a") as file:
            file.write(f"{event}\n")
        print(json.dumps({"result": asdict(reply)}), flush=True)


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


if __name__ == "__main__":
    main(Path(sys.argv[1]))
