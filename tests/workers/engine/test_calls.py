"""Calls of tools and thoughts in the manner of published templates: all of them are in the text, or refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from published_templates import CALLING, bytewise_tokenizer

from moevolve.evaluators.errors import UserError
from moevolve.workers.engine.chat import ChatTemplate

ASKED = {"role": "user", "content": "Is it raining in place 7?"}
FOUND = {"role": "tool", "tool_call_id": "call00000", "content": ""}
SAID = {"role": "assistant", "content": "It rains."}
ARGUMENTS = {"place": 7, "day": None, "words": {"ü": ["a\n", None, True]}}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


def calling(*arguments: dict[str, Any], ids: str = "call00000", **more: str) -> dict[str, Any]:
    function = {"name": "weather"}
    calls = [{"type": "function", "id": ids, "function": function | {"arguments": each}} for each in arguments]
    return {"role": "assistant", "tool_calls": calls, **more}


def template_of(name: str) -> ChatTemplate:
    return ChatTemplate(bytewise_tokenizer(), CALLING[name], "the template")


@pytest.mark.parametrize("name", list(CALLING))
def test_a_call_is_whole_before_and_after_a_result(name: str) -> None:
    """Whatever a template wants to get: null or empty contents, arguments as objects or as text."""
    template, ids = template_of(name), "functions.weather:0" if name == "kimi-k2" else "call00000"
    call = calling(ARGUMENTS, ids=ids)
    prompt, answer = template.conversation([ASKED], TOOLS, call)
    again, same = template.conversation([ASKED, call, FOUND], TOOLS, call)
    assert answer is not None and same == answer
    assert "weather" in answer and "None" not in prompt + again + answer
    for key, value in ARGUMENTS.items():
        assert key in answer and json.dumps(value, ensure_ascii=False) in answer
        assert key in again
    _, said = template.conversation([ASKED, call, FOUND], TOOLS, SAID)
    assert said is not None and said.endswith("It rains.")


ONE_CALL = {"llama-3.1": "refuses the prompts: one call at once", "gpt-oss": "leaves out the call of `weather` in mess"}


@pytest.mark.parametrize("name", list(CALLING))
def test_a_second_call_is_written_or_refused(name: str) -> None:
    call = calling({"place": 1}, {"place": 2}, ids="functions.weather:0" if name == "kimi-k2" else "call00000")
    for messages, answer in (([ASKED], call), ([ASKED, call, FOUND, FOUND], SAID), ([ASKED, call, FOUND], None)):
        if name in ONE_CALL:
            with pytest.raises(UserError, match=ONE_CALL[name]):
                template_of(name).conversation(messages, TOOLS, answer)
        else:
            prompt, said = template_of(name).conversation(messages, TOOLS, answer)
            assert (prompt + (said or "")).count("place") == 3


@pytest.mark.parametrize("name", ["llama-3.1", "deepseek-v3", "mistral"])
def test_what_is_said_beside_a_call_is_refused_if_it_gets_lost(name: str) -> None:
    with pytest.raises(UserError, match=r"leaves out .* in message 2|leaves out what message 2 says"):
        template_of(name).conversation([ASKED], TOOLS, calling({"place": 1}, content="Let me see."))


THOUGHTS = {
    "gpt-oss": "<|channel|>analysis<|message|>Hm, wet.<|end|><|start|>assistant",
    "qwen3": "<think>\nHm, wet.\n</think>\n\n",
    "deepseek-r1": "<｜Assistant｜><think>\nHm, wet.\n</think>\n\n",
    "glm-4.6": "<|assistant|>\n<think>Hm, wet.</think>\n",
}


@pytest.mark.parametrize("name", list(THOUGHTS))
@pytest.mark.parametrize("called", [False, True])
def test_thoughts_are_in_the_answer_in_the_templates_marks(name: str, called: bool) -> None:
    """Also if the template would write them for new answers only, and if they stand within the content."""
    answer = calling({"place": 7}) if called else SAID
    apart = {**answer, "reasoning_content": "Hm, wet."}
    written = template_of(name).conversation([ASKED], TOOLS, apart)
    assert THOUGHTS[name] in written[0] + str(written[1])
    assert str(written[1]).count("Hm, wet.") == 1 and "Hm, wet." not in written[0]
    if not called:
        inline = SAID | {"content": "<think>Hm, wet.</think>\n\nIt rains."}
        assert template_of(name).conversation([ASKED], TOOLS, inline) == written


def test_a_template_without_thoughts_leaves_them_out_and_keeps_contents() -> None:
    template = template_of("llama-3.1")
    assert template.conversation([ASKED], (), SAID | {"reasoning_content": "Hm."})[1] == "It rains."
    inline = "<think>Hm.</think>It rains."
    assert template.conversation([ASKED], (), SAID | {"content": inline})[1] == inline


def test_a_template_that_fails_in_python_is_named() -> None:
    template = ChatTemplate(bytewise_tokenizer(), "{{ messages[0].content + 1 }}", "the template")
    with pytest.raises(UserError, match="the template refuses the prompts: TypeError: can only concatenate str"):
        template.conversation([ASKED], (), SAID)
