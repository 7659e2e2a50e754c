"""Chat templates: how a conversation is written for a model that was trained on conversations."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jinja2

from moevolve.evaluators.errors import UserError
from moevolve.workers.contract.settings import PACKAGED_TEMPLATES, EngineConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Turn = tuple[str, str]
"""`(role, content)`."""

_ANSWER = "\ue000answer\ue000"
"""Stands for an answer where the surroundings of answers are looked for; private characters occur in no template."""


_NO_THOUGHTS: dict[str, Any] = {"enable_thinking": False, "reasoning_effort": "low"}
"""What templates are told; few know it. Thoughts would take up the tokens of a short answer."""

_DIRECTIVES = (*"aAbBcdDeFhHIjmMpRSTuUVwWxXyYZ", "-d", "-m", "-H", "-I")
"""Of `strftime`, those that templates may use."""

_OPEN_THOUGHTS = re.compile(r"<think>(\s*)\Z")
"""A block of thoughts that a prompt's end has opened. What is closed at once is what models know as no thoughts."""


class Asked(NamedTuple):
    """A conversation as a model is given it.

    Attributes:
        prompt: up to where its answer begins, with all special tokens that it needs.
        spaces: spaces that the template puts before an answer; tokenizers join them with its first word.
    """

    prompt: str
    spaces: str


class ChatTemplate:
    """One chat template with one tokenizer.

    Answers are short, and are scored as they stand: models that can be told not to think before they answer are told
    so, and thoughts that a template opens for them are closed. What the template puts between its prompt and an answer
    (GPT-OSS: the mark of the final channel) is part of the prompt.

    Args:
        tokenizer: gives the template its special tokens.
        source: the template, Jinja2.
        name: of the template, for messages.
        date: what the template is told when it asks for today's.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, source: str, name: str, date: dt.date) -> None:
        self._tokenizer = tokenizer
        self._source = _clock(date) + source
        self._name = name

    def asked(self, turns: Sequence[Turn]) -> Asked:
        """A conversation up to where the model's answer begins.

        A template that has no system role, or drops it, is given the system prompt before the first user's turn. What
        stands before an answer is read off the conversation with an answer, as long as that begins like the prompt. A
        template that writes given answers in another way than it asks for one (without the thoughts that it opens, say)
        tells nothing of what comes before them, so its prompt is taken as it is.

        Raises:
            UserError: the template refuses the conversation.
        """
        prompt, before, _ = self._around(turns)
        opening = before.removeprefix(prompt) if before.startswith(prompt) else ""
        marks = opening.rstrip(" ")
        prompt += marks
        opened = _OPEN_THOUGHTS.search(prompt)
        if opened is not None:
            prompt += "\n</think>\n\n" if opened[1] else "</think>"
        return Asked(prompt, opening[len(marks) :])

    def end_token(self) -> int | None:
        """The special token that the template closes an answer with, if it does.

        Raises:
            UserError: as `asked`.
        """
        _, _, behind = self._around((("user", "question"),))
        tokens = self._tokenizer(behind, add_special_tokens=False)["input_ids"] if behind else []
        return tokens[0] if tokens and tokens[0] in self._tokenizer.all_special_ids else None

    def _around(self, turns: Sequence[Turn]) -> tuple[str, str, str]:
        """What the template asks with, and what it writes before an answer and behind it where it is given one."""
        accepted = self._accepted(turns)
        prompt = self._written(accepted, generates=True)
        whole = self._written((*accepted, ("assistant", _ANSWER)), generates=False)
        before, found, behind = whole.partition(_ANSWER)
        return prompt, before if found else "", behind

    def _accepted(self, turns: Sequence[Turn]) -> Sequence[Turn]:
        """The turns with the system prompt where the template takes it."""
        if turns[0][0] != "system":
            return turns
        (_, system), (role, first), *others = turns
        try:
            if system.strip() in self._render(turns, generates=True):
                return turns
        except jinja2.TemplateError:
            pass
        return ((role, f"{system}\n\n{first}"), *others)

    def _written(self, turns: Sequence[Turn], generates: bool) -> str:
        try:
            return self._render(turns, generates)
        except jinja2.TemplateError as error:
            raise UserError(
                f"engine.chat_template: {self._name} refuses the prompts: {error}; use another one, or `none`"
            ) from None

    def _render(self, turns: Sequence[Turn], generates: bool) -> str:
        messages = [{"role": role, "content": content} for role, content in turns]
        written = self._tokenizer.apply_chat_template(
            messages,
            chat_template=self._source,
            tokenize=False,
            add_generation_prompt=generates,
            **_NO_THOUGHTS,
        )
        assert isinstance(written, str)
        return written


def _clock(date: dt.date) -> str:
    """What goes before a template so that it sees a fixed date: a function of its own in place of `transformers`' one.

    `transformers` answers `strftime_now` from the clock, and passes no other function on. Jinja knows no dates, so each
    directive is written out beforehand, at midnight.
    """
    moment = dt.datetime.combine(date, dt.time())
    known = "".join(f"|replace('%{letter}', '{moment.strftime(f'%{letter}')}')" for letter in _DIRECTIVES)
    return f"{{%- macro strftime_now(form) -%}}{{{{ form{known} }}}}{{%- endmacro -%}}"


def chat_template(tokenizer: PreTrainedTokenizerBase, config: EngineConfig) -> ChatTemplate | None:
    """The chat template that a run asks for, None for none.

    Args:
        tokenizer: the model's.
        config: its `chat_template` is `auto` for the tokenizer's own one, if it has one; `none`; or a name, of one of
            the tokenizer's templates where it has several, else of a packaged one.

    Raises:
        UserError: no such template, or the tokenizer has several and none is its default.
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
