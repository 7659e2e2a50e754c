"""A row of a file of requests: a prompt, a text, or a chat."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.text_files import parse_json
from moevolve.evaluators.yaml_files import explain_validation
from moevolve.search.shrink.data.columns import Columns, layout_of, leaves
from moevolve.search.shrink.data.messages import ROLES, Chat, Fields, Message, joined, message_of, not_empty, says_no

_CHAT_AS_TEXT = re.compile(r"\s*\[\s*\{\s*['\"](role|content)['\"]")


@dataclass(frozen=True, slots=True)
class DataRow:
    """One request.

    Attributes:
        prompt: The last user's turn, or the prompt or text.
        first_message: The user's first message, or what the document begins with.
        answer: The answer; None without one.
        choices: Closed set of answers; empty for open ones.
        turns: `(role, content)` of the turns before the prompt: at most one `system` turn, then `user` and `assistant`
            by turns.
        chat: The conversation, if any row of its file has what only a template may write. `prompt` and `answer`
            are then made of it by the model's chat template.
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


def _unpacked(value: object) -> object:
    """A list that a table holds as a text: JSON, or as Python and NumPy (pandas) write it."""
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value) if value.strip() else None
    except ValueError as error:
        try:
            # Lines of an array of NumPy's have no commas between them; a line break within a text is escaped.
            return ast.literal_eval(re.sub(r"\}\s*\n\s*\{", "}, {", value.strip()))
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            raise ValueError(f"it must be a list, also as JSON or as Python writes it: {error}") from None


def _chat_in(value: object) -> list[Mapping[str, object]] | None:
    """Return the turns of a prompt or an answer that is a list of them, as in TRL's data; None if it isn't."""
    if isinstance(value, str) and _CHAT_AS_TEXT.match(value):
        with suppress(ValueError):
            value = _unpacked(value)
    turns = isinstance(value, list) and value and all(isinstance(each, Mapping) and "role" in each for each in value)
    return value if turns else None  # type: ignore[return-value]


def _tool_of(tool: object) -> object:
    """Return a tool in the form of OpenAI's API; some data sets have only the function."""
    if not isinstance(tool, Mapping):
        raise ValueError("a tool is an object with `function`")
    function = tool.get("function", tool)
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError("it has no function with a `name`")
    return tool if "function" in tool else {"type": "function", "function": tool}


Text = Annotated[str, BeforeValidator(joined), AfterValidator(not_empty)]


class _Form(Fields):
    """A row in one of the forms. Its method `row` raises ValueError if the parts of the row don't fit together."""

    id: object = None


_Value = Annotated[str, BeforeValidator(joined)]


def _as_chat(fields: Mapping[str, object]) -> dict[str, object] | None:
    """Return the fields of a prompt and an answer as a chat's, if one of them is a list of turns; else None.

    A list may go on from the prompt, or repeat it, as in preferences.
    """
    asked, said = _chat_in(fields.get("prompt")), _chat_in(fields.get("answer"))
    if asked is None and said is None:
        return None
    if said is None:
        said = [{"role": "assistant", "content": fields["answer"]}] if fields.get("answer") else []
    repeats = bool(said) and ROLES.get(str(said[0]["role"]).lower()) in ("user", "system")
    if asked is None and not repeats:
        asked = [{"role": "user", "content": fields.get("prompt")}]
    begun = [] if asked is None or (repeats and said[: len(asked)] == asked) else asked
    return {name: value for name, value in fields.items() if name == "system"} | {"messages": [*begun, *said]}


