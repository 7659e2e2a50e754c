"""Chats in the forms of OpenAI's API and of ShareGPT, and the texts of those with tools in the model's own template."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from moevolve.evaluators.errors import UserError

if TYPE_CHECKING:
    from moevolve.search.config.run import RunConfig

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_KEYS = {"role", "content", "tool_calls", "tool_call_id", "name", "refusal"}
_SHAREGPT = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "function_response": "tool",
    "tool": "tool",
}
"""OpenAI's roles by those of ShareGPT, of which data sets with tools have more than one set."""


@dataclass(frozen=True, slots=True)
class ToolChat:
    """A conversation.

    Attributes:
        messages: Messages up to the one to be answered, in the form of OpenAI's API, but with a call's arguments as an
            object, as chat templates expect them.
        tools: Tools that the model may call.
        answer: The assistant's answer; None if there is none.
        first_message: Text of the first message that isn't the system prompt.
    """

    messages: tuple[Mapping[str, Any], ...] = field(repr=False)
    tools: tuple[Mapping[str, Any], ...] = field(repr=False)
    answer: Mapping[str, Any] | None = field(repr=False)
    first_message: str

    @property
    def has_tools(self) -> bool:
        """Whether there are tools, calls of tools or their results."""
        messages = self.messages if self.answer is None else (*self.messages, self.answer)
        return bool(self.tools) or any(each["role"] == "tool" or "tool_calls" in each for each in messages)


def read_chat(found: Mapping[str, Any], place: str) -> ToolChat:
    """Read a row of `messages` and `tools`.

    Raises:
        UserError: A message, a call or a tool is malformed; the message names the place.
    """
    messages = found["messages"]
    if not isinstance(messages, list) or not messages:
        raise UserError(f"{place}: `messages` must be a list of turns")
    read = [_message(message, f"{place}: turn {number}") for number, message in enumerate(messages, start=1)]
    return _chat(read, found, place)


def read_sharegpt(found: Mapping[str, Any], place: str) -> ToolChat:
    """Read a row of `conversations`, `system` and `tools`.

    Raises:
        UserError: See `read_chat`.
    """
    turns = found["conversations"]
    if not isinstance(turns, list) or not turns:
        raise UserError(f"{place}: `conversations` must be a list of turns")
    read = [_turn(turn, f"{place}: turn {number}") for number, turn in enumerate(turns, start=1)]
    if found.get("system"):
        read.insert(0, {"role": "system", "content": text_of(found, "system", place)})
    return _chat(read, found, place)


def _chat(read: list[dict[str, Any]], found: Mapping[str, Any], place: str) -> ToolChat:
    """The conversation of messages in OpenAI's form, and of a row's tools."""
    for number, (before, message) in enumerate(pairwise([{"role": "system"}, *read]), start=1):
        if message["role"] == "tool" and before["role"] != "tool" and "tool_calls" not in before:
            raise UserError(f"{place}: turn {number}: a tool's result, but no call of a tool before it")
    answer = read.pop() if read[-1]["role"] == "assistant" else None
    first = next((each["content"] for each in read if each["role"] != "system"), None)
    if not first:
        raise UserError(f"{place}: turns must be of user and assistant by turns, and there is nothing to answer")
    return ToolChat(tuple(read), _tools(found, place), answer, first)


def render_chats(config: RunConfig, chats: tuple[ToolChat, ...]) -> tuple[tuple[str, str | None], ...]:
    """Write chats as the model reads them.

    Args:
        config: Run of the model, and of the chat template's settings.
        chats: The chats.

    Returns:
        Prompt and answer of every chat. The token that the tokenizer puts before a text is left out of the prompt.

    Raises:
        UserError: The model has no chat template, or it refuses a chat.
    """
    from moevolve.workers.checkpoints.loading import load_tokenizer
    from moevolve.workers.engine.chat import chat_template

    tokenizer = load_tokenizer(config.model)
    template = chat_template(tokenizer, config.engine)
    if template is None:
        raise UserError(f"model {config.model.path}: it has no chat template, which tool calls need; leave them out")
    begins = tokenizer.bos_token if tokenizer("")["input_ids"][:1] == [tokenizer.bos_token_id] else None
    rendered = []
    for chat in chats:
        prompt, answer = template.conversation(chat.messages, chat.tools, chat.answer)
        rendered.append((prompt.removeprefix(begins or ""), answer))
    return tuple(rendered)


