"""A row of a file of requests: a prompt, a text, or a chat in the form of OpenAI's API or of ShareGPT, or Alpaca's."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.text_files import parse_json
from moevolve.evaluators.yaml_files import explain_validation

# OpenAI's roles by those of ShareGPT; data sets with tools have more than one set of names for them.
_SHAREGPT = {role: role for role in ("system", "developer", "user", "assistant", "tool")}
_SHAREGPT |= {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "function_call": "assistant"}
_SHAREGPT |= {"observation": "tool", "function_response": "tool"}
# Fields that hold the assistant's thoughts.
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
_INLINE_THOUGHTS = re.compile(r"\s*<think>(.*?)</think>", re.DOTALL)
# Other projects' names of fields, by the names that are read here.
_OTHER_NAMES = {"functions": "tools", "function_call": "tool_calls", "parameters": "arguments"}
# Similarity (`difflib`) from which a further column may be a misspelt field.
_MISSPELT = 0.8


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation.

    Attributes:
        messages: Messages up to the one to be answered.
        tools: Tools that the model may call.
        answer: The assistant's answer; None without one.
        place: File and line, for messages.
    """

    messages: tuple[Message, ...] = field(repr=False)
    tools: tuple[Mapping[str, Any], ...] = field(repr=False)
    answer: Message | None = field(repr=False)
    place: str = field(default="", compare=False)

    @property
    def has_tools(self) -> bool:
        """Whether there are tools, calls of tools or their results."""
        return bool(self.tools) or any(each.role == "tool" or each.tool_calls for each in self._turns)

    @property
    def has_thoughts(self) -> bool:
        """Whether the assistant thinks, in messages of their own field or at the beginning of the answer."""
        return bool(self.thoughts) or any(each.reasoning_content.strip() for each in self._turns)

    @property
    def thoughts(self) -> str:
        """What the assistant thinks before the answer; empty if nothing is given."""
        given, said = (self.answer.reasoning_content, self.answer.content) if self.answer is not None else ("", "")
        inline = _INLINE_THOUGHTS.match(said)
        return given.strip() or (inline[1].strip() if inline is not None else "")

    def as_data(self) -> tuple[list[dict[str, object]], tuple[Mapping[str, Any], ...], dict[str, object] | None]:
        """Return messages, tools and answer for a chat template."""
        answer = None if self.answer is None else self.answer.as_data()
        return [message.as_data() for message in self.messages], self.tools, answer

    @property
    def _turns(self) -> tuple[Message, ...]:
        return self.messages if self.answer is None else (*self.messages, self.answer)


@dataclass(frozen=True, slots=True)
class DataRow:
    """One request.

    Attributes:
        prompt: The last user's turn, or the prompt or text.
        first_message: What the conversation or the document begins with, without the system prompt.
        answer: The answer; None without one.
        choices: Closed set of answers; empty for open ones.
        turns: `(role, content)` of the turns before the prompt: at most one `system` turn, then `user` and `assistant`
            by turns.
        chat: The conversation, if any row of its file has tools or thoughts. `prompt` and `answer` are then made of it
            by the model's chat template.
    """

    prompt: str
    first_message: str
    answer: str | None = None
    choices: tuple[str, ...] = ()
    turns: tuple[tuple[str, str], ...] = ()
    chat: Chat | None = None


def without_nulls(value: object) -> Any:
    """Return a value without the fields that are null: columns of a table have them where JSON has no field."""
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def _joined(value: object) -> object:
    """Return the text of a field that is a list of parts."""
    if not isinstance(value, list) or not all(isinstance(part, dict) for part in value):
        return value
    others = [part.get("type") for part in value if part.get("type") != "text"]
    if others:
        raise ValueError(f"it has a part of type {others[0]!r}, and only text is read")
    texts = [part.get("text") or "" for part in value]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("it has a part whose `text` is no text")
    return "".join(texts)


def _not_empty(text: str) -> str:
    if not text.strip():
        raise ValueError("it must be a text that isn't empty")
    return text


