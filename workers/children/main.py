"""The program of a `ChildProcess`: calls functions as its parent asks, and ends with its parent.

A request is a line of JSON on the standard input: `[module, function, arguments]`. The reply is a line on what was the
standard output when the process started: `{"result": ...}`, or `{"error": message, "kind": [module, class]}`. Modules
are named, or given by file in an environment without moevolve, for which this one imports the standard library alone.
"""

import importlib
import json
import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TextIO


def reply(request: str) -> str:
    """Call the function that a request names."""
    try:
        module, name, arguments = json.loads(request)
        return json.dumps({"result": _function(module, name)(*arguments)}, default=asdict)
    except Exception as error:  # noqa: BLE001 - the parent decides what an error means
        kind = type(error)
        if not kind.__module__.startswith("moevolve."):
            traceback.print_exc()
        return json.dumps({"error": str(error), "kind": [kind.__module__, kind.__name__]})


def _function(module: str, name: str) -> Callable[..., object]:
    if not module.endswith(".py"):
        from pydantic import validate_call

        return validate_call(getattr(importlib.import_module(module), name))
    file = Path(module)
    if str(file.parent) not in sys.path:
        sys.path.insert(0, str(file.parent))
    function: Callable[..., object] = getattr(importlib.import_module(file.stem), name)
    return function


def _read(lines: TextIO, requests: queue.SimpleQueue[str]) -> None:
    for line in lines:
        requests.put(line)
    os._exit(0)  # the parent is gone; whatever runs is for nobody


def main(idle_s: float | None) -> None:
    """Reply to requests until the input ends, or until none has come for some time."""
    lines, replies = os.fdopen(os.dup(0), encoding="utf-8"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # nothing that is called reads requests
    os.dup2(2, 1)  # libraries print
    requests: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(lines, requests), daemon=True).start()
    while True:
        try:
            request = requests.get(timeout=idle_s)
        except queue.Empty:
            os._exit(0)
        print(reply(request), file=replies, flush=True)


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else None)
