"""Chat templates: they turn a conversation into the prompt of a model that was trained on conversations."""

from __future__ import annotations

import datetime as dt
import json
import re
import resource
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from moevolve.evaluators.errors import UserError, own_words
from moevolve.workers.contract.settings import PACKAGED_TEMPLATES, EngineConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Role and content.
Turn = tuple[str, str]
# A message or a tool in the form of OpenAI's API.
Message = Mapping[str, Any]

# Placeholder for an answer in a rendered conversation. Its private characters occur in no template.
_ANSWER = "\ue000answer\ue000"

# Template variables that turn thinking off or down, in the templates that know them. Answers are short, and thinking
# would use up their tokens.
_NO_THINKING: dict[str, object] = {"enable_thinking": False, "reasoning_effort": "low"}
# Template variables that turn thinking on, in the templates that know them.
_THINKING: dict[str, object] = {"enable_thinking": True, "thinking": True}

# Date that templates get for today's, so that prompts are the same on every day.
_TODAY = dt.datetime(2025, 1, 1, tzinfo=dt.UTC)
# Directives of `strftime` that templates may use.
_DIRECTIVES = (*"aAbBcdDeFhHIjmMpRSTuUVwWxXyYZ", "-d", "-m", "-H", "-I")

# A thinking block opened at the end of a prompt. Models read an empty block as no thinking.
_OPEN_THINK_BLOCK = re.compile(r"<think>(\s*)\Z")
# An answer's thinking block. Some templates write only the mark that ends it.
_LAST_THINK_MARKS = re.compile(r"(?:<think>\s*)?(?:</think>\s*)?\Z")
_FIRST_THINK_BLOCK = re.compile(r"\s*(?:<think>(.*?))?</think>\s*", re.DOTALL)
# Thoughts that an answer begins with. A prompt that opens the block leaves only the mark that ends it to the answer.
_THOUGHTS = re.compile(r"\s*(?:<think>)?((?:(?!</?think>).)*)</think>\s*", re.DOTALL)

# Bytes that a template may take beyond what the process has: those of models take a few megabytes.
_ROOM = 2**30
_ONE_AT_A_TIME = threading.Lock()

# Beginning of the marks in contents and calls that tell whether a template writes them.
_MARK = "zq0x"
# Jinja that gives messages without content a null again: `transformers` removes it, and some templates ask for it.
_NULL_CONTENT = (
    "{%- set every = namespace(message=[]) -%}{%- for message in messages -%}{%- set every.message = every.message + "
    "[message if 'content' in message else dict(message, content=none)] -%}{%- endfor -%}"
    "{%- set messages = every.message -%}"
)
# Roles whose contents may have to be lists of parts: nobody's first.
_ROLES_IN_PARTS = (
    (),
    ("user", "tool", "assistant", "system"),
    ("user", "tool", "assistant"),
    ("user", "tool", "system"),
    ("user", "tool"),
)
# A conversation that a template with calls of tools should be able to write.
_CALLING: tuple[Message, ...] = (
    {"role": "user", "content": "question"},
    {
        "role": "assistant",
        "tool_calls": [
            {"type": "function", "id": "call00000", "function": {"name": "call00000", "arguments": {"key": "value"}}}
        ],
    },
    {"role": "tool", "name": "call00000", "tool_call_id": "call00000", "content": "result"},
    {"role": "assistant", "content": "answer"},
)


class ChatPrompt(NamedTuple):
    """A rendered conversation up to the beginning of the model's answer.

    Attributes:
        text: Text with all special tokens.
        spaces: Spaces that the template puts before an answer; tokenizers join them with its first word.
    """

    text: str
    spaces: str