def _parsed(value: object) -> object:
    """JSON within JSON, which OpenAI's API has for arguments, and some data sets for tools."""
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value) if value.strip() else None
    except ValueError as error:
        raise ValueError(f"it must be JSON: {error}") from None


def _tool_of(tool: object) -> object:
    """Return a tool in the form of OpenAI's API; some data sets have only the function."""
    if not isinstance(tool, Mapping):
        raise ValueError("a tool is an object with `function`")
    function = tool.get("function", tool)
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError("it has no function with a `name`")
    return tool if "function" in tool else {"type": "function", "function": tool}


Text = Annotated[str, BeforeValidator(_joined), AfterValidator(_not_empty)]


class _Fields(BaseModel):
    """Fields that are read. Others are ignored, unless what they say would be missed."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _read(cls, found: object) -> object:
        """Drop fields that are null, and further ones except for those that may be misspelt: they are refused."""
        if not isinstance(found, Mapping):
            return found
        given = {key: value for key, value in found.items() if value is not None}
        names = {of.alias or name for name, of in cls.model_fields.items()}
        other = next((key for key, name in _OTHER_NAMES.items() if key in given and name in names), None)
        if other is not None:
            raise ValueError(f"`{other}` isn't read; write it as `{_OTHER_NAMES[other]}`")
        missing = names - given.keys()
        return {
            key: value
            for key, value in given.items()
            if key in names or difflib.get_close_matches(key, missing, 1, _MISSPELT)
        }


class _Function(_Fields):
    name: str
    arguments: Annotated[dict[str, object] | None, BeforeValidator(_parsed)] = None


class _Call(BaseModel):
    function: _Function
    id: object = None

    def as_data(self) -> dict[str, object]:
        function = {"name": self.function.name, "arguments": self.function.arguments or {}}
        call: dict[str, object] = {"type": "function", "function": function}
        return call if self.id is None else call | {"id": self.id}


class Message(_Fields):
    """A message in the form of OpenAI's API."""

    role: Annotated[
        Literal["system", "developer", "user", "assistant", "tool"],
        AfterValidator(lambda role: "system" if role == "developer" else role),
    ]
    content: Annotated[str, BeforeValidator(_joined)] = ""
    reasoning_content: Annotated[str, BeforeValidator(_joined)] = ""
    tool_calls: tuple[_Call, ...] = ()
    tool_call_id: object = None
    name: object = None
    weight: object = None

    @model_validator(mode="before")
    @classmethod
    def _thoughts(cls, found: object) -> object:
        """Give thoughts one name; some servers give them under two."""
        if not isinstance(found, Mapping):
            return found
        thoughts = [found[key] for key in _THOUGHTS if found.get(key)]
        others = {key: value for key, value in found.items() if key not in _THOUGHTS}
        return others | {"reasoning_content": thoughts[0]} if thoughts else others

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.role != "assistant" and (self.tool_calls or self.reasoning_content.strip()):
            raise ValueError("only the assistant calls tools and thinks")
        if not self.tool_calls and self.role != "tool":  # a search may find nothing
            _not_empty(self.content)
        return self

    def as_data(self) -> dict[str, object]:
        """Return the message for a chat template: a call's arguments are an object, and calls may have no content."""
        message: dict[str, object] = {"role": self.role}
        if self.reasoning_content.strip():
            message["reasoning_content"] = self.reasoning_content
        if self.tool_calls:
            message["tool_calls"] = [call.as_data() for call in self.tool_calls]
        if self.content.strip() or not self.tool_calls:
            message["content"] = self.content
        further = {"tool_call_id": self.tool_call_id, "name": self.name}
        return message | {key: value for key, value in further.items() if value is not None}


