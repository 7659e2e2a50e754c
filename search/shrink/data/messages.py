"""Messages of chats, in the form of OpenAI's API or of ShareGPT."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, model_validator

from moevolve.evaluators.text_files import parse_json
from moevolve.workers.engine.chat import thoughts_apart

# OpenAI's roles by those of ShareGPT, Gemma and Llama; data sets with tools have more than one set of names for them.
ROLES = {role: role for role in ("system", "developer", "user", "assistant", "tool")} | {
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "model", "bot", "ai", "function_call", "tool_call"), "assistant"),
    **dict.fromkeys(("observation", "function_response", "tool_response", "function", "ipython"), "tool"),
}
_CALLS = ("function_call", "tool_call")
# Fields that hold the assistant's thoughts.
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
# Fields of messages that aren't text.
_MEDIA = ("image", "images", "audio", "audios", "video", "videos")
# Fields that tell trainers whether to learn a message: of OpenAI (weight), axolotl (train, training), LLaMA-Factory,
# ms-swift and slime (loss), verl (trainable, loss_mask). torchtune's `masked` and axolotl's `train_detail` do so, too.
_LEARNED = ("weight", "train", "training", "trainable", "loss", "loss_mask", "loss_weight")
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
        return bool(self.tools) or any(each.role == "tool" or each.tool_calls for each in self.turns)

    @property
    def needs_template(self) -> bool:
        """Whether only a chat template can write it: it has tools, or the assistant speaks first."""
        first = next((each.role for each in self.turns if each.role != "system"), "user")
        return self.has_tools or first == "assistant"

    @property
    def has_thoughts(self) -> bool:
        """Whether the assistant thinks, in a field or in marks at the answer's beginning, also in empty ones."""
        apart = self.answer is not None and "reasoning_content" in thoughts_apart(self.answer.as_data())
        return apart or any(each.reasoning_content.strip() for each in self.messages)

    @property
    def says_more(self) -> bool:
        """Whether it has more than turns of system, user and assistant: tools, a greeting, thoughts or a developer."""
        return self.needs_template or self.has_thoughts or any(each.from_developer for each in self.messages)

    @property
    def further(self) -> frozenset[str]:
        """Fields of messages that say something, and that only some templates write: names, and what isn't read."""
        return frozenset[str]().union(*(each.further for each in self.turns))

    @property
    def thoughts(self) -> str:
        """What the assistant thinks before the answer; empty if nothing is given."""
        if self.answer is None:
            return ""
        return str(thoughts_apart(self.answer.as_data()).get("reasoning_content", "")).strip()

    def as_data(self) -> tuple[list[dict[str, object]], tuple[Mapping[str, Any], ...], dict[str, object] | None]:
        """Return messages, tools and answer for a chat template."""
        answer = None if self.answer is None else self.answer.as_data()
        return [message.as_data() for message in self.messages], self.tools, answer

    @property
    def turns(self) -> tuple[Message, ...]:
        """All messages, with the answer."""
        return self.messages if self.answer is None else (*self.messages, self.answer)


def joined(value: object) -> object:
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


def not_empty(text: str) -> str:
    """Return the text; ValueError if it is blank."""
    if not text.strip():
        raise ValueError("it must be a text that isn't empty")
    return text


def parsed(value: object) -> object:
    """JSON within JSON, which OpenAI's API has for arguments, and some data sets for tools."""
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value) if value.strip() else None
    except ValueError as error:
        raise ValueError(f"it must be JSON: {error}") from None


def says_no(value: object) -> bool:
    """Whether a mark is false or 0, also as a text."""
    return str(value).lower() in ("false", "0", "0.0")


def _unlearned(message: Mapping[str, object]) -> str | None:
    """Return the mark, with its value, that says that a message, or a part, isn't to be learned; None without."""
    name = next((name for name in _LEARNED if name in message and says_no(message[name])), None)
    if name is None and message.get("masked") is True:
        name = "masked"
    parts = message.get("train_detail")
    if isinstance(parts, list) and any(isinstance(part, Mapping) and part.get("train") is False for part in parts):
        name = "train_detail"
    return None if name is None else f"`{name}` {json.dumps(message[name], default=str)}"


