"""Functions in processes of their own, under a kernel limit on host memory.

`RLIMIT_DATA` bounds private writable memory, resident or not. The metered device's blocks are shared mappings and don't
count, so the limit is the host's alone; but torch maps checkpoints to be copied on write, so a limit has to leave room
for the files that are open.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_LABS = Path(__file__).parents[1]
_ENV = {
    # Large blocks go back to the kernel when they are freed, so that what is held is what is booked.
    "MALLOC_MMAP_THRESHOLD_": str(1 << 18),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 18),
    "MALLOC_ARENA_MAX": "2",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}


@dataclass(frozen=True)
class Outcome:
    """How a child ended.

    Attributes:
        result: what the function returned, if it did.
        failure: why it didn't.
        peak: its largest resident set, bytes (`ru_maxrss`; shared mappings and mapped files count).
    """

    result: Any
    failure: str | None
    peak: int


def in_child(function: str, arguments: dict[str, Any], data_limit: int | None = None, timeout: float = 3600) -> Outcome:
    """Run `module:name` of the labs with arguments that JSON can carry.

    Args:
        function: what to call; what it returns must be what JSON can carry.
        arguments: by name.
        data_limit: bytes of private memory that the kernel lets it have.
        timeout: seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder, "outcome.json")
        request = json.dumps({"function": function, "arguments": arguments, "limit": data_limit, "told": str(told)})
        command = [sys.executable, "-P", str(Path(__file__).resolve()), request]
        path = os.pathsep.join([str(_LABS), *filter(None, [os.environ.get("PYTHONPATH")])])
        ended = subprocess.run(command, env={**os.environ, **_ENV, "PYTHONPATH": path}, timeout=timeout, check=False)
        if not told.is_file():
            return Outcome(None, f"it ended with code {ended.returncode}", 0)
        return Outcome(**json.loads(told.read_text()))


def main() -> None:
    request = json.loads(sys.argv[1])
    module, name = request["function"].split(":")
    if request["limit"] is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (request["limit"], request["limit"]))
    result = failure = None
    try:
        result = getattr(importlib.import_module(module), name)(**request["arguments"])
    except Exception as error:  # noqa: BLE001 - told to the parent
        traceback.print_exc()
        failure = f"{type(error).__name__}: {error}"
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    Path(request["told"]).write_text(json.dumps({"result": result, "failure": failure, "peak": peak}))


if __name__ == "__main__":
    main()
