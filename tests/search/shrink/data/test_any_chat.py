"""Whatever stands in a file of chats is in the text that the model reads, or a line of the file is named."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from published_templates import CALLING, bytewise_tokenizer

from moevolve.evaluators.errors import UserError
from moevolve.search.shrink.data.files import read_data
from moevolve.workers.engine.chat import ChatTemplate

TEMPLATES = {name: ChatTemplate(bytewise_tokenizer(), source, name) for name, source in CALLING.items()}
CHARACTERS = st.characters(codec="utf-8") | st.sampled_from('{}<>"\\\n\u2028\U0001f600')
WORDS = st.text(CHARACTERS, max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | WORDS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(WORDS, inner, max_size=2),
    max_leaves=4,
)
ARGUMENTS = st.dictionaries(WORDS, VALUES, max_size=3)
FURTHER = st.dictionaries(st.sampled_from(["annotations", "weight", "name", "source", "tool_call"]), VALUES, max_size=1)


@st.composite
def calls(draw: st.DrawFn) -> dict[str, Any]:
    made = draw(ARGUMENTS)
    arguments = draw(st.sampled_from([made, json.dumps(made)]) | VALUES)
    return {
        "id": draw(st.sampled_from(["call00000", "functions.f1:0", None])),
        "function": {"name": "f1", "arguments": arguments},
    }


@st.composite
def chats(draw: st.DrawFn) -> dict[str, Any]:
    """Chats of which most are well-formed."""
    said = st.text(CHARACTERS, min_size=1, max_size=8) | VALUES
    messages: list[dict[str, Any]] = [{"role": "user", "content": draw(said)}]
    for _ in range(draw(st.integers(0, 2))):
        called = draw(st.lists(calls(), min_size=1, max_size=2))
        messages.append({"role": "assistant", "content": draw(st.none() | WORDS), "tool_calls": called})
        messages += [{"role": "tool", "tool_call_id": "call00000", "content": draw(WORDS)} for _ in called]
    last = {"role": draw(st.sampled_from(["assistant", "user", "system", "tool"])), "content": draw(said)}
    messages.append(last | draw(st.just({}) | st.fixed_dictionaries({"reasoning_content": VALUES})))
    messages[-1] |= draw(FURTHER)
    return {"messages": messages, **draw(FURTHER)}


def leaves(value: Any) -> Iterator[str]:
    """Every name and value within some JSON, as a template may write it."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from leaves(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from leaves(inner)
    else:
        yield value if isinstance(value, str) else json.dumps(value)


def said_in(row: dict[str, Any], thoughts: bool) -> Iterator[str]:
    for message in row["messages"]:
        yield str(message["content"] or "").strip()
        for call in message.get("tool_calls", ()):
            arguments = call["function"]["arguments"]
            yield call["function"]["name"]
            yield from leaves(json.loads(arguments or "{}") if isinstance(arguments, str) else arguments or {})
    if thoughts:
        yield str(row["messages"][-1].get("reasoning_content") or "").strip()


def text_of(path: Path, template: ChatTemplate) -> str:
    (row,) = read_data(path).rows
    if row.chat is None:
        return json.dumps([row.turns, row.prompt, row.answer], ensure_ascii=False)
    prompt, answer = template.conversation(*row.chat.as_data())
    return prompt + (answer or "")


@pytest.mark.parametrize("name", list(TEMPLATES))
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(row=chats())
def test_a_chat_is_whole_or_refused(name: str, row: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps(row) + "\n")
    try:
        text = text_of(path, TEMPLATES[name])
    except UserError as error:
        refused = str(error)
    else:
        refused = ""
    if refused:
        assert refused.startswith((f"{path}:1: ", "engine.chat_template: ")) and "\n" not in refused
        return
    for said in said_in(row, thoughts=name in ("gpt-oss", "qwen3", "deepseek-r1", "glm-4.6")):
        # Marks of JSON in a text are written in more than one way.
        assert said in text or json.dumps(said, ensure_ascii=False)[1:-1] in text or json.dumps(said)[1:-1] in text
