"""The files of the product that records pass through during a call."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[2]


@cache
def product_file(name: str) -> str | None:
    """A file of the product as its path in the repository; None for others."""
    path = Path(name)
    if not path.is_relative_to(ROOT) or {".venv", "tests"} & set(path.relative_to(ROOT).parts):
        return None
    return path.relative_to(ROOT).as_posix()


def traced_path(run: Callable[[], Any], records: tuple[type, ...]) -> set[str]:
    """The files whose functions take or return a record, or a list or tuple that begins with one, during a call.

    A record's own methods don't count.
    """
    found = set[str]()

    def holds_record(value: Any) -> bool:
        return isinstance(value, records) or (
            isinstance(value, list | tuple) and isinstance(next(iter(value), None), records)
        )

    def note(frame: FrameType, event: str, returned: Any) -> None:
        code = frame.f_code
        if event not in ("call", "return") or (file := product_file(code.co_filename)) is None or file in found:
            return
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        values = [frame.f_locals.get(name) for name in names if name != "self"] if event == "call" else [returned]
        if any(map(holds_record, values)):
            found.add(file)

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


def listed_path(readme: Path, heading: str) -> set[str]:
    """The files in the first table below a heading of a README."""
    table = readme.read_text(encoding="utf-8").split(f"## {heading}")[1].split("\n\n")[2]
    return set(re.findall(r"`([\w/<>]+\.py)`", table))