class Fields(BaseModel):
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


class _Function(Fields):
    name: str
    arguments: Annotated[dict[str, object] | None, BeforeValidator(parsed)] = None


class _Call(BaseModel):
    function: _Function
    id: object = None

    def as_data(self) -> dict[str, object]:
        function = {"name": self.function.name, "arguments": self.function.arguments or {}}
        call: dict[str, object] = {"type": "function", "function": function}
        return call if self.id is None else call | {"id": self.id}


class Message(Fields):
    """A message in the form of OpenAI's API."""

    role: Annotated[
        Literal["system", "developer", "user", "assistant", "tool"],
        AfterValidator(lambda role: "system" if role == "developer" else role),
    ]
    content: Annotated[str, BeforeValidator(joined)] = ""
    reasoning_content: Annotated[str, BeforeValidator(joined)] = ""
    tool_calls: tuple[_Call, ...] = ()
    tool_call_id: object = None
    name: object = None
    further: frozenset[str] = frozenset()
    unlearned: str | None = None
    from_developer: bool = False

    @model_validator(mode="before")
    @classmethod
    def _thoughts(cls, found: object) -> object:
        """Give thoughts one name, since some servers give them under two, and refuse what is no text.

        The names of fields that aren't read are kept, since a template may read them, and a mark that says that the
        message isn't to be learned.
        """
        if not isinstance(found, Mapping):
            return found
        seen = next((key for key in _MEDIA if found.get(key)), None)
        if seen is not None:
            raise ValueError(f"it has `{seen}`, and only text is read")
        thoughts = [found[key] for key in _THOUGHTS if found.get(key)]
        others = {key: value for key, value in found.items() if key not in _THOUGHTS}
        read = cls.model_fields.keys() - (set() if found.get("role") == "tool" else {"name"})
        others["further"] = frozenset(key for key, value in others.items() if value and key not in read)
        others |= {"unlearned": _unlearned(found), "from_developer": found.get("role") == "developer"}
        return others | {"reasoning_content": thoughts[0]} if thoughts else others

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.role != "assistant" and (self.tool_calls or self.reasoning_content.strip()):
            raise ValueError("only the assistant calls tools and thinks")
        # A search may find nothing, and data sets have empty system prompts and answers.
        if self.role == "user":
            not_empty(self.content)
        return self

    def as_data(self) -> dict[str, object]:
        """Return the message for a chat template: a call's arguments are an object, and calls may have no content."""
        message: dict[str, object] = {"role": "developer" if self.from_developer else self.role}
        if self.reasoning_content.strip():
            message["reasoning_content"] = self.reasoning_content
        if self.tool_calls:
            message["tool_calls"] = [call.as_data() for call in self.tool_calls]
        if self.content.strip() or not self.tool_calls:
            message["content"] = self.content
        further = {"tool_call_id": self.tool_call_id, "name": self.name}
        return message | {key: value for key, value in further.items() if value is not None}


def message_of(turn: object) -> object:
    """Return a turn of any form as a message. A `function_call` of ShareGPT's holds calls as JSON, one or a list."""
    if not isinstance(turn, Mapping) or not turn.keys() & {"role", "from"}:
        raise ValueError("a turn is an object with `from` and `value`, or with `role` and `content`")
    key = "role" if "role" in turn else "from"
    name, content = turn[key], turn.get("content", turn.get("value"))
    role = ROLES.get(name.lower()) if isinstance(name, str) else None
    if role is None:
        raise ValueError(f"unknown `{key}` {name!r}; known are {', '.join(ROLES)}")
    message = {key: value for key, value in turn.items() if key not in ("role", "from", "content", "value")}
    if str(name).lower() not in _CALLS:
        return message | {"role": role, "content": content}
    calls = parsed(content)
    calls = calls if isinstance(calls, list) else [calls]
    return message | {"role": role, "tool_calls": [{"function": call} for call in calls]}
