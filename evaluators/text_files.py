"""Reading and writing text files, with errors of one line that name the file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moevolve.evaluators.errors import UserError


def read_lines(path: Path, missing: str = "") -> list[str]:
    """Read the lines of a UTF-8 file; `missing` is added to the message if there is no such file.

    Raises:
        UserError: It is missing, not UTF-8, or can't be read.
    """
    try:
        # Not splitlines(), which also splits at U+2028 and other separators that JSON strings may contain.
        return path.read_text(encoding="utf-8-sig").split("\n")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file{missing}") from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise UserError(f"{path}:{line}: not UTF-8 text; convert the file first") from None
    except OSError as error:
        raise UserError(f"{path}: can't be read: {error.strerror}") from None


def parse_line(line: str, place: str) -> dict[str, Any]:
    """Read a JSON object from a line; `place` is its `file:line` for messages.

    Raises:
        UserError: It isn't JSON that `parse_json` reads, or no object.
    """
    try:
        row = parse_json(line)
    except ValueError as error:
        raise UserError(f"{place}: {error}") from None
    if not isinstance(row, dict):
        raise UserError(f"{place}: expected a JSON object with named fields, got {type(row).__name__}")
    return row


def parse_json(text: str) -> Any:
    """Read JSON whose strings can be written as UTF-8.

    Raises:
        ValueError: It isn't such JSON; the message is for the user.
    """
    try:
        value = json.loads(text)
        if "\\u" in text:  # nothing else writes half of a character, which no tokenizer or file takes
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}") from None
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise ValueError(f"it has half of a character, {half!r}; write both halves, or leave it out") from None
    except RecursionError:
        raise ValueError("its brackets are nested too deeply to be read") from None
    except ValueError:  # Python's limit
        raise ValueError("it has a number with thousands of digits; write it as a text") from None
    return value


@contextmanager
def writing_into(folder: Path) -> Iterator[None]:
    """Make a folder if need be, and name the file if the `with` block can't write one.

    Raises:
        UserError: The folder or a file can't be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise UserError(f"{error.filename or folder}: can't be written: {error.strerror}") from None