def _message_of(turn: object) -> object:
    """Return a turn of ShareGPT's form as a message. A `function_call` holds one call as JSON, or a list of them."""
    keys = ("role", "content") if isinstance(turn, Mapping) and "role" in turn else ("from", "value")
    if not isinstance(turn, Mapping) or keys[0] not in turn:
        raise ValueError("a turn is an object with `from` and `value`, or with `role` and `content`")
    name, content = (turn.get(key) for key in keys)
    role = _SHAREGPT.get(name) if isinstance(name, str) else None
    if role is None:
        raise ValueError(f"unknown `{keys[0]}` {name!r}; known are {', '.join(_SHAREGPT)}")
    message = {key: value for key, value in turn.items() if key not in keys} | {"role": role}
    if name != "function_call":
        return message | {"content": content}
    calls = _parsed(content)
    calls = calls if isinstance(calls, list) else [calls]
    return message | {"tool_calls": [{"function": call} for call in calls]}


class _Form(_Fields):
    """A row in one of the forms. Its method `row` raises ValueError if the parts of the row don't fit together."""

    id: object = None


class _PromptForm(_Form):
    prompt: Text
    answer: Text | None = None
    choices: Annotated[tuple[str, ...], Field(min_length=2, fail_fast=True)] | None = None

    def row(self) -> DataRow:
        if self.choices is not None and self.answer not in self.choices:
            raise ValueError(f"the answer must be one of the choices, {', '.join(map(repr, self.choices))}")
        return DataRow(self.prompt, self.prompt, self.answer, self.choices or ())


class _TextForm(_Form):
    text: Text

    def row(self) -> DataRow:
        return DataRow(self.text, self.text)


class _ChatForm(_Form):
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    tools: Annotated[
        Annotated[tuple[Annotated[dict[str, object], BeforeValidator(_tool_of)], ...], Field(fail_fast=True)] | None,
        BeforeValidator(_parsed),
    ] = None

    def row(self) -> DataRow:
        return self._row_of(list(self.messages))

    def _row_of(self, messages: list[Message]) -> DataRow:
        if messages[-1].role == "assistant" and messages[-1].weight == 0:
            raise ValueError("the last answer has `weight` 0, so it isn't to be learned; leave it out")
        for number, (before, message) in enumerate(zip([None, *messages], messages, strict=False), start=1):
            if message.role == "tool" and not (before is not None and (before.role == "tool" or before.tool_calls)):
                raise ValueError(f"turn {number}: a tool's result, but no call of a tool before it")
        answer = messages.pop() if messages[-1].role == "assistant" else None
        first = next((each.content for each in messages if each.role != "system"), "")
        if not first.strip():
            raise ValueError("the conversation has no message of the user to answer")
        chat = Chat(tuple(messages), self.tools or (), answer)
        if chat.has_tools:
            # A row's fitness depends on its answer, which only the model's template can write.
            return DataRow(first, first, None if answer is None else "", chat=chat)
        *turns, (_, prompt) = _by_turns(messages)
        return DataRow(prompt, first, None if answer is None else answer.content, turns=tuple(turns), chat=chat)


class _ShareGptForm(_ChatForm):
    messages: Annotated[
        list[Annotated[Message, BeforeValidator(_message_of)]],
        Field(alias="conversations", min_length=1, fail_fast=True),
    ]
    system: Text | None = None

    def row(self) -> DataRow:
        system = [] if self.system is None else [Message(role="system", content=self.system)]
        return self._row_of([*system, *self.messages])


def _by_turns(messages: Sequence[Message]) -> list[tuple[str, str]]:
    """`(role, content)` of messages that end with a question, after checking that user and assistant take turns."""
    roles = [message.role for message in messages]
    spoken = roles[1:] if roles[0] == "system" else roles
    if len(spoken) % 2 == 0 or spoken != (["user", "assistant"] * len(spoken))[: len(spoken)]:
        raise ValueError(
            f"turns must be of user and assistant by turns, after at most one system prompt; got {', '.join(roles)}"
        )
    return [(message.role, message.content) for message in messages]


# Forms of rows by the key that tells the form.
FORMS: dict[str, type[_ChatForm | _PromptForm | _TextForm]] = {
    "messages": _ChatForm,
    "conversations": _ShareGptForm,
    "prompt": _PromptForm,
    "text": _TextForm,
}