class ChatTemplate:
    """A chat template for one tokenizer.

    Unless a prompt asks for thoughts, thinking is turned off where the template allows it, and a thinking block that
    the template opens is closed at once. Text that the template puts between its prompt and an answer (GPT-OSS: the
    marks of the final channel) becomes part of the prompt. Methods raise UserError if the template refuses a
    conversation.

    Args:
        tokenizer: Tokenizer that provides the special tokens.
        source: Template in Jinja2.
        name: Name of the template, for messages.
        with_tools: Template for conversations with a list of tools, if that is another one.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, source: str, name: str, with_tools: ChatTemplate | None = None
    ) -> None:
        self._tokenizer, self._with_tools = tokenizer, with_tools
        # A Jinja macro makes `strftime_now` return `_TODAY`, at midnight. `transformers` provides it from the clock and
        # doesn't pass on another function. Jinja has no dates, so the macro replaces each directive by its value.
        known = "".join(f"|replace('%{letter}', '{_TODAY.strftime(f'%{letter}')}')" for letter in _DIRECTIVES)
        clock = f"{{%- macro strftime_now(form) -%}}{{{{ form{known} }}}}{{%- endmacro -%}}"
        self._source = clock + _NULL_CONTENT + source
        self._name = name

    def prompt(self, turns: Sequence[Turn], thinks: bool = False) -> ChatPrompt:
        """Render a conversation up to the beginning of the model's answer.

        If the template has no system role, or drops it, the system prompt is put before the first user turn. The text
        before an answer is read from the conversation rendered with an answer, if that begins like the prompt.
        Otherwise the prompt is used as it is: some templates render given answers differently, for example without the
        thinking block that they open for new ones. With `thinks` the prompt is what servers make, so that the answer
        begins with the thoughts of a model that has some.
        """
        if thinks:
            messages = self._with_system_prompt([_message(*turn) for turn in turns])
            return ChatPrompt(self._render(messages, generates=True, thinks=True), "")
        prompt, before, _ = self._around_answer(turns)
        opening = before.removeprefix(prompt) if before.startswith(prompt) else ""
        marks = opening.rstrip(" ")
        return ChatPrompt(_without_thoughts(prompt + marks), opening[len(marks) :])

    def conversation(
        self, messages: Sequence[Message], tools: Sequence[Message], answer: Message | None
    ) -> tuple[str, str | None]:
        """Render a conversation with tool calls or thoughts, whose messages are in the form of OpenAI's API.

        Thinking is on if the answer has thoughts. If the template writes thoughts but not those of a given answer, they
        are put there as the model writes them.

        Args:
            messages: Messages up to the one to be answered. One that only calls tools has no content.
            tools: Tools that the model may call.
            answer: The assistant's answer, which may call tools; None without one.

        Returns:
            The prompt, and the answer as the model writes it, without the token that ends it.

        Raises:
            UserError: The template leaves out a content, a call or an argument, or begins a given answer in another way
                than a new one.
        """
        if tools and self._with_tools is not None:
            return self._with_tools.conversation(messages, tools, answer)
        messages = self._with_system_prompt(self._with_known_roles(messages, tools), tools)
        if answer is None:
            self._check_complete(messages, tools)
            return _without_thoughts(self._render(messages, generates=True, tools=tools)), None
        self._check_complete((*messages, answer), tools)
        apart = thoughts_apart(answer)
        divided = self._divided(messages, tools, apart)
        if divided is not None and apart.get("reasoning_content", "").strip() not in divided[1]:
            divided = self._divided(messages, tools, answer)  # the template doesn't write thoughts
        questions = [message for message in messages if message["role"] == "user"]
        if divided is None and questions and not apart.get("reasoning_content", "").strip():
            # Templates of DeepSeek's kind write a call after a tool's result as if no answer began there.
            alone = self._divided(questions[-1:], tools, apart)
            prompt = _without_thoughts(self._render(messages, generates=True, tools=tools))
            divided = None if alone is None else (prompt, alone[1])
        if divided is None:
            raise UserError(
                f"engine.chat_template: {self._name} begins a given answer in another way than a new one, so the "
                "answer's tokens can't be told; leave the conversation out"
            )
        return divided

    def _divided(
        self, messages: Sequence[Message], tools: Sequence[Message], answer: Message
    ) -> tuple[str, str] | None:
        """Return the prompt and the answer; None if an answer begins in another way than the prompt for a new one."""
        thoughts = answer.get("reasoning_content", "").strip()
        prompt = self._render(messages, generates=True, tools=tools, thinks=bool(thoughts))
        answered = self._render((*messages, _message("assistant", _ANSWER)), generates=False, tools=tools)
        whole = self._render((*messages, answer), generates=False, tools=tools, thinks=bool(thoughts))
        whole = whole.removesuffix(answered.partition(_ANSWER)[2])
        closed = prompt if thoughts else _without_thoughts(prompt)
        if whole.startswith(closed) and thoughts in whole[len(closed) :]:
            return closed, whole[len(closed) :]
        # Thinking blocks differ between given answers and new ones.
        begun = _LAST_THINK_MARKS.sub("", prompt)
        if not whole.startswith(begun):
            return None
        block = _FIRST_THINK_BLOCK.match(whole, len(begun))
        rest = whole[len(begun) if block is None else block.end() :]
        if not thoughts or "</think>" not in self._source:
            return _without_thoughts(prompt), rest
        opened = _OPEN_THINK_BLOCK.search(prompt)
        if opened is not None:
            return prompt, thoughts + _end_of_thoughts(opened) + rest
        return begun, f"<think>\n{thoughts}\n</think>\n\n{rest}"

    def reads(self, field: str) -> bool:
        """Return whether a further field of messages changes what the template writes."""
        said = [_message(role, "text") for role in ("user", "assistant", "user")]
        marked = [{**message, field: _MARK} for message in said]
        return self._render(said, generates=True) != self._render(marked, generates=True)

    def end_token(self) -> int | None:
        """Return the special token that the template puts after an answer; None without one."""
        _, _, after = self._around_answer((("user", "question"),))
        tokens = self._tokenizer(after, add_special_tokens=False)["input_ids"] if after else []
        return tokens[0] if tokens and tokens[0] in self._tokenizer.all_special_ids else None

    def _around_answer(self, turns: Sequence[Turn]) -> tuple[str, str, str]:
        """Return the prompt, and the text before and after the answer in a conversation that contains one."""
        messages = self._with_system_prompt([_message(*turn) for turn in turns])
        prompt = self._render(messages, generates=True)
        whole = self._render((*messages, _message("assistant", _ANSWER)), generates=False)
        before, answer, after = whole.partition(_ANSWER)
        return prompt, before if answer else "", after

    def _with_system_prompt(self, messages: Sequence[Message], tools: Sequence[Message] = ()) -> Sequence[Message]:
        """Merge the system prompt into the first user turn if the template has no system role."""
        if messages[0]["role"] != "system":
            return messages
        system, first, *others = messages
        with suppress(UserError):
            if system["content"].strip() in self._render(messages, generates=True, tools=tools):
                return messages
        return {**first, "content": f"{system['content']}\n\n{first['content']}"}, *others

    def _with_known_roles(self, messages: Sequence[Message], tools: Sequence[Message]) -> Sequence[Message]:
        """Make a developer's messages those of the system, as servers do, if the template refuses or drops them."""
        if all(message["role"] != "developer" for message in messages):
            return messages
        with suppress(UserError):
            self._check_complete(messages, tools)
            return messages
        return [_message("system", each["content"]) if each["role"] == "developer" else each for each in messages]

    def _check_complete(self, messages: Sequence[Message], tools: Sequence[Message]) -> None:
        """Raise an error if the template leaves out a content, a call of a tool or an argument."""
        marked, marks = _marked(messages)
        written = self._render(marked, generates=False, tools=tools)
        for mark, what in marks.items():
            if mark not in written:
                raise UserError(
                    f"engine.chat_template: {self._name} leaves out {what}; put it into a message of its own, each "
                    "call followed by its result, or leave the conversation out"
                )

    @cached_property
    def _call_form(self) -> tuple[str | None, bool]:
        """Content of messages that only call tools, which is null or empty, and whether arguments are JSON text.

        It is the first form in which the template writes a call with all its parts.
        """
        marked, marks = _marked(_CALLING)
        for form in product((None, ""), (False, True)):
            with suppress(UserError):
                written = self._written([_in_form(message, *form) for message in marked], False, (), _NO_THINKING)
                # A template that doesn't ask for null writes it out.
                if all(mark in written for mark in marks) and "None" not in written:
                    return form
        return "", False

    @cached_property
    def _in_parts(self) -> Collection[str]:
        """Roles whose contents are lists of parts, as templates of models that see images may want them.

        Such a template writes nothing of a text, since a text has no parts; others write Python's form of a list.
        """
        roles = ("system", "user", "assistant", "user")
        said = [_message(role, f"{_MARK}{place}x") for place, role in enumerate(roles)]
        for messages in (said, said[1:], said[1:2]):  # not all have system prompts and answers
            silent = 0
            for listed in _ROLES_IN_PARTS:
                with suppress(UserError):
                    written = self._applied(_of_parts(messages, listed), True, (), {})
                    if all(message["content"] in written for message in messages) and "'type': 'text'" not in written:
                        return listed
                    silent += messages[0]["content"] not in written
        if silent == len(_ROLES_IN_PARTS):
            raise UserError(
                f"engine.chat_template: {self._name} writes nothing of what the user says, neither of a text nor of a "
                "list of parts; use another template, or `none`"
            )
        return ()

    def _render(
        self, messages: Sequence[Message], generates: bool, tools: Sequence[Message] = (), thinks: bool = False
    ) -> str:
        if any("tool_calls" in message for message in messages):
            messages = [_in_form(message, *self._call_form) for message in messages]
        return self._written(messages, generates, tools, _THINKING if thinks else _NO_THINKING)

    def _written(
        self, messages: Sequence[Message], generates: bool, tools: Sequence[Message], variables: Mapping[str, object]
    ) -> str:
        # Templates of GPT-OSS's kind have another name for thoughts.
        thoughts = ({"thinking": each["reasoning_content"]} if "reasoning_content" in each else {} for each in messages)
        messages = [{**message, **more} for message, more in zip(messages, thoughts, strict=True)]
        return self._applied(_of_parts(messages, self._in_parts), generates, tools, variables)

    def _applied(
        self, messages: Sequence[Message], generates: bool, tools: Sequence[Message], variables: Mapping[str, object]
    ) -> str:
        try:
            with _bounded_memory():
                written = self._tokenizer.apply_chat_template(
                    [dict(message) for message in messages],
                    tools=[dict(tool) for tool in tools] or None,
                    chat_template=self._source,
                    tokenize=False,
                    add_generation_prompt=generates,
                    **variables,
                )
        except MemoryError:
            raise UserError(
                f"engine.chat_template: {self._name} takes more than {_ROOM >> 20:,} MiB for a prompt; use another "
                "template, or `none`"
            ) from None
        except Exception as error:  # noqa: BLE001 - a template can fail in any way Python can
            raise UserError(
                f"engine.chat_template: {self._name} refuses the prompts: {own_words(error)}; change them, or use "
                "another template, or `none`"
            ) from None
        assert isinstance(written, str)
        return written


