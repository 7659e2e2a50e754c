"""Files of requests as people have them: JSONL, parquet, running text, folders of texts, and data sets of the hub.

Rows are those of `rows.py`. Data sets of the hub may have other columns beside them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moevolve.evaluators.errors import UserError, first_line
from moevolve.evaluators.text_files import parse_line, read_lines
from moevolve.search.shrink.rows import FORMS, DataRow, read_row, without_nulls

Places = Iterator[tuple[str, Mapping[str, Any]]]
"""Rows as plain data, each with its place for error messages."""
_TEXTS = (".txt", ".md")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_ROWS = 20_000
"""Most rows of a data set of the hub that are read: the first ones. A search uses a few thousand."""

_TEXT_CHARACTERS = 400
"""Fewest characters of a row of running text. Paragraphs are joined up to that, since single lines say little."""


@dataclass(frozen=True, slots=True)
class DataFile:
    """The rows of one file, all of one form, or of a folder of documents.

    Attributes:
        is_text: True for running text, which has no answers and isn't put into a chat template.
    """

    path: Path
    is_text: bool
    rows: tuple[DataRow, ...]


def read_data(path: Path) -> DataFile:
    """Read a file of requests, a folder of documents, or the split `train` of a data set of the hub.

    Raises:
        UserError: The file is missing, empty or of a form that isn't read, or a row is malformed or of another form
            than the rows before it. The message names file and line.
    """
    suffix = path.suffix.lower()
    if path.is_dir():
        return DataFile(path, True, tuple(_documents(path)))
    if suffix not in (".jsonl", ".parquet", *_TEXTS):
        if path.exists() or not _HUB_ID.fullmatch(str(path)):
            raise UserError(f"--data {path}: the name must end in .jsonl, .parquet, .txt or .md, or be a folder's")
        rows = list(_rows(_hub(str(path))))
    elif suffix in _TEXTS:
        rows = list(_paragraphs(read_lines(path)))
    else:
        rows = list(_rows(_parquet(path) if suffix == ".parquet" else _jsonl(path)))
    if not rows:
        raise UserError(f"{path}: the file is empty")
    return DataFile(path, suffix in _TEXTS, _of_one_kind(rows))


def _documents(folder: Path) -> Iterator[DataRow]:
    """Rows of all texts in a folder and the folders below it, each with the beginning of its document."""
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in _TEXTS and path.is_file())
    if not paths:
        raise UserError(f"--data {folder}: the folder has no .txt or .md files; name files of other forms one by one")
    for path in paths:
        rows = list(_paragraphs(read_lines(path)))
        yield from (replace(row, first_message=rows[0].prompt) for row in rows)


def _jsonl(path: Path) -> Places:
    for number, line in enumerate(read_lines(path), start=1):
        if line.strip():
            yield f"{path}:{number}", parse_line(line, f"{path}:{number}")


def _parquet(path: Path) -> Places:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        rows = parquet.read_table(path).to_pylist()
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (OSError, pa.ArrowException) as error:
        raise UserError(f"{path}: not a parquet file: {first_line(error)}") from None
    for number, row in enumerate(rows, start=1):
        yield f"{path}: row {number}", without_nulls(row)


def _hub(name: str) -> Places:
    """Rows of a data set of the hub, without the columns that no form has."""
    from moevolve.evaluators.tasks.config import Source
    from moevolve.evaluators.tasks.datasets import load_table

    table = load_table(Source(hub=name), "train")
    form = next((key for key in FORMS if key in table.columns), None)
    wanted = table.columns if form is None else (form, *FORMS[form].model_fields)
    for number in range(min(len(table), _HUB_ROWS)):
        row = table.row(number)
        yield table.place(number), without_nulls({key: row[key] for key in wanted if key in row})


def _of_one_kind(rows: list[DataRow]) -> tuple[DataRow, ...]:
    """The rows, all with their chats if one of them has tools, so that they are rendered alike."""
    if any(row.chat is not None and row.chat.has_tools for row in rows):
        return tuple(rows)
    return tuple(replace(row, chat=None) for row in rows)


def _paragraphs(text: Iterable[str]) -> Iterator[DataRow]:
    """Rows of running text: whole paragraphs, joined up to `_TEXT_CHARACTERS`."""
    lines: list[str] = []
    for line in (*text, ""):
        if line.strip():
            lines.append(line)
            continue
        joined = "\n".join(lines).strip()
        if len(joined) >= _TEXT_CHARACTERS:
            yield DataRow(joined, joined)
            lines = []
        elif lines:
            lines.append("")
    rest = "\n".join(lines).strip()
    if rest:
        yield DataRow(rest, rest)


def _rows(read: Places) -> Iterator[DataRow]:
    first: tuple[str, bool, bool] | None = None
    begun = ""
    for place, found in read:
        key, row = read_row(found, place)
        form = key, row.answer is not None, bool(row.choices)
        if first is None:
            first, begun = form, place
        if form != first:
            raise UserError(f"{place}: {_said(form)}, but {_said(first)} at {begun}; put rows of each form into a file")
        yield row


def _said(form: tuple[str, bool, bool]) -> str:
    key, answered, chosen = form
    return f"a row with `{key}`, with{'' if answered else 'out'} an answer{' and choices' if chosen else ''}"
