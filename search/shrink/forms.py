"""Files of requests as people have them, read as rows of one form.

A line of a JSONL file, or a row of a parquet file, is `{"prompt", "answer"?, "choices"?}`, `{"text"}`, a chat in
OpenAI's form (`{"messages": [{"role", "content"}], "tools"?}`) or in ShareGPT's (`{"conversations": [{"from",
"value"}], "system"?, "tools"?}`). A .txt or .md file is running text, and so is a folder of them. A data set of the hub
has the same rows, with other columns beside them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moevolve.evaluators.errors import UserError, first_line
from moevolve.evaluators.text_files import parse_line, read_lines
from moevolve.search.shrink.chats import ToolChat, read_chat, read_sharegpt, text_of, without_nulls

_OTHERS = {
    ".csv": "CSV isn't read; write the rows as JSONL",
    ".json": "one JSON document isn't read; write one object per line, as JSONL",
}
_OLD_TOOLS = ("functions", "function_call")
"""Keys of OpenAI's earlier form of tool calls."""
_TEXTS = (".txt", ".md")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_ROWS = 20_000
"""Most rows of a data set of the hub that are read: the first ones. A search uses a few thousand."""

_TEXT_CHARACTERS = 400
"""Fewest characters of a row of running text. Paragraphs are joined up to that, since single lines say little."""


@dataclass(frozen=True, slots=True)
class DataRow:
    """One request.

    Attributes:
        prompt: The last user's turn, or the prompt or text.
        answer: The answer; None if there is none.
        choices: Closed set of answers; empty for open ones.
        turns: `(role, content)` of the turns before the prompt: at most one `system` turn, then `user` and `assistant`
            by turns.
        chat: The conversation with its tools, if any row of its file has some. `prompt` and `answer` are then made of
            it by the model's chat template.
        document: What the document begins with, if the row is a part of one in a folder.
    """

    prompt: str
    answer: str | None = None
    choices: tuple[str, ...] = ()
    turns: tuple[tuple[str, str], ...] = ()
    chat: ToolChat | None = None
    document: str | None = None

    @property
    def first_message(self) -> str:
        """What the conversation or the document begins with: its first turn that isn't the system prompt."""
        if self.chat is not None:
            return self.chat.first_message
        if self.document is not None:
            return self.document
        return next((content for role, content in self.turns if role != "system"), self.prompt)


@dataclass(frozen=True, slots=True)
class DataFile:
    """The rows of one file, all of one form, or of a folder of documents.

    Attributes:
        path: The file or folder.
        is_text: True for running text, which has no answers and isn't put into a chat template.
        rows: Its rows, in order.
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
    if suffix in _OTHERS:
        raise UserError(f"--data {path}: {_OTHERS[suffix]}")
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
        yield from (replace(row, document=rows[0].prompt) for row in rows)


def _jsonl(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in enumerate(read_lines(path), start=1):
        if line.strip():
            yield f"{path}:{number}", parse_line(line, f"{path}:{number}")


def _parquet(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
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


def _hub(name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rows of a data set of the hub, without the columns that no form has."""
    from moevolve.evaluators.tasks.config import Source
    from moevolve.evaluators.tasks.datasets import load_table

    table = load_table(Source(hub=name), "train")
    form = next((key for key in _FORMS if key in table.columns), None)
    wanted = table.columns if form is None else (form, *_FORMS[form][1])
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
            yield DataRow(joined)
            lines = []
        elif lines:
            lines.append("")
    rest = "\n".join(lines).strip()
    if rest:
        yield DataRow(rest)


def _rows(read: Iterable[tuple[str, dict[str, Any]]]) -> Iterator[DataRow]:
    """The rows of (place, content) of each line."""
    first: tuple[str, bool, bool] | None = None
    begun = ""
    for place, found in read:
        key, row = _row(found, place)
        form = key, row.answer is not None, bool(row.choices)
        if first is None:
            first, begun = form, place
        if form != first:
            raise UserError(f"{place}: {_difference(form, first)} at {begun}; put rows of each form into a file")
        yield row


