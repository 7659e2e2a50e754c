"""Chat templates: how a conversation is written for a model that was trained on conversations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import jinja2

from moevolve.evaluators.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Turn = tuple[str, str]
"""`(role, content)`."""

PACKAGED = {
    "mixtral": (
        "{{ bos_token }}{% for message in messages %}"
        "{% if message.role == 'user' %}[INST]{{ message.content }}[/INST]"
        "{% elif message.role == 'assistant' %}{{ message.content }}{{ eos_token }}"
        "{% else %}{{ raise_exception('no system prompt') }}{% endif %}{% endfor %}"
    ),
}
"""Templates by name, for tokenizers that have none of that name. `mixtral` is what the authors of EEP wrap prompts in
(their released configurations of Mixtral-8x7B-Instruct): no white space at the marks, where Mixtral's own has some."""

_ANSWER = "\ue000answer\ue000"
"""Stands for an answer where the surroundings of answers are looked for; private characters occur in no template."""


class ChatTemplate:
    """One chat template with one tokenizer. Models that can be told not to think before they answer are told so.

    Args:
        tokenizer: gives the template its special tokens.
        source: the template, Jinja2.
        name: of the template, for messages.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, source: str, name: str) -> None:
        self._tokenizer = tokenizer
        self._source = source
        self._name = name

    def prompt(self, turns: Sequence[Turn]) -> str:
        """A conversation up to where the model's answer begins, with all special tokens that it needs.

        A template that has no system role, or drops it, is given the system prompt before the first user's turn.

        Raises:
            UserError: the template refuses the conversation.
        """
        return self._written(self._accepted(turns), generates=True)

    def opening(self, turns: Sequence[Turn]) -> str:
        """What the template writes between `prompt` and an answer (a space, an empty block of thoughts); often nothing.

        Raises:
            UserError: as `prompt`.
        """
        before, _ = self._around(turns)
        return before

    def end_token(self) -> int | None:
        """The special token that the template closes an answer with, if it does.

        Raises:
            UserError: as `prompt`.
        """
        _, behind = self._around((("user", "question"),))
        tokens = self._tokenizer(behind, add_special_tokens=False)["input_ids"] if behind else []
        return tokens[0] if tokens and tokens[0] in self._tokenizer.all_special_ids else None

    def _around(self, turns: Sequence[Turn]) -> tuple[str, str]:
        """What stands between the prompt and an answer to it, and behind that answer."""
        accepted = self._accepted(turns)
        prompt = self._written(accepted, generates=True)
        whole = self._written((*accepted, ("assistant", _ANSWER)), generates=False)
        before, _, behind = whole.partition(_ANSWER)
        # A template that writes earlier answers in another way than the last one tells nothing.
        return before.removeprefix(prompt) if before.startswith(prompt) else "", behind

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
            enable_thinking=False,  # thoughts would take up a short answer's tokens; few templates know it
        )
        assert isinstance(written, str)
        return written


def chat_template(tokenizer: PreTrainedTokenizerBase, name: str) -> ChatTemplate | None:
    """The chat template that a run asks for, None for none.

    Args:
        tokenizer: the model's.
        name: `auto` for the tokenizer's own one, if it has one; `none`; or a name, of one of the tokenizer's templates
            where it has several, else of a packaged one.

    Raises:
        UserError: no such template, or the tokenizer has several and none is its default.
    """
    own = getattr(tokenizer, "chat_template", None)
    if name == "none" or (name == "auto" and not own):
        return None
    if name == "auto" and isinstance(own, str):
        return ChatTemplate(tokenizer, own, "the tokenizer's template")
    named = PACKAGED | (own if isinstance(own, dict) else {})
    wanted = "default" if name == "auto" else name
    if wanted not in named:
        what = "the tokenizer has no default template" if name == "auto" else f"there is no template `{name}`"
        raise UserError(f"engine.chat_template: {what}; use one of: none, auto, {', '.join(named)}")
    return ChatTemplate(tokenizer, named[wanted], f"template `{wanted}`")
