"""Functions that a child process calls in the tests of `moevolve.workers.children`."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moevolve.evaluators.errors import UserError

_POINTS: list[Point] = []


@dataclass(frozen=True, slots=True)
class Point:
    number: int
    names: tuple[str, ...]
    said: str | None


def note(point: Point) -> tuple[Point, ...]:
    """Every point that this process was given."""
    _POINTS.append(Point(point.number, point.names, os.environ.get("CHILD_SAYS")))
    return tuple(_POINTS)


def process_id() -> int:
    return os.getpid()


def read_and_print() -> str:
    print("this is no reply")
    os.write(1, b"nor is this\n")
    return os.read(0, 1).decode()


def refuse(message: str) -> None:
    raise UserError(message)


def divide(number: int) -> float:
    return 1 / number


def unsendable() -> Any:
    return object()


def leave(code: int) -> None:
    os.write(2, b"first\nit is over\n")
    os._exit(code)


def sleep(started: Path) -> None:
    started.write_text(str(os.getpid()))
    time.sleep(600)


def hoard(megabytes: int) -> None:
    taken = bytearray(megabytes << 20)
    time.sleep(600)
    del taken
