"""What the columns of a file of rows mean: which are read as what, which aren't texts, and which nobody can tell."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from numbers import Number

from moevolve.evaluators.errors import UserError

# Fields by the columns that --columns names; `IGNORED` isn't read.
Columns = Mapping[str, str]
IGNORED = "ignore"

# Names of the columns of instruction and chat data, by the field that they are read as; of several in a row the first
# is read. They are those of OpenAI's API (messages, tools), UltraChat (prompt, messages), ShareGPT (conversations,
# system), LMSYS (conversation), Alpaca (instruction, input, output, system, history), Dolly (instruction, context,
# response), OpenOrca (system_prompt, question, response), GSM8K (question, answer), and of trainers' data with prompt
# and completion, response or chosen (preferences). A `label` marks wanted answers (KTO), a `loss_mask` messages to
# learn.
_USUAL: Mapping[str, tuple[str, ...]] = {
    "messages": ("messages", "conversations", "conversation"),
    "prompt": ("prompt", "instruction", "question", "query", "input"),
    "text": ("text",),
    "answer": ("answer", "output", "response", "completion", "target", "chosen"),
    "input": ("input", "context"),
    "label": ("label",),
    "choices": ("choices",),
    "system": ("system", "system_prompt", "system_message"),
    "history": ("history",),
    "tools": ("tools",),
    "loss_mask": ("loss_mask",),
}
_QUESTIONS = ("messages", "prompt", "text")
_FIELDS_OF = {
    "messages": ("system", "tools", "loss_mask"),
    "prompt": ("answer", "label", "input", "choices", "system", "history"),
    "text": (),
}
_OWN_NAMES = {name: name for name in (*_USUAL, IGNORED) if name not in ("label", "loss_mask")} | {
    "conversations": "messages"
}
# A column whose name ends with one of these words says in few words where a row comes from, or what kind it is.
_ABOUT = re.compile(
    r"(id|ids|idx|index|uuid|hash|source|sources|src|origin|url|dataset|subset|split|category|categories|class|type"
    r"|kind|topic|topics|tag|tags|subject|domain|task|level|difficulty|score|scores|rating|rank|quality|language|lang"
    r"|locale|country|state|license|model|models|generator|author|annotator|name|date|time|timestamp|version|format"
    r"|status|meta|metadata|info|header|moderation|weight|annotations|file|filename|path|repo|title|dump|ip)"
)
_ABOUT_WORDS = 16
# Part of the rows from which something isn't an accident of single rows.
OFTEN = 1 / 20


def read_columns(given: str) -> Columns:
    """Read the value of --columns, such as `prompt=question,answer=response,ignore=notes`.

    Raises:
        UserError: It isn't one, has a name that no form has, or names a column or a field twice.
    """
    columns: dict[str, str] = {}
    for part in given.split(","):
        name, _, column = part.strip().partition("=")
        if not column:
            raise UserError(
                f"--columns {given}: give NAME=COLUMN, several with commas, as in prompt=question,answer=response"
            )
        if name not in _OWN_NAMES:
            raise UserError(f"--columns {given}: unknown name `{name}`; there are {', '.join(sorted(_OWN_NAMES))}")
        if column in columns or (name != IGNORED and _OWN_NAMES[name] in columns.values()):
            raise UserError(f"--columns {given}: `{part.strip()}` names a column or a field for the second time")
        columns[column] = _OWN_NAMES[name]
    return columns


def _usual(name: str, columns: Collection[str]) -> str | None:
    return next((each for each in _USUAL[name] if each in columns), None)


def _question_of(found: Collection[str], every: Collection[str], answered: bool) -> tuple[str, str] | None:
    for name in _QUESTIONS:
        column = _usual(name, found)
        # An `input` belongs to what is asked elsewhere, also in a row that has nothing there.
        column = _usual(name, every) if column == "input" else column
        # A column `question` without answers may be anything.
        if column is not None and (name != "prompt" or column == "prompt" or answered):
            return name, column
    return None


@lru_cache(4096)
def layout_of(found: tuple[str, ...], every: tuple[str, ...], given: tuple[tuple[str, str], ...]) -> dict[str, str]:
    """Return a row's columns by their fields; empty if it has nothing to ask.

    Args:
        found: Columns of the row.
        every: Columns of its file. A row may lack one whose cell is empty.
        given: Columns and fields that --columns names.
    """
    fields = {name: column for column, name in given if name != IGNORED}
    every = tuple(column for column in every if column not in dict(given))
    asked = next(((name, fields[name]) for name in _QUESTIONS if name in fields), None)
    if asked is None:
        found = tuple(column for column in found if column in every)
        asked = _question_of(found, every, "answer" in fields or _usual("answer", every) is not None)
        if asked is None:
            return {}
        beside = _FIELDS_OF[asked[0]]
    else:  # answers are named where the question is
        beside = tuple(name for name in _FIELDS_OF[asked[0]] if name != "answer")
    rest = [column for column in every if column != asked[1]]
    fields = {name: column for name in beside if (column := _usual(name, rest)) is not None} | dict([asked]) | fields
    # Of Dolly. Other contexts stand before the question, or behind it, or say how to answer.
    if fields.get("input") == "context" and asked[1] != "instruction" and "context" in every:
        del fields["input"]
    if fields.get("answer") != "completion":
        fields.pop("label", None)
    return fields


def leaves(value: object) -> Iterator[object]:
    """Every value within lists and mappings, texts without white space around them."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for each in value:
            yield from leaves(each)
    else:
        yield value.strip() if isinstance(value, str) else value


