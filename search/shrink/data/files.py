"""Files of requests as people have them.

They are JSON, tables (CSV, parquet), running text, folders of texts, and data sets of the hub, which may have other
columns beside those of `rows.py`.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from moevolve.evaluators.errors import UserError, first_line, one_line
from moevolve.evaluators.text_files import MOST_FAULTS, ROW_FILES, read_lines, read_rows, refuse_faults
from moevolve.search.shrink.data.columns import IGNORED, OFTEN, Columns, Unread
from moevolve.search.shrink.data.rows import DataRow, LeftOutError, read_row, without_nulls

_LOG = logging.getLogger(__name__)

# Rows as plain data, or what is wrong with them, each with its place for error messages.
Places = Iterator[tuple[str, Mapping[str, object] | UserError]]
# What tells a row's form: the column that has the question, whether there is an answer, and choices.
_Form = tuple[str, bool, bool]
# Names of files of running text end in one of these.
TEXT_FILES = (".txt", ".md")
DATA_FILES = (*ROW_FILES, ".parquet", *TEXT_FILES)
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
# Most rows of a data set of the hub that are read: the first ones. A search uses a few thousand.
_HUB_ROWS = 20_000

# Marks of turns that chat templates write, and text written into prompts for the same end.
_TURN_MARKS = re.compile(
    r"<\|im_start\|>|<\|start_header_id\|>|<\|start_of_role\|>|<start_of_turn>|\[/INST\]|<\|(?:user|assistant)\|>"
    r"|<｜(?:User|Assistant)｜>|<\|start\|>|^\s*(?:### ?)?Human: .*?\n\s*(?:### ?)?Assistant: ?\S",
    re.IGNORECASE | re.DOTALL,
)
# What may follow the whole example in a text.
_END_MARKS = re.compile(r"(?:[\s.]|<[^<>\s]{1,24}>|### ?End)+\Z")

# Fewest characters of a row of running text. Paragraphs are joined up to that, since single lines say little.
_TEXT_CHARACTERS = 400

# Largest answer that is compared as text. Longer ones are worded in more than one right way.
_SHORT_WORDS, _SHORT_CHARACTERS = 6, 48


def is_short(answer: str) -> bool:
    """Return whether an answer is compared as text."""
    return "\n" not in answer and len(answer) <= _SHORT_CHARACTERS and len(answer.split()) <= _SHORT_WORDS


@dataclass(frozen=True, slots=True)
class DataFile:
    """The rows of one file, all of one form, or of a folder of documents.

    Attributes:
        is_text: True for running text, which has no answers and isn't put into a chat template.
    """

    path: Path
    is_text: bool
    rows: tuple[DataRow, ...]


def read_data(path: Path, columns: Columns | None = None) -> DataFile:
    """Read a file of requests, a folder of documents, or the split `train` of a data set of the hub.

    Raises:
        UserError: The file is missing, empty or of a form that isn't read, or rows are malformed or of another form
            than the first. The message counts them, and names file and line of the first three.
    """
    suffix = path.suffix.lower()
    if path.is_dir():
        return DataFile(path, True, tuple(_documents(path)))
    if suffix in TEXT_FILES:
        rows = list(_paragraphs(read_lines(path)))
    elif suffix == ".parquet":
        rows = _rows(path, _parquet(path), columns)
    elif suffix in ROW_FILES:
        rows = _rows(path, read_rows(path), columns)
    elif path.exists() or not _HUB_ID.fullmatch(str(path)):
        raise UserError(f"--data {path}: the name must end in one of {', '.join(DATA_FILES)}, or be a folder's")
    else:
        rows = _rows(path, _hub(str(path), columns), columns)
    if not rows:
        raise UserError(f"{path}: the file is empty")
    # If one row says more than turns do, all keep their chats, so that they are rendered alike.
    chats = (row.chat for row in rows if row.chat is not None)
    if not any(chat.says_more or chat.further for chat in chats):
        rows = [replace(row, chat=None) for row in rows]
    return DataFile(path, suffix in TEXT_FILES, tuple(rows))


def checked(data: DataFile) -> DataFile:
    """Refuse a file whose prompts are chats as a template wrote them, or have their own answers.

    Another template would be put around the former. The latter happens where the column of whole examples is read as
    the prompt. Short answers are rightly in a passage or among options, but not at the end of nearly all prompts.
    """
    if data.is_text:
        return data
    marks = [found for row in data.rows if (found := _TURN_MARKS.search(row.prompt)) is not None]
    if len(marks) > OFTEN * len(data.rows):
        raise UserError(
            f"{data.path}: {len(marks):,} of {len(data.rows):,} rows are chats that a template has written "
            f"(`{one_line(marks[0][0], 24)}`); give their turns as `messages`, since the model's is put around prompts"
        )
    pairs = []
    for row in data.rows:
        answer = row.answer if row.chat is None or row.chat.answer is None else row.chat.answer.content
        if answer and answer.strip() and not row.choices:
            asked = [text for role, text in row.turns if role != "assistant"]
            pairs.append(("\n".join((*asked, row.prompt)), answer.strip()))
    inside = sum(answer in asked for asked, answer in pairs if not is_short(answer))
    ends = ((asked[-len(answer) - 200 :], answer) for asked, answer in pairs if is_short(answer))
    bare = ((_END_MARKS.sub("", asked), _END_MARKS.sub("", answer)) for asked, answer in ends)
    ending = sum(bool(answer) and asked.endswith(answer) for asked, answer in bare)
    if inside > OFTEN * len(pairs) or ending > (1 - OFTEN) * len(pairs):
        raise UserError(
            f"{data.path}: {max(inside, ending):,} of {len(pairs):,} answers stand in their own prompts; name with "
            "--columns a column that has the question alone, as in --columns prompt=question,answer=response"
        )
    return data


def _documents(folder: Path) -> Iterator[DataRow]:
    """Return the rows of all texts in a folder and the folders below it, each with the beginning of its document."""
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in TEXT_FILES and path.is_file())
    if not paths:
        raise UserError(f"--data {folder}: the folder has no .txt or .md files; name files of other forms one by one")
    for path in paths:
        rows = list(_paragraphs(read_lines(path)))
        yield from (replace(row, first_message=rows[0].prompt) for row in rows)


def _parquet(path: Path) -> Places:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        rows = parquet.read_table(path).to_pylist()
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (OSError, pa.ArrowException) as error:
        raise UserError(f"{path}: can't be read as a parquet file: {first_line(error)}") from None
    for number, row in enumerate(rows, start=1):
        yield f"{path}: row {number}", without_nulls(row)


def _hub(name: str, columns: Columns | None) -> Places:
    """Return the rows of a data set of the hub, without the columns that --columns ignores."""
    from moevolve.evaluators.tasks.config import Source
    from moevolve.evaluators.tasks.datasets import load_table

    ignored = [column for column, field_name in (columns or {}).items() if field_name == IGNORED]
    table = load_table(Source(hub=name), "train").without(ignored)
    for number in range(min(len(table), _HUB_ROWS)):
        yield table.place(number), without_nulls(table.row(number))


def _paragraphs(text: Iterable[str]) -> Iterator[DataRow]:
    """Return the rows of running text: whole paragraphs, joined up to `_TEXT_CHARACTERS`."""
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


def _rows(path: Path, read: Places, columns: Columns | None) -> list[DataRow]:
    """Return the rows of a file, all of one form.

    Few rows without an answer are left out, as trainers do, and all that are marked as bad or are empty texts.
    """
    given, unread = list(read), Unread()
    every = tuple(dict.fromkeys(name for _, found in given if not isinstance(found, UserError) for name in found))
    done, faults, left_out = list[tuple[str, _Form, DataRow]](), dict[str, str](), Counter[str]()
    for place, found in given:
        try:
            if isinstance(found, UserError):
                raise found
            each = read_row(found, place, columns, every)
            unread.add(place, each.unread, each.texts)
            done.append((place, (each.key, each.row.answer is not None, bool(each.row.choices)), each.row))
        except LeftOutError as error:
            left_out[str(error)] += 1
        except UserError as error:
            faults[place] = str(error)  # not the error, which would keep what the row was read into
            if len(faults) == MOST_FAULTS:
                break
    for reason, count in left_out.items():
        _LOG.warning("%s: left out %d of %d rows: %s", path, count, len(given), reason)
    tried, done = len(done) + len(faults), _answered(path, done)
    for place, form, _ in done:
        if form != done[0][1]:
            words = f"{_form_words(form)}, but {_form_words(done[0][1])} at {done[0][0]}"
            faults[place] = f"{place}: {words}; put rows of each form into a file"
    refuse_faults(path, [(place, faults[place]) for place, _ in given if place in faults], tried)
    unread.refuse(every)
    return [row for _, _, row in done]


def _answered(path: Path, rows: list[tuple[str, _Form, DataRow]]) -> list[tuple[str, _Form, DataRow]]:
    """Leave out rows without answers if they are few."""
    answered = [(place, form, row) for place, form, row in rows if form[1]]
    silent = len(rows) - len(answered)
    if silent > OFTEN * len(rows):
        return rows
    if silent:
        _LOG.warning("%s: left out %d of %d rows: they have no answer, or an empty one", path, silent, len(rows))
    return answered


def _form_words(form: _Form) -> str:
    key, answered, chosen = form
    with_answer = "with an answer" if answered else "without an answer, or with an empty one"
    return f"a row with `{key}`, {with_answer}{' and choices' if chosen else ''}"
