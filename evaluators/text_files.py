"""Reading and writing text files, with errors of one line that name the file."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moevolve.evaluators.errors import UserError, one_line, path_fault

# Bytes of a table's cell; Python's own limit is shorter than long prompts.
_LONGEST_CELL = 1 << 27


def read_lines(path: Path, missing: str = "") -> list[str]:
    """Read the lines of a UTF-8 file; `missing` is added to the message if the file doesn't exist.

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
    except (OSError, ValueError) as error:
        raise UserError(path_fault(error, path) or f"{path}: can't be read: {error}") from None


# Names of files that `read_rows` reads end in one of these.
ROW_FILES = (".jsonl", ".json", ".csv", ".tsv")
Row = dict[str, object]
# Malformed rows of a file after which no more are read, those that a message names, and most characters about each.
MOST_FAULTS, _SHOWN_FAULTS, _LONGEST_FAULT = 1000, 3, 500


def read_rows(path: Path, missing: str = "") -> Iterator[tuple[str, Row | UserError]]:
    """Read rows with named fields, each with its place for messages, from a file of one of `ROW_FILES`.

    They are JSON objects, one a line or in one array, or lines of a table whose first line has the names; its empty
    cells are left out. A malformed row is an error in the place of the row, so that all of them can be counted.
    `missing` is added to the message if the file doesn't exist.

    Raises:
        UserError: The file is missing, not UTF-8, or can't be read.
    """
    lines = read_lines(path, missing)
    if path.suffix.lower() in (".csv", ".tsv"):
        yield from _read_table(lines, path)
        return
    if next((line.lstrip()[0] for line in lines if line.strip()), "") == "[" and path.suffix.lower() == ".json":
        try:
            found = parse_json("\n".join(lines))
        except ValueError as error:
            raise UserError(f"{path}: {error}") from None
        for number, row in enumerate(found, start=1):
            place = f"{path}: row {number}"
            yield place, _checked_row(row, place)
        return
    for number, line in enumerate(lines, start=1):
        if line.strip():
            place = f"{path}:{number}"
            try:
                yield place, _checked_row(parse_json(line), place)
            except ValueError as error:
                yield place, UserError(f"{place}: {error}")


def _checked_row(row: object, place: str) -> Row | UserError:
    if isinstance(row, dict):
        return row
    return UserError(f"{place}: expected a JSON object with named fields, got {type(row).__name__}")


def _read_table(lines: Sequence[str], path: Path) -> Iterator[tuple[str, Row | UserError]]:
    csv.field_size_limit(max(csv.field_size_limit(), _LONGEST_CELL))
    reader = csv.reader((f"{line}\n" for line in lines), delimiter="\t" if path.suffix.lower() == ".tsv" else ",")
    try:
        names = next(reader, [])
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise UserError(f"{path}:1: the first line has the name `{twice}` twice; rename one column")
        begun = reader.line_num + 1
        for cells in reader:
            place, begun = f"{path}:{begun}", reader.line_num + 1
            if len(cells) > len(names):
                yield place, UserError(f"{place}: it has {len(cells)} cells, and the first line {len(names)} names")
            elif any(cells):
                yield place, {name: cell for name, cell in zip(names, cells, strict=False) if cell}
    except csv.Error as error:
        raise UserError(f"{path}:{reader.line_num}: not a table: {error}") from None


def refuse_faults(path: Path, faults: Sequence[tuple[str, str]], rows: int) -> None:
    """Raise an error that counts the malformed rows of a file and names the first ones, if there are any.

    What is wrong with several rows, and what to do about all of them, is said once.

    Args:
        path: The file.
        faults: Place and message of each malformed row; the message begins with the place.
        rows: Number of rows that were read.
    """
    if len(faults) == 1:
        raise UserError(one_line(faults[0][1], _LONGEST_FAULT))
    if faults:
        places: dict[str, list[str]] = {}
        for place, fault in faults[:_SHOWN_FAULTS]:
            places.setdefault(one_line(fault.removeprefix(place), _LONGEST_FAULT), []).append(place)
        advised = {message.rpartition("; ")[2] for message in places}
        advice = f"; {advised.pop()}" if len(places) > 1 and len(advised) == 1 else ""
        named = [f"{', '.join(alike)}{message.removesuffix(advice)}" for message, alike in places.items()]
        named += [] if len(faults) <= _SHOWN_FAULTS else ["..."]
        of = f"{len(faults):,} of {'the first ' if len(faults) >= MOST_FAULTS else ''}{rows:,}"
        raise UserError(f"{path}: {of} rows can't be used: {'; '.join(named)}{advice}")


class _TwiceError(ValueError):
    """A JSON object has two values of one name; Python would keep the last."""


def parse_json(text: str) -> Any:
    """Read JSON whose strings can be written as UTF-8.

    Raises:
        ValueError: It isn't such JSON; the message is for the user.
    """
    try:
        value = json.loads(text, object_pairs_hook=_object)
        if "\\u" in text:  # nothing else writes half of a character, which no tokenizer or file takes
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}") from None
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise ValueError(f"it has half of a character, {half!r}; write both halves, or leave it out") from None
    except RecursionError:
        raise ValueError("its brackets are nested too deeply to be read") from None
    except _TwiceError:
        raise
    except ValueError:  # Python's limit
        raise ValueError("it has a number with thousands of digits; write it as a text") from None
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise _TwiceError(f"it has `{next(name for name in names if names.count(name) > 1)}` twice; leave one out")
    return found


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
        raise UserError(path_fault(error, folder) or f"{folder}: can't be written: {error}") from None