def _difference(form: tuple[str, bool, bool], first: tuple[str, bool, bool]) -> str:
    if form[0] != first[0]:
        return f"a row with `{form[0]}`, but one with `{first[0]}`"
    what, has = ("an answer", form[1]) if form[1] != first[1] else ("choices", form[2])
    return f"a row with{'' if has else 'out'} {what}, but one with{'out' if has else ''}"


def _row(found: dict[str, Any], place: str) -> tuple[str, DataRow]:
    """The row of a line, with the key that tells its form."""
    key = next((key for key in _FORMS if key in found), None)
    if key is None:
        known = ", ".join(f"`{key}`" for key in _FORMS)
        raise UserError(f"{place}: the row has none of the keys {known}; it has: {', '.join(found) or 'none'}")
    read, known_keys = _FORMS[key]
    _check_keys(found, {key, "id", *known_keys}, place)
    return key, read(found, place)


def _check_keys(found: Mapping[str, Any], known: set[str], place: str) -> None:
    unknown = [key for key in found if key not in known]
    if any(key in _OLD_TOOLS for key in unknown):
        raise UserError(f"{place}: `{unknown[0]}` is of an earlier form of tool calls; write `tools` and `tool_calls`")
    if unknown:
        raise UserError(f"{place}: unknown key `{unknown[0]}`; known are {', '.join(sorted(known))}")


def _prompt(found: Mapping[str, Any], place: str) -> DataRow:
    choices = found.get("choices")
    answer = None if found.get("answer") is None else text_of(found, "answer", place)
    if choices is None:
        return DataRow(text_of(found, "prompt", place), answer)
    if not isinstance(choices, list) or len(choices) < 2 or not all(isinstance(each, str) for each in choices):
        raise UserError(f"{place}: `choices` must be a list of two or more texts")
    if answer not in choices:
        raise UserError(f"{place}: the answer must be one of the choices, {', '.join(map(repr, choices))}")
    return DataRow(text_of(found, "prompt", place), answer, tuple(choices))


def _plain(found: Mapping[str, Any], place: str) -> DataRow:
    return DataRow(text_of(found, "text", place))


def _openai(found: Mapping[str, Any], place: str) -> DataRow:
    return _chat(read_chat(found, place), place)


def _sharegpt(found: Mapping[str, Any], place: str) -> DataRow:
    return _chat(read_sharegpt(found, place), place)


def _chat(chat: ToolChat, place: str) -> DataRow:
    """The row of a chat. One with tools keeps its messages; others are told by their turns as well."""
    if chat.has_tools:
        # The form of a row is told by its answer, which only the model's template can write.
        return DataRow(chat.first_message, None if chat.answer is None else "", chat=chat)
    messages = chat.messages if chat.answer is None else (*chat.messages, chat.answer)
    return replace(_conversation([(each["role"], each["content"]) for each in messages], place), chat=chat)


def _conversation(turns: list[tuple[str, str]], place: str) -> DataRow:
    """Divide a conversation into the turns before the last question, that question, and its answer if it has one."""
    answer = turns.pop()[1] if turns[-1][0] == "assistant" else None
    spoken = [role for role, _ in turns[turns[:1] != [] and turns[0][0] == "system" :]]
    by_turns = ["user", "assistant"] * len(spoken)
    if len(spoken) % 2 == 0 or spoken != by_turns[: len(spoken)]:
        raise UserError(
            f"{place}: turns must be of user and assistant by turns, after at most one system prompt; got "
            f"{', '.join([*(role for role, _ in turns), *(['assistant'] if answer is not None else [])])}"
        )
    *before, (_, prompt) = turns
    return DataRow(prompt, answer, turns=tuple(before))


_FORMS: dict[str, tuple[Callable[[Mapping[str, Any], str], DataRow], tuple[str, ...]]] = {
    "messages": (_openai, ("tools",)),
    "conversations": (_sharegpt, ("system", "tools")),
    "prompt": (_prompt, ("answer", "choices")),
    "text": (_plain, ()),
}
"""Reader of each form and its further keys, by the key that tells the form."""