class _PromptForm(_Form):
    prompt: _Value = ""
    input: _Value = ""
    answer: _Value = ""
    choices: Annotated[
        Annotated[tuple[str, ...], Field(min_length=2, fail_fast=True)] | None, BeforeValidator(_unpacked)
    ] = None
    system: _Value = ""
    history: Annotated[tuple[tuple[_Value, _Value], ...], BeforeValidator(lambda value: _unpacked(value) or ())] = ()

    def row(self) -> DataRow:
        prompt = "\n\n".join(text for text in (self.prompt, self.input) if text.strip())
        if not prompt:
            raise ValueError("prompt: it must be a text that isn't empty")
        answer = self.answer if self.answer.strip() else None
        if self.choices is not None and answer is not None and answer not in self.choices:
            raise ValueError(f"the answer must be one of the choices, {', '.join(map(repr, self.choices))}")
        turns: list[tuple[Literal["system", "user", "assistant"], str]]
        turns = [("system", self.system)] if self.system.strip() else []
        for question, said in self.history:
            turns += [("user", question), ("assistant", said)]
        first = self.history[0][0] if self.history else prompt
        if self.choices is not None:
            return DataRow(prompt, first, answer, self.choices, tuple(turns))
        asked = [Message.model_construct(role=role, content=text) for role, text in turns]
        asked.append(Message.model_construct(role="user", content=prompt))
        last = None if answer is None else Message.model_construct(role="assistant", content=answer)
        return DataRow(prompt, first, answer, turns=tuple(turns), chat=Chat(tuple(asked), (), last))


class _TextForm(_Form):
    text: Text

    def row(self) -> DataRow:
        return DataRow(self.text, self.text)


class _ChatForm(_Form):
    messages: Annotated[
        Annotated[list[Annotated[Message, BeforeValidator(message_of)]], Field(min_length=1, fail_fast=True)],
        BeforeValidator(_unpacked),
    ]
    tools: Annotated[
        Annotated[tuple[Annotated[dict[str, object], BeforeValidator(_tool_of)], ...], Field(fail_fast=True)] | None,
        BeforeValidator(_unpacked),
    ] = None
    system: _Value = ""
    loss_mask: Annotated[list[object] | None, BeforeValidator(_unpacked)] = None

    def row(self) -> DataRow:
        if self.loss_mask and len(self.loss_mask) != len(self.messages):
            raise ValueError(f"loss_mask: it has {len(self.loss_mask)} marks for {len(self.messages)} messages")
        messages = self._messages()
        if messages[-1].role == "assistant":
            mark = messages[-1].unlearned
            if mark is None and self.loss_mask and says_no(self.loss_mask[-1]):
                mark = "a 0 in `loss_mask`"
            if mark is not None:
                raise ValueError(f"the last answer has {mark}, so it isn't to be learned; leave it out")
        for number, (before, message) in enumerate(zip([None, *messages], messages, strict=False), start=1):
            if message.role == "tool" and not (before is not None and (before.role == "tool" or before.tool_calls)):
                raise ValueError(f"turn {number}: a tool's result, but no call of a tool before it")
        last = messages.pop() if messages[-1].role == "assistant" else None
        answer = last if last is not None and (last.tool_calls or last.content.strip()) else None
        first = next((each.content for each in messages if each.role == "user"), "")
        if not first.strip():
            raise ValueError("the conversation has no message of the user to answer")
        chat = Chat(tuple(messages), self.tools or (), answer)
        if chat.needs_template:
            # A row's fitness depends on its answer, which only the model's template can write.
            return DataRow(first, first, None if answer is None else "", chat=chat)
        *turns, (_, prompt) = _by_turns(messages)
        return DataRow(prompt, first, None if answer is None else answer.content, turns=tuple(turns), chat=chat)

    def _messages(self) -> list[Message]:
        """Return the messages with the system prompt beside them. Data sets write none as an empty one."""
        messages = [each for each in self.messages if each.role != "system" or each.content.strip()]
        if self.system.strip() and [each.content for each in messages if each.role == "system"] != [self.system]:
            if messages and messages[0].role == "system":
                raise ValueError("system: the conversation has another system prompt; leave one of them out")
            messages.insert(0, Message(role="system", content=self.system))
        if not messages:
            raise ValueError("the conversation has no message of the user to answer")
        return messages


def _by_turns(messages: Sequence[Message]) -> list[tuple[str, str]]:
    """`(role, content)` of messages that end with a question, after checking that user and assistant take turns."""
    roles = [message.role for message in messages]
    spoken = roles[1:] if roles[0] == "system" else roles
    if len(spoken) % 2 == 0 or spoken != (["user", "assistant"] * len(spoken))[: len(spoken)]:
        raise ValueError(
            f"turns must be of user and assistant by turns, after at most one system prompt; got {', '.join(roles)}"
        )
    return [(message.role, message.content) for message in messages]