def text_of(found: Mapping[str, Any], key: str, place: str) -> str:
    """The text of a field, which may be a list of parts.

    Raises:
        UserError: It is no text, empty, or has parts that aren't text.
    """
    value = found.get(key)
    if isinstance(value, list) and value and all(isinstance(part, dict) for part in value):
        others = [part.get("type") for part in value if part.get("type") != "text"]
        if others:
            raise UserError(f"{place}: `{key}` has a part of type {others[0]!r}; only text is read")
        value = "".join(str(part.get("text", "")) for part in value)
    if not isinstance(value, str) or not value.strip():
        raise UserError(f"{place}: `{key}` must be a text that isn't empty, got {value!r:.60}")
    return value


def without_nulls(value: Any) -> Any:
    """A value without the fields that are null: columns of a table have them where JSON has no field."""
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def _message(found: Any, where: str) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise UserError(f"{where}: expected an object with `role` and `content`")
    found = without_nulls(found)
    if found.get("role") not in _ROLES:
        raise UserError(f"{where}: unknown `role` {found.get('role')!r}")
    unknown = sorted(found.keys() - _KEYS)
    if unknown:
        raise UserError(f"{where}: unknown key `{unknown[0]}`; known are {', '.join(sorted(_KEYS))}")
    message: dict[str, Any] = {"role": _ROLES[found["role"]]}
    calls = found.get("tool_calls")
    if calls:
        if not isinstance(calls, list) or message["role"] != "assistant":
            raise UserError(f"{where}: `tool_calls` must be a list, in a message of the assistant")
        message["tool_calls"] = [_call(call, f"{where}: call {number}") for number, call in enumerate(calls, start=1)]
    message["content"] = "" if calls and not found.get("content") else text_of(found, "content", where)
    return message | {key: found[key] for key in ("tool_call_id", "name") if key in found}


def _turn(found: Any, where: str) -> dict[str, Any]:
    """A turn of ShareGPT's form as a message. A `function_call` holds one call as JSON, or a list of them."""
    if not isinstance(found, dict):
        raise UserError(f"{where}: expected an object with `from` and `value`")
    role, unknown = found.get("from"), sorted(found.keys() - {"from", "value"})
    if role not in _SHAREGPT:
        raise UserError(f"{where}: unknown `from` {role!r}; known are {', '.join(_SHAREGPT)}")
    if unknown:
        raise UserError(f"{where}: unknown key `{unknown[0]}`; known are from, value")
    text = text_of(found, "value", where)
    if role != "function_call":
        return {"role": _SHAREGPT[role], "content": text}
    try:
        calls = json.loads(text)
    except ValueError:
        raise UserError(f"{where}: the `value` of a function_call must be JSON with `name` and `arguments`") from None
    calls = calls if isinstance(calls, list) else [calls]
    made = [_call({"function": call}, f"{where}: call {number}") for number, call in enumerate(calls, start=1)]
    return {"role": "assistant", "content": "", "tool_calls": made}


def _call(found: Any, where: str) -> dict[str, Any]:
    function = found.get("function") if isinstance(found, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise UserError(f"{where}: expected an object with a `function` that has a `name` and `arguments`")
    arguments = function.get("arguments", {})
    try:
        arguments = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        raise UserError(f"{where}: `arguments` of {function['name']} must be a JSON object")
    call = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return call | ({"id": found["id"]} if "id" in found else {})


def _tools(found: Mapping[str, Any], place: str) -> tuple[Mapping[str, Any], ...]:
    tools = found.get("tools") or []
    if isinstance(tools, str):  # some data sets have them as JSON within JSON
        try:
            tools = json.loads(tools)
        except ValueError:
            tools = None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise UserError(f"{place}: `tools` must be a list of objects")
    return tuple(tool if "function" in tool else {"type": "function", "function": tool} for tool in tools)