@contextmanager
def _bounded_memory() -> Iterator[None]:
    """Let the kernel refuse more than `_ROOM` to this process, where it is Linux.

    Jinja's sandbox bounds ranges, but not products and sums of texts, widths of formats and filters that pad.
    """
    try:
        held = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[5]) * resource.getpagesize()
    except OSError:
        yield
        return
    with _ONE_AT_A_TIME:
        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        most = held + _ROOM
        resource.setrlimit(resource.RLIMIT_DATA, (most if soft == resource.RLIM_INFINITY else min(soft, most), hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _of_parts(messages: Sequence[Message], roles: Collection[str]) -> Sequence[Message]:
    """Make the contents of some roles' messages lists of parts."""
    return [
        {**each, "content": [{"type": "text", "text": each["content"]}]}
        if each["role"] in roles and each.get("content")
        else each
        for each in messages
    ]


def thoughts_apart(answer: Message) -> Message:
    """Move thoughts at the beginning of an answer's content into their own field; empty ones are white space there."""
    block = _THOUGHTS.match(answer.get("content", ""))
    if block is None or "reasoning_content" in answer:
        return answer
    return {**answer, "content": answer["content"][block.end() :], "reasoning_content": block[1]}


def _in_form(message: Message, silence: str | None, as_text: bool) -> Message:
    """Return a message in a form of `ChatTemplate._call_form`."""
    if "tool_calls" not in message:
        return message
    calls = message["tool_calls"]
    if as_text:
        functions = (call["function"] for call in calls)
        texts = (each | {"arguments": json.dumps(each["arguments"], ensure_ascii=False)} for each in functions)
        calls = [call | {"function": function} for call, function in zip(calls, texts, strict=True)]
    content = {} if silence is None else {"content": silence}
    return {**content, **message, "tool_calls": calls}


def _marked(messages: Sequence[Message]) -> tuple[list[Message], dict[str, str]]:
    """Put a mark of its own behind every content, and instead of every called name and every argument's name.

    Returns the messages, and what each mark stands for.
    """
    marks: dict[str, str] = {}

    def mark(what: str) -> str:
        made = f"{_MARK}{len(marks)}x"
        marks[made] = what
        return made

    marked: list[Message] = []
    for number, message in enumerate(messages, start=1):
        changes: dict[str, object] = {}
        if message.get("content"):
            changes["content"] = message["content"] + mark(f"what message {number} says")
        if "tool_calls" in message:
            changes["tool_calls"] = calls = []
        for call in message.get("tool_calls", ()):
            name = call["function"]["name"]
            where = f"the call of `{name}` in message {number}"
            now = mark(where)
            arguments = {
                mark(f"argument `{key}` of {where}"): value for key, value in call["function"]["arguments"].items()
            }
            # Templates of Kimi's kind write a call's id instead of its name.
            ids = {"id": call["id"].replace(f".{name}:", f".{now}:")} if isinstance(call.get("id"), str) else {}
            calls.append({**call, **ids, "function": {"name": now, "arguments": arguments}})
        marked.append({**message, **changes})
    return marked, marks


def _without_thoughts(prompt: str) -> str:
    """Close a thinking block that a prompt ends with."""
    opened = _OPEN_THINK_BLOCK.search(prompt)
    return prompt if opened is None else prompt + _end_of_thoughts(opened)


def _end_of_thoughts(opened: re.Match[str]) -> str:
    return "\n</think>\n\n" if opened[1] else "</think>"


def chat_template(tokenizer: PreTrainedTokenizerBase, config: EngineConfig) -> ChatTemplate | None:
    """Return the chat template that `EngineConfig.chat_template` selects; None for no template.

    A name selects one of the tokenizer's templates if it has several, or a packaged one. `auto` takes `default`, and
    `tool_use` for a conversation with tools, as `transformers` does.

    Raises:
        UserError: There is no such template, or the tokenizer has several and no default.
    """
    own, name = getattr(tokenizer, "chat_template", None), config.chat_template
    if name == "none" or (name == "auto" and not own):
        return None
    if name == "auto" and isinstance(own, str):
        return ChatTemplate(tokenizer, own, "the tokenizer's template")
    named = PACKAGED_TEMPLATES | (own if isinstance(own, dict) else {})
    wanted = "default" if name == "auto" else name
    if wanted not in named:
        what = "the tokenizer has no default template" if name == "auto" else f"the tokenizer has no template `{name}`"
        raise UserError(f"engine.chat_template: {what}; use one of: none, auto, {', '.join(named)}")
    with_tools = named.get("tool_use") if name == "auto" else None
    tooled = None if with_tools is None else ChatTemplate(tokenizer, with_tools, "template `tool_use`")
    return ChatTemplate(tokenizer, named[wanted], f"template `{wanted}`", tooled)
