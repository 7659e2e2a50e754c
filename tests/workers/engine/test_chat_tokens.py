"""A chat's tokens are those that `transformers` makes of it, whoever adds a beginning token, and in every task."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Iterator
from copy import deepcopy
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from published_templates import CALLING, CASES, bytewise_tokenizer

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.types import Example, Matching, PreparedSplit
from moevolve.workers.checkpoints.loading import load_tokenizer
from moevolve.workers.contract.settings import EngineConfig, ModelConfig
from moevolve.workers.engine.chat import chat_template
from moevolve.workers.engine.tokenizing import PromptTokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TEMPLATES = {name: template for name, (template, *_) in CASES.items()} | {f"{k} calling": v for k, v in CALLING.items()}
SYSTEM = {"role": "system", "content": "Be brief."}
ASKED, SAID = {"role": "user", "content": "Is it wet?"}, {"role": "assistant", "content": "It rains."}
FUNCTION = {"name": "weather", "arguments": {"place": 7}}
CALL = {"role": "assistant", "tool_calls": [{"type": "function", "id": "call00000", "function": FUNCTION}]}
FOUND = {"role": "tool", "tool_call_id": "call00000", "name": "weather", "content": "20 degrees"}
TOOLS = ({"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}},)
CHATS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "one turn": ([ASKED], SAID),
    "turns": ([SYSTEM, ASKED, SAID, {"role": "user", "content": "And now? "}], {**SAID, "content": " It's dry."}),
    "a call": ([ASKED], CALL),
    "a result": ([ASKED, CALL, FOUND], SAID),
}
OFF = {"enable_thinking": False, "reasoning_effort": "low"}


def tokenizer_of(template: str | dict[str, str] | None, adds_bos: bool) -> PreTrainedTokenizerFast:
    from tokenizers import processors

    tokenizer = bytewise_tokenizer()
    if not adds_bos:
        special = [("<s>", 1)]
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single="$A", special_tokens=special)
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture(autouse=True)
def the_first_of_january(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.utils import chat_template_utils

    class Clock(dt.datetime):
        @classmethod
        def now(cls, tz: dt.tzinfo | None = None) -> dt.datetime:  # type: ignore[override]
            return cls(2025, 1, 1, tzinfo=tz)

    monkeypatch.setattr(chat_template_utils, "datetime", Clock)


def forms(messages: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """The messages in the forms that templates want calls in: arguments as text, contents that are null or empty."""
    for as_text, content in product((False, True), (None, "", ...)) if CALL in messages else [(False, ...)]:
        found = deepcopy(messages)
        for message in found:
            for call in message.get("tool_calls", ()):
                if as_text:
                    call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
                if content is not ...:
                    message["content"] = content
        yield found


def by_transformers(tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, Any]], **more: Any) -> set[Any]:
    made = set()
    for form in forms(messages):
        try:
            tokens = tokenizer.apply_chat_template(form, tokenize=True, return_dict=False, **more, **OFF)
        except Exception:  # noqa: BLE001 - what a template refuses in one form is right in another
            continue
        # `transformers` takes nulls out of messages, and DeepSeek's kind then writes no call.
        if CALL not in messages or "place" in tokenizer.decode(tokens):
            made.add(tuple(tokens))
    return made


def tokens_of(tokenizer: PreTrainedTokenizerFast, example: Example, chat: Any, system: str = "") -> tuple[Any, Any]:
    split = PreparedSplit(
        *("chats", "search", "agreement", "mean", Matching(), 8, ""), (example,), system=system, chat=chat
    )
    made = PromptTokenizer(tokenizer, EngineConfig()).split(split)
    return made.prompts[0], made.golds[0]


@pytest.mark.parametrize("tools", [(), TOOLS], ids=["", "tools"])
@pytest.mark.parametrize("name", list(TEMPLATES))
def test_tokens_are_transformers(name: str, tools: tuple[Any, ...]) -> None:
    """The prompt begins as `transformers` has it for a new answer, and goes on with marks of the template alone."""
    compared = 0
    for adds_bos, (messages, answer) in product((False, True), CHATS.values()):
        tokenizer = tokenizer_of(TEMPLATES[name], adds_bos)
        template = chat_template(tokenizer, EngineConfig())
        assert template is not None
        more = {"tools": list(tools) or None}
        asked = by_transformers(tokenizer, messages, add_generation_prompt=True, **more)
        wholes = by_transformers(tokenizer, [*messages, answer], **more)
        try:
            prompt, said = template.conversation(messages, tools, answer)
        except UserError:
            continue  # it says that it can't write the chat
        assert said is not None
        ours, gold = tokens_of(tokenizer, Example(prompt, (said,)), "rendered")
        written = {each for each in asked if ours[: len(each)] == each}
        if not asked or (SYSTEM in messages and not written):  # a template without a system role
            continue
        assert written
        begun = max(written, key=len)
        continued = [whole for whole in wholes if whole[: len(begun)] == begun]
        if continued and "think" not in TEMPLATES[name]:
            assert any(whole[: len(ours) + len(gold)] == ours + gold for whole in continued)
        compared += 1
        if not tools and answer is SAID and FOUND not in messages:
            plain, short = tokens_of(tokenizer, Example(messages[-1]["content"], (SAID["content"],)), True)
            assert plain + short == ours + gold
    assert compared


@pytest.mark.parametrize("others", ["", "{% if m.role != 'user' %}{{ m.content }}{% continue %}{% endif %}"])
def test_contents_are_lists_of_parts_where_a_template_wants_that(others: str) -> None:
    """Of every role, or of the user's alone."""
    parts = (
        "{% for m in messages %}<{{ m.role }}>" + others + "{% for part in m.content %}{% if part.type == 'text' %}"
        "{{ part.text }}{% endif %}{% endfor %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    tokenizer = tokenizer_of(parts, True)
    prompt, _ = tokens_of(tokenizer, Example("Is it wet?", ("yes",), shots=(("And?", "No."),)), True, "Be brief.")
    assert tokenizer.decode(prompt) == "<system>Be brief.<user>And?<assistant>No.<user>Is it wet?<assistant>"


def test_a_template_that_writes_nothing_of_a_question_is_refused() -> None:
    silent = tokenizer_of("{% for m in messages %}<{{ m.role }}>{% endfor %}", True)
    with pytest.raises(UserError, match="writes nothing of what the user says"):
        tokens_of(silent, Example("Is it wet?", ("yes",)), True)


def test_a_conversation_with_tools_has_the_template_for_tools() -> None:
    named = {"default": "<plain>{{ messages[0].content }}", "tool_use": "<tools>{{ messages[0].content }}"}
    tokenizer = tokenizer_of(named, True)
    for name, tools, begun in (("auto", (), "<plain>"), ("auto", TOOLS, "<tools>"), ("default", TOOLS, "<plain>")):
        template = chat_template(tokenizer, EngineConfig(chat_template=name))
        assert template is not None
        assert template.conversation([ASKED], tools, None)[0].startswith(begun)
        if name == "auto":
            made = tokenizer.apply_chat_template([ASKED], tools=list(tools) or None, tokenize=False)
            assert made.startswith(begun)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("chat_template.json", "<{{ messages[0].content }}>"),
        ("processor_config.json", "<{{ messages[0].content }}>"),
        ("chat_template.json", [{"name": "default", "template": "<{{ messages[0].content }}>"}]),
    ],
)
def test_a_template_beside_the_processor_is_found(file: str, content: Any, tmp_path: Path) -> None:
    tokenizer_of(None, True).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "mixtral"}')
    assert chat_template(load_tokenizer(ModelConfig(str(tmp_path))), EngineConfig()) is None
    (tmp_path / file).write_text(json.dumps({"chat_template": content}))
    template = chat_template(load_tokenizer(ModelConfig(str(tmp_path))), EngineConfig())
    assert template is not None and template.prompt((("user", "Hi"),)).text == "<Hi>"
