"""Chat templates: they turn a conversation into the prompt of a model that was trained on conversations."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import jinja2

from moevolve.evaluators.errors import UserError
from moevolve.workers.contract.settings import PACKAGED_TEMPLATES, EngineConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Turn = tuple[str, str]
"""Role and content."""
Message = Mapping[str, Any]
"""A message or a tool in the form of OpenAI's API."""

_ANSWER = "\ue000answer\ue000"
"""Placeholder for an answer in a rendered conversation. Its private characters occur in no template."""

_NO_THINKING: dict[str, Any] = {"enable_thinking": False, "reasoning_effort": "low"}
"""Template variables that turn thinking off or down, in the templates that know them. Answers are short, and thinking
would use up their tokens."""
_THINKING: dict[str, Any] = {"enable_thinking": True, "thinking": True}
"""Template variables that turn thinking on, in the templates that know them."""

_DIRECTIVES = (*"aAbBcdDeFhHIjmMpRSTuUVwWxXyYZ", "-d", "-m", "-H", "-I")
"""Directives of `strftime` that templates may use."""

_OPEN_THINK_BLOCK = re.compile(r"<think>(\s*)\Z")
"""A thinking block opened at the end of a prompt. Models read an empty block as no thinking."""


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
        date: Date given to templates that ask for today's.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, source: str, name: str, date: dt.date) -> None:
        self._tokenizer = tokenizer
        self._source = _fixed_clock(date) + source
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
        """Render a conversation with tool calls, whose messages are in the form of OpenAI's API.

        Args:
            messages: Messages up to the one to be answered.
            tools: Tools that the model may call.
            answer: The assistant's answer, which may call tools; None if there is none.

        Returns:
            The prompt, and the answer as the model writes it, without the token that ends it.

        Raises:
            UserError: The template begins a given answer in another way than a new one.
        """
        prompt = self._render(messages, generates=True, tools=tools)
        if answer is None:
            return _without_thoughts(prompt), None
        whole = self._render((*messages, answer), generates=False, tools=tools)
        said = self._render((*messages, _message("assistant", _ANSWER)), generates=False, tools=tools)
        after = said.partition(_ANSWER)[2]
        if not whole.startswith(prompt):
            raise UserError(
                f"engine.chat_template: {self._name} begins given answers in another way than new ones, so the tokens "
                "of tool calls can't be told; leave conversations with tools out"
            )
        return _without_thoughts(prompt), whole[len(prompt) :].removesuffix(after).strip()

    def end_token(self) -> int | None:
        """Return the special token that the template puts after an answer; None if there is none."""
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

    def _with_system_prompt(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Merge the system prompt into the first user turn if the template has no system role."""
        if messages[0]["role"] != "system":
            return messages
        system, first, *others = messages
        with suppress(UserError):
            if system["content"].strip() in self._render(messages, generates=True):
                return messages
        return _message(first["role"], f"{system['content']}\n\n{first['content']}"), *others

    def _render(
        self, messages: Sequence[Message], generates: bool, tools: Sequence[Message] = (), thinks: bool = False
    ) -> str:
        try:
            written = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] or None,
                chat_template=self._source,
                tokenize=False,
                add_generation_prompt=generates,
                **(_THINKING if thinks else _NO_THINKING),
            )
        except jinja2.TemplateError as error:
            raise UserError(
                f"engine.chat_template: {self._name} refuses the prompts: {error}; use another one, or `none`"
            ) from None
        assert isinstance(written, str)
        return written


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _without_thoughts(prompt: str) -> str:
    """Close a thinking block that a prompt ends with."""
    open_block = _OPEN_THINK_BLOCK.search(prompt)
    if open_block is None:
        return prompt
    return prompt + ("\n</think>\n\n" if open_block[1] else "</think>")


def _fixed_clock(date: dt.date) -> str:
    """Jinja macro that makes `strftime_now` return a fixed date, at midnight."""
    # `transformers` provides `strftime_now` from the clock and doesn't pass on another function. Jinja has no dates, so
    # the macro replaces each directive by its value.
    moment = dt.datetime.combine(date, dt.time())
    known = "".join(f"|replace('%{letter}', '{moment.strftime(f'%{letter}')}')" for letter in _DIRECTIVES)
    return f"{{%- macro strftime_now(form) -%}}{{{{ form{known} }}}}{{%- endmacro -%}}"


def chat_template(tokenizer: PreTrainedTokenizerBase, config: EngineConfig) -> ChatTemplate | None:
    """Return the chat template that `EngineConfig.chat_template` selects; None for no template.

    A name selects one of the tokenizer's templates if it has several, or a packaged one.

    Raises:
        UserError: There is no such template, or the tokenizer has several and no default.
    """
    own, name = getattr(tokenizer, "chat_template", None), config.chat_template
    if name == "none" or (name == "auto" and not own):
        return None
    if name == "auto" and isinstance(own, str):
        return ChatTemplate(tokenizer, own, "the tokenizer's template", config.date)
    named = PACKAGED_TEMPLATES | (own if isinstance(own, dict) else {})
    wanted = "default" if name == "auto" else name
    if wanted not in named:
        what = "the tokenizer has no default template" if name == "auto" else f"there is no template `{name}`"
        raise UserError(f"engine.chat_template: {what}; use one of: none, auto, {', '.join(named)}")
    return ChatTemplate(tokenizer, named[wanted], f"template `{wanted}`", config.date)