# Columns of a file by their field: `prompt`, `answer` or another field of a form.
Columns = Mapping[str, str]
# Names of prompts and answers that are read if a row has no key of a form; `input` after an `instruction` is a part of
# it, as in Alpaca's data.
_PROMPTS = ("instruction", "question", "query", "input")
_ANSWERS = ("output", "response", "completion", "answer", "target")
# Names of columns that belong to a prompt; the code doesn't guess how to put them together.
_CONTEXTS = {"context", "passage", "document"}


def read_columns(given: str) -> Columns:
    """Read the value of --columns, such as `prompt=question,answer=response`.

    Raises:
        UserError: It isn't one, or has a name that no form has.
    """
    pairs = [part.strip().partition("=") for part in given.split(",")]
    known = sorted({of.alias or name for form in FORMS.values() for name, of in form.model_fields.items()} - {"id"})
    for name, _, column in pairs:
        if not column:
            raise UserError(
                f"--columns {given}: give NAME=COLUMN, several with commas, as in prompt=question,answer=response"
            )
        if name not in known:
            raise UserError(f"--columns {given}: unknown name `{name}`; there are {', '.join(known)}")
    return {name: column for name, _, column in pairs}


def columns_of(columns: Sequence[str], named: Columns | None) -> tuple[str, ...]:
    """Those of a table's columns that `read_row` reads."""
    form = next((key for key in FORMS if key in columns), None)
    if named is not None:
        wanted = {*named.values(), "input"}
    elif form is None:
        wanted = {*_PROMPTS, *_ANSWERS, *_CONTEXTS, "choices"}
    else:
        wanted = {of.alias or name for name, of in FORMS[form].model_fields.items()} | {*_ANSWERS}
    return tuple(column for column in columns if column in wanted) or tuple(columns)


def _usual_columns(found: Mapping[str, object]) -> Columns | None:
    """Return the columns of a row of prompts and answers under other usual names; None if it isn't one."""
    key = next((key for key in FORMS if key in found), None)
    if key not in (None, "prompt") or (key == "prompt" and "answer" in found):
        return None
    prompt = next((name for name in ("prompt", *_PROMPTS) if found.get(name)), None)
    answer = next((name for name in _ANSWERS if found.get(name)), None)
    if prompt is None or answer is None or found.keys() & _CONTEXTS:
        return None
    return {"prompt": prompt, "answer": answer, "choices": "choices"}


def _renamed(found: Mapping[str, object], place: str, columns: Columns | None) -> Mapping[str, object]:
    """Return a row with the names of a form's fields instead of its own."""
    columns = _usual_columns(found) if columns is None else columns
    if columns is None:
        return found
    # All rows have an answer or none, so that a named column that isn't there is misspelt.
    lacks = [column for name, column in columns.items() if name in {*FORMS, "answer"} and column not in found]
    if lacks:
        raise UserError(f"{place}: --columns: the row has no `{lacks[0]}`; it has: {', '.join(found) or 'none'}")
    row = {name: found[column] for name, column in columns.items() if column in found}
    further = found.get("input") if columns.get("prompt") == "instruction" else None
    if further and isinstance(row["prompt"], str):
        row["prompt"] += f"\n\n{further}"
    return row


def read_row(found: Mapping[str, object], place: str, columns: Columns | None = None) -> tuple[str, DataRow]:
    """Read a row that stands at `place` of a file, with the key that tells its form.

    Raises:
        UserError: It has none of the known keys or lacks one of the `columns`, or it is malformed.
    """
    found = _renamed(found, place, columns)
    key = next((key for key in FORMS if key in found), None)
    if key is None:
        known = ", ".join(f"`{key}`" for key in FORMS)
        raise UserError(
            f"{place}: the row has none of the keys {known}; it has: {', '.join(found) or 'none'}; say with --columns "
            "what is what, as in --columns prompt=question,answer=response"
        )
    form = FORMS[key]
    try:
        row = form.model_validate(found).row()
    except ValidationError as error:
        raise UserError(f"{place}: {explain_validation(error, found, form.model_fields)}") from None
    except ValueError as error:
        raise UserError(f"{place}: {error}") from None
    return key, row if row.chat is None else replace(row, chat=replace(row.chat, place=place))
