"""Files of requests as people have them, read as rows of one form.

A line of a JSONL file is `{"prompt", "answer"?, "choices"?}`, `{"text"}`, a chat in OpenAI's form
(`{"messages": [{"role", "content"}]}`) or in ShareGPT's (`{"conversations": [{"from", "value"}]}`). A .txt file is
running text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moevolve.evaluators.errors import UserError

_LATER = {
    ".parquet": "parquet isn't read yet; write the rows as JSONL",
    ".csv": "CSV isn't read; write the rows as JSONL",
    ".json": "one JSON document isn't read; write one object per line, as JSONL",
}
_TOOLS = ("tools", "functions", "tool_calls", "function_call", "tool_call_id")
"""Keys of chats with tool calls."""
_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
}
"""Roles of both forms of chats, as chat templates call them."""
_TOOL_ROLES = ("tool", "function", "function_call", "observation")

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
    """

    prompt: str
    answer: str | None = None
    choices: tuple[str, ...] = ()
    turns: tuple[tuple[str, str], ...] = ()

    @property
    def first_message(self) -> str:
        """What the conversation begins with: its first turn that isn't the system prompt."""
        return next((content for role, content in self.turns if role != "system"), self.prompt)


@dataclass(frozen=True, slots=True)
class DataFile:
    """The rows of one file, all of one form.

    Attributes:
        path: The file.
        is_text: True for running text, which has no answers and isn't put into a chat template.
        rows: Its rows, in order.
    """

    path: Path
    is_text: bool
    rows: tuple[DataRow, ...]


def read_data(path: Path) -> DataFile:
    """Read a file of requests.

    Raises:
        UserError: The file is missing, empty or of a form that isn't read, or a row is malformed or of another form
            than the rows before it. The message names file and line.
    """
    suffix = path.suffix.lower()
    if suffix in _LATER:
        raise UserError(f"--data {path}: {_LATER[suffix]}")
    if path.is_dir():
        raise UserError(f"--data {path}: a folder isn't read yet; name its files")
    if suffix not in (".jsonl", ".txt"):
        hub = "" if path.exists() else "; data sets of the hub aren't read yet: save the rows as JSONL"
        raise UserError(f"--data {path}: the name must end in .jsonl or .txt{hub}")
    text = _text_of(path)
    if suffix == ".txt":
        return DataFile(path, True, tuple(_paragraphs(text)))
    return DataFile(path, False, tuple(_rows(path, text)))


def _text_of(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"--data {path}: no such file") from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise UserError(f"{path}:{line}: not UTF-8 text; convert the file first") from None
    except OSError as error:
        raise UserError(f"--data {path}: can't be read: {error.strerror}") from None
    if not text.strip():
        raise UserError(f"--data {path}: the file is empty")
    return text


def _paragraphs(text: str) -> Iterator[DataRow]:
    """Rows of running text: whole paragraphs, joined up to `_TEXT_CHARACTERS`."""
    lines: list[str] = []
    for line in (*text.split("\n"), ""):
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


def _rows(path: Path, text: str) -> Iterator[DataRow]:
    first: tuple[str, bool, bool] | None = None
    begun = ""
    # Not splitlines(), which also splits at U+2028 and other separators that JSON strings may contain.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        place = f"{path}:{number}"
        key, row = _row(line, place)
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


def _row(line: str, place: str) -> tuple[str, DataRow]:
    """The row of a line, with the key that tells its form."""
    try:
        found = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{place}: not JSON: {error.msg} at column {error.colno}") from None
    if not isinstance(found, dict):
        raise UserError(f"{place}: expected a JSON object, got {type(found).__name__}")
    key = next((key for key in _FORMS if key in found), None)
    if key is None:
        known = ", ".join(f"`{key}`" for key in _FORMS)
        raise UserError(f"{place}: the row has none of the keys {known}; it has: {', '.join(found) or 'none'}")
    read, known_keys = _FORMS[key]
    _check_keys(found, {key, "id", *known_keys}, place)
    return key, read(found, place)


def _check_keys(found: Mapping[str, Any], known: set[str], place: str) -> None:
    tools = [key for key in _TOOLS if found.get(key)]
    if tools:
        raise UserError(f"{place}: `{tools[0]}`: tool calls aren't read yet; leave such conversations out")
    unknown = [key for key in found if key not in known and key not in _TOOLS]
    if unknown:
        raise UserError(f"{place}: unknown key `{unknown[0]}`; known are {', '.join(sorted(known))}")


def _prompt(found: Mapping[str, Any], place: str) -> DataRow:
    choices = found.get("choices")
    answer = None if found.get("answer") is None else _text(found, "answer", place)
    if choices is None:
        return DataRow(_text(found, "prompt", place), answer)
    if not isinstance(choices, list) or len(choices) < 2 or not all(isinstance(each, str) for each in choices):
        raise UserError(f"{place}: `choices` must be a list of two or more texts")
    if answer not in choices:
        raise UserError(f"{place}: the answer must be one of the choices, {', '.join(map(repr, choices))}")
    return DataRow(_text(found, "prompt", place), answer, tuple(choices))


def _plain(found: Mapping[str, Any], place: str) -> DataRow:
    return DataRow(_text(found, "text", place))


def _chat(list_key: str, role_key: str, text_key: str) -> Callable[[Mapping[str, Any], str], DataRow]:
    """Make the reader of one form of chats, from the keys of its list, of a turn's role and of its content."""

    def read(found: Mapping[str, Any], place: str) -> DataRow:
        messages = found[list_key]
        if not isinstance(messages, list) or not messages:
            raise UserError(f"{place}: `{list_key}` must be a list of turns")
        turns = []
        for number, message in enumerate(messages, start=1):
            where = f"{place}: turn {number}"
            if not isinstance(message, dict):
                raise UserError(f"{where}: expected an object with `{role_key}` and `{text_key}`")
            if message.get(role_key) in _TOOL_ROLES:
                raise UserError(
                    f"{where}: {message[role_key]}: tool calls aren't read yet; leave such conversations out"
                )
            _check_keys(message, {role_key, text_key}, where)
            if message.get(role_key) not in _ROLES:
                raise UserError(f"{where}: unknown `{role_key}` {message.get(role_key)!r}")
            turns.append((_ROLES[message[role_key]], _text(message, text_key, where)))
        return _conversation(turns, place)

    return read


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


def _text(found: Mapping[str, Any], key: str, place: str) -> str:
    value = found.get(key)
    if isinstance(value, list) and value and all(isinstance(part, dict) for part in value):
        value = _joined(value, key, place)  # OpenAI's form allows parts
    if not isinstance(value, str) or not value.strip():
        raise UserError(f"{place}: `{key}` must be a text that isn't empty, got {value!r:.60}")
    return value


def _joined(parts: list[dict[str, Any]], key: str, place: str) -> str:
    others = [part.get("type") for part in parts if part.get("type") != "text"]
    if others:
        raise UserError(f"{place}: `{key}` has a part of type {others[0]!r}; only text is read")
    return "".join(str(part.get("text", "")) for part in parts)


_FORMS: dict[str, tuple[Callable[[Mapping[str, Any], str], DataRow], tuple[str, ...]]] = {
    "prompt": (_prompt, ("answer", "choices")),
    "text": (_plain, ()),
    "messages": (_chat("messages", "role", "content"), ()),
    "conversations": (_chat("conversations", "from", "value"), ()),
}
"""Reader of each form and its further keys, by the key that tells the form."""
