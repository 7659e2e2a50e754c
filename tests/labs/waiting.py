"""How tests wait for what takes a moment: Ray, processes, threads, a browser."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

PATIENT_S = 400.0
"""Far more than any of it takes, however much else the machine computes; pytest ends a whole test after 600 s."""


class Process(Protocol):
    """A running command."""

    def poll(self) -> int | None: ...

    def communicate(self, timeout: float | None = None) -> tuple[Any, Any]: ...


def until(true: Callable[[], object], process: Process | None = None, why: Callable[[], object] = str) -> None:
    """Waits until something is true.

    Args:
        true: Asked again and again.
        process: If it ends first, the wait fails with its output.
        why: Returns what to show if it takes too long.
    """
    deadline = time.monotonic() + PATIENT_S
    while not true():
        assert process is None or process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, why()
        time.sleep(0.02)