# Forms of rows by the field that tells the form.
_FORMS: dict[str, type[_ChatForm | _PromptForm | _TextForm]] = {
    "messages": _ChatForm,
    "prompt": _PromptForm,
    "text": _TextForm,
}


class LeftOutError(UserError):
    """A row that trainers leave out, too. The message is the reason, without the row's place."""


@dataclass(frozen=True, slots=True)
class ReadRow:
    """A row and how it was read.

    Attributes:
        key: Column that tells its form.
        texts: Texts that were read, without white space around them.
        unread: Columns that were not, with their values.
    """

    key: str
    row: DataRow
    texts: tuple[str, ...]
    unread: Mapping[str, object]


def read_row(
    found: Mapping[str, object], place: str, columns: Columns | None = None, every: Sequence[str] | None = None
) -> ReadRow:
    """Read a row that stands at `place` of a file with the columns `every`, by default the row's.

    Raises:
        LeftOutError: The row is marked as a bad example, or is an empty text.
        UserError: It has none of the known keys or lacks one of the `columns`, or it is malformed.
    """
    found = {name: value for name, value in found.items() if value is not None and value == value}  # NaN is pandas'
    layout = _layout_of(found, place, columns or {}, tuple(found if every is None else every))
    fields = {name: found[column] for name, column in layout.items() if column in found}
    read = {*layout.values(), *(columns or ())}
    if "chosen" in read:
        read.add("rejected")
    if says_no(fields.pop("label", True)):
        raise LeftOutError("`label` says that the answer is a bad one")
    key = question = next(name for name in _FORMS if name in layout)
    if question == "text" and not str(fields["text"]).strip():
        raise LeftOutError("the text is empty")
    chat = _as_chat(fields) if question == "prompt" else None
    if chat is not None:
        # What isn't a part of the turns is unread.
        listed = {name for name in ("prompt", "answer") if _chat_in(fields.get(name)) is not None}
        read -= {layout[name] for name in fields.keys() - chat.keys() - listed}
        key, fields = "messages", chat
    form = _FORMS[key]
    unread = {name: value for name, value in found.items() if name not in read}
    given = {name: value for name, value in unread.items() if name not in form.model_fields} | fields
    try:
        row = form.model_validate(given).row()
    except ValueError as error:
        says = explain_validation(error, given, form.model_fields) if isinstance(error, ValidationError) else str(error)
        # Fields are named as the file names them.
        says = re.sub(r"(^|; )(\w+)(?=[.:])", lambda at: at[1] + layout.get(at[2], at[2]), says)
        raise UserError(f"{place}: {says}") from None
    said = [each for name, each in fields.items() if name != "messages"]
    if row.chat is not None:
        said += [message.content for message in row.chat.turns] if key == "messages" else []
        row = replace(row, chat=replace(row.chat, place=place))
    texts = tuple(each for each in leaves(said) if isinstance(each, str) and each)
    return ReadRow(layout[question], row, texts, unread)


def _layout_of(found: Mapping[str, object], place: str, columns: Columns, every: tuple[str, ...]) -> Mapping[str, str]:
    """Return a row's columns by their fields, also of one that has only an answer that is a chat."""
    has = f"it has: {', '.join(found) or 'none'}"
    lacks = next((column for column in columns if column not in every), None)
    if lacks is not None:
        raise UserError(f"{place}: --columns: the row has no `{lacks}`; {has}")
    layout = layout_of(tuple(found), every, tuple(columns.items()))
    if layout:
        return layout
    if _chat_in(found.get("chosen")) is not None and "chosen" not in columns:
        return {"messages": "chosen"}
    raise UserError(
        f"{place}: the row has none of the keys `messages`, `conversations`, `prompt`, `text`; {has}; say with "
        "--columns what is what, as in --columns prompt=question,answer=response"
    )