def _says_something(value: object) -> bool:
    """Whether a value is a text, an image or sound, and no number, date or blank, also as a table has them."""
    if isinstance(value, str):
        words = value.lower() not in ("true", "false", "nan", "none", "null")
        return words and re.search(r"[^\W\d_]", value) is not None
    return value is not None and not isinstance(value, Number | dt.date | dt.time | dt.timedelta)


@dataclass
class Unread:
    """Counts the texts of a file's columns that aren't read.

    A column may repeat what is read (the whole example, the first question), and may say what a row is about in a few
    words. What else says something is refused, since the model would be judged without it.
    """

    _texts: dict[str, int] = field(default_factory=dict)
    _unknown: dict[str, int] = field(default_factory=dict)
    _first: dict[str, str] = field(default_factory=dict)

    def add(self, place: str, unread: Mapping[str, object], read: Sequence[str]) -> None:
        """Count a row's columns that aren't read, beside the texts that are."""
        for column, value in unread.items():
            said = [each for each in leaves(value) if _says_something(each)]
            self._texts[column] = self._texts.get(column, 0) + bool(said)
            if said and not (_repeats(said, read) or _about(column, said)):
                self._unknown[column] = self._unknown.get(column, 0) + 1
                self._first.setdefault(column, place)

    def refuse(self, columns: Iterable[str]) -> None:
        """Raise an error if nothing tells what a column of texts is.

        Raises:
            UserError: There are such columns; the message names them and all others.
        """
        unknown = [name for name, count in self._unknown.items() if count > OFTEN * self._texts[name]]
        if unknown:
            names, first = ", ".join(f"`{name}`" for name in unknown), unknown[0]
            raise UserError(
                f"{self._first[first]}: {names}: {'columns' if len(unknown) > 1 else 'a column'} with text that isn't "
                f"read; the columns are {', '.join(columns)}; say with --columns what is what, as in --columns "
                f"system={first}, or --columns {','.join(f'{IGNORED}={name}' for name in unknown)} to leave it out"
            )


def _repeats(said: Sequence[object], read: Sequence[str]) -> bool:
    """Whether values are texts that are read, or each has all of them."""
    return bool(read) and all(
        isinstance(each, str) and (each in read or all(text in each for text in read)) for each in said
    )


def _about(column: str, said: Sequence[object]) -> bool:
    last = re.split(r"[\W_]+", re.sub(r"([a-z])([A-Z])", r"\1 \2", column).lower())[-1]
    return _ABOUT.fullmatch(last) is not None and all(
        isinstance(each, str) and len(each.split()) <= _ABOUT_WORDS for each in said
    )
