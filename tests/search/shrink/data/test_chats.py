"""Chats with tools and thoughts, as files have them: what is read, and what is refused, with file and line."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from published_templates import CALLING
from tiny_models import WORDS, word_tokenizer

from moevolve.evaluators.errors import UserError
from moevolve.search.config.files import parse_run_config, with_preset
from moevolve.search.shrink.data.domains import Domain, read_domains, render_chats
from moevolve.search.shrink.data.files import read_data

ROWS = 120
ASKED = {"role": "user", "content": "Is it raining?"}
SAID = {"role": "assistant", "content": "It rains."}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


def written(folder: Path, rows: Sequence[Any], name: str = "chats.jsonl") -> Path:
    path = folder / name
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def rendered(path: Path, template: str | None) -> Domain:
    """The file's domain, its chats in a template of a model beside it."""
    model = path.parent / "model"
    tokenizer = word_tokenizer(WORDS)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(model)
    (model / "config.json").write_text('{"model_type": "mixtral"}')
    run = {"name": "a", "model": {"path": str(model)}, "tasks": [{"name": "a"}]}
    config = parse_run_config(with_preset(run | {"genome": {"experts": 1}}, "test"), "test")
    (domain,) = read_domains([path], partial(render_chats, config))
    return domain


def numbered(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows that differ in their first message."""
    text = json.dumps(row)
    return [json.loads(text.replace("raining?", f"raining in {number}?")) for number in range(ROWS)]


def calling(arguments: Any, **more: Any) -> dict[str, Any]:
    call = {"id": "call00000", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call], **more}


def texts(domain: Domain) -> list[tuple[str, str | None]]:
    return [(row.prompt, row.answer) for rows in domain.rows.values() for row in rows]


def test_arguments_with_nulls_are_the_same_as_object_and_as_text(tmp_path: Path) -> None:
    arguments = {"place": None, "words": {"a": [None, "ü"]}}
    answers = []
    for given in (arguments, json.dumps(arguments)):
        domain = rendered(written(tmp_path, numbered({"messages": [ASKED, calling(given)]})), CALLING["qwen3"])
        answers.append({answer for _, answer in texts(domain)})
    assert answers[0] == answers[1]
    (answer,) = answers[0]
    assert answer is not None and '{"place": null, "words": {"a": [null, "ü"]}}' in answer


@pytest.mark.parametrize("name", ["qwen3", "deepseek-v3", "deepseek-r1", "llama-3.1"])
def test_results_may_be_empty(name: str, tmp_path: Path) -> None:
    found = {"role": "tool", "tool_call_id": "call00000", "content": ""}
    row = {"messages": [ASKED, calling({"place": 1}), found, SAID], "tools": TOOLS}
    for prompt, answer in texts(rendered(written(tmp_path, numbered(row)), CALLING[name])):
        assert '{"place": 1}' in prompt and answer == "It rains."


def test_a_chat_that_loses_a_call_is_named_with_its_line(tmp_path: Path) -> None:
    rows = numbered({"messages": [ASKED, calling({"place": 1})]})
    rows[7]["messages"][1]["tool_calls"] *= 2
    for name, said in (("gpt-oss", "leaves out the call of `weather` in message 2"), ("llama-3.1", "one call at once")):
        with pytest.raises(UserError, match=f"chats.jsonl:8: engine.chat_template: .*{said}"):
            rendered(written(tmp_path, rows), CALLING[name])


def test_further_fields_are_ignored(tmp_path: Path) -> None:
    plain = {"messages": [ASKED, SAID | {"reasoning_content": "Hm."}]}
    more = {"parallel_tool_calls": False, "source": "web", "prompt_id": 3, "functions": None}
    said = SAID | {"reasoning": "Hm.", "annotations": [], "weight": 1, "refusal": None, "audio": None}
    more |= {"loss_mask": [0, 1], "messages": [ASKED | {"weight": 0, "train": False, "masked": True}, said]}
    written_rows = [plain, more]
    shared = {"conversations": [ASKED, {"from": "gpt", "value": "It rains.", "thinking": "Hm.", "loss": True}]}
    rows = (*read_data(written(tmp_path, written_rows)).rows, *read_data(written(tmp_path, [shared])).rows)
    chats = [row.chat.as_data() for row in rows if row.chat is not None]
    assert len(chats) == 3 and chats == chats[:1] * 3
    assert len({replace(row, chat=None) for row in rows}) == 1


def test_thoughts_are_in_the_answers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = numbered({"messages": [ASKED, SAID | {"reasoning_content": "Hm, wet."}]})
    for prompt, answer in texts(rendered(written(tmp_path, rows), CALLING["qwen3"])):
        assert prompt.endswith("<|im_start|>assistant\n") and answer == "<think>\nHm, wet.\n</think>\n\nIt rains."
    assert not caplog.records


@pytest.mark.parametrize("template", [CALLING["llama-3.1"], None])
def test_that_a_model_writes_no_thoughts_is_said_once(
    template: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = numbered({"messages": [ASKED, SAID | {"reasoning_content": "Hm, wet."}]})
    with caplog.at_level(logging.WARNING):
        domain = rendered(written(tmp_path, rows), template)
    assert {answer for _, answer in texts(domain)} == {"It rains."}
    (record,) = caplog.records
    assert "chats.jsonl: " in record.getMessage() and "thoughts" in record.getMessage()


def test_a_model_without_template_takes_no_tools(tmp_path: Path) -> None:
    path = written(tmp_path, numbered({"messages": [ASKED, SAID], "tools": TOOLS}))
    with pytest.raises(UserError, match=r"chats.jsonl:1: model .*no chat template, which calls of tools"):
        rendered(path, None)


BAD: dict[str, tuple[Any, str]] = {
    "half an emoji": ('{"prompt": "a \\ud83d"}', r":1: it has half of a character, '\\ud83d'"),
    "half an emoji in arguments": ({"messages": [ASKED, calling('{"a": "\\ud83d"}')]}, ":1: .*half of a character"),
    "many digits": ('{"prompt": "a", "n": ' + 5000 * "9" + "}", ":1: it has a number with thousands of digits"),
    "many brackets": ("[" * 200_000, ":1: its brackets are nested too deeply"),
    "many brackets in arguments": ({"messages": [ASKED, calling("[" * 200_000)]}, ":1: .*nested too deeply"),
    "an answer that isn't to be learned": ({"messages": [ASKED, SAID | {"weight": 0}]}, ":1: .*`weight` 0"),
    "an answer that isn't to be trained on": ({"messages": [ASKED, SAID | {"train": False}]}, ":1: .*`train` false"),
    "a loss of none": ({"conversations": [ASKED, {"from": "gpt", "value": "a", "loss": "False"}]}, '`loss` "False"'),
    "an answer for no gradient": ({"messages": [ASKED, SAID | {"trainable": False}]}, "`trainable` false"),
    "an answer behind a mask": ({"messages": [ASKED, SAID | {"masked": True}]}, "`masked` true"),
    "a part of an answer": ({"messages": [ASKED, SAID | {"train_detail": [{"train": False}]}]}, "`train_detail` "),
    "a mask beside the messages": ({"messages": [ASKED, SAID], "loss_mask": [1, 0]}, "a 0 in `loss_mask`"),
    "a mask of tokens": ({"messages": [ASKED, SAID], "loss_mask": [0, 0, 1]}, "loss_mask: it has 3 marks for 2 me"),
    "an old name": ({"messages": [ASKED, SAID | {"function_call": {"name": "a"}}]}, "write it as `tool_calls`"),
    "other arguments": (
        {"messages": [ASKED, calling({}) | {"tool_calls": [{"function": {"name": "a", "parameters": {}}}]}]},
        "write it as `arguments`",
    ),
    "a misspelt field": ({"messages": [ASKED, SAID], "tool": []}, r"tool: unknown key \(did you mean `tools`\?\)"),
    "a misspelt call": ({"messages": [ASKED, SAID | {"tool_call": []}]}, r"messages.1.tool_call: unknown key"),
    "thoughts of the user": ({"messages": [ASKED | {"thinking": "Hm."}, SAID]}, "only the assistant"),
    "a list for a role": ({"conversations": [{"from": ["human"], "value": "a"}]}, r"unknown `from` \['human'\]"),
    "a tool without name": ({"messages": [ASKED, SAID], "tools": [{"type": "x"}]}, "tools.0: it has no function"),
}


@pytest.mark.parametrize(("row", "said"), BAD.values(), ids=BAD.keys())
def test_a_bad_chat_is_named_with_its_line(row: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=said) as error:
        read_data(written(tmp_path, [row]))
    assert str(error.value).startswith(f"{tmp_path}/chats.jsonl:1: ") and "\n" not in str(error.value)


BY_TRAINERS = {
    "turns": lambda said: {"messages": [ASKED, SAID | {"content": said}]},
    "a completion": lambda said: {"prompt": ASKED["content"], "completion": said},
}


@pytest.mark.parametrize("form", BY_TRAINERS)
@pytest.mark.parametrize("thoughts", ["<think>\nHm, wet.\n</think>", "Hm, wet.\n</think>", "<think>\n\n</think>"])
def test_thoughts_in_marks_are_written_as_the_template_writes_them(form: str, thoughts: str, tmp_path: Path) -> None:
    """Also those that an answer doesn't open, since the prompt has done so, and empty ones."""
    rows = numbered(BY_TRAINERS[form](f"{thoughts}\n\nIt rains."))
    found = {prompt + str(answer) for prompt, answer in texts(rendered(written(tmp_path, rows), CALLING["qwen3"]))}
    tokenizer = word_tokenizer(WORDS)
    for row in numbered({"messages": [ASKED, SAID | {"content": f"{thoughts}\n\nIt rains."}]})[:5]:
        whole = tokenizer.apply_chat_template(row["messages"], chat_template=CALLING["qwen3"], tokenize=False)
        assert whole.removesuffix("<|im_end|>\n") in found


READING = (
    "{% for m in messages %}<{{ m.role }}{% if m.name %} {{ m.name }}{% endif %}{% if m.prefix %}+{% endif %}>"
    "{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_names_are_written_by_a_template_that_writes_them(tmp_path: Path) -> None:
    path = written(tmp_path, numbered({"messages": [ASKED | {"name": "Ann"}, SAID]}))
    assert {prompt.partition(">")[0] for prompt, _ in texts(rendered(path, READING))} == {"<user Ann"}
    assert all(prompt.startswith("Is it raining in ") for prompt, _ in texts(rendered(path, CALLING["qwen3"])))


def test_a_field_of_messages_that_only_the_template_reads_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, numbered({"messages": [ASKED, SAID | {"prefix": True, "source": "web"}]}))
    with pytest.raises(UserError, match=r"chats.jsonl:\d+: messages have `prefix`, which the model's chat template re"):
        rendered(path, READING)
    assert all(prompt.startswith("Is it raining in ") for prompt, _ in texts(rendered(path, CALLING["qwen3"])))


# As Qwen3's: roles that it doesn't know are left out.
KNOWING = "{% for m in messages if m.role in ('system', 'user', 'assistant') %}" + READING.partition("%}")[2]


@pytest.mark.parametrize("template", [READING, CALLING["gpt-oss"], KNOWING], ids=["any role", "gpt-oss", "known roles"])
def test_a_developers_prompt_is_the_systems_only_where_the_template_drops_it(template: str, tmp_path: Path) -> None:
    rows = numbered({"messages": [{"role": "developer", "content": "Be brief."}, ASKED, SAID]})
    found = {prompt + str(answer) for prompt, answer in texts(rendered(written(tmp_path, rows), template))}
    tokenizer = word_tokenizer(WORDS)
    for row in rows[:5]:
        if template == KNOWING:
            row["messages"][0]["role"] = "system"
        whole = tokenizer.apply_chat_template(row["messages"], chat_template=template, tokenize=False)
        assert "Be brief." in whole and whole.removesuffix("<|return|>") in found
