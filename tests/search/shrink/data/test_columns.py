"""Rows in the layouts that data sets have: what is read as what, what is known not to matter, and what is refused."""

from __future__ import annotations

import csv
import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from published_templates import QWEN, bytewise_tokenizer

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.types import Example, Matching, PreparedSplit
from moevolve.search.shrink.data.columns import read_columns
from moevolve.search.shrink.data.domains import read_domains, usable_rows
from moevolve.search.shrink.data.files import read_data
from moevolve.search.shrink.data.rows import DataRow
from moevolve.workers.contract.settings import EngineConfig
from moevolve.workers.engine.chat import ChatTemplate
from moevolve.workers.engine.tokenizing import PromptTokenizer

ROWS = 100
LONG = "It is as you say of number {}, and there is more to be said about that, I am sure."
USER, SAID = {"role": "user", "content": "ask {}"}, {"role": "assistant", "content": LONG}
HUMAN, GPT = {"from": "human", "value": "ask {}"}, {"from": "gpt", "value": LONG}


def numbered(row: dict[str, Any], count: int = ROWS) -> list[dict[str, Any]]:
    return [json.loads(json.dumps(row).replace("{}", str(number))) for number in range(count)]


def written(folder: Path, rows: Sequence[Any], name: str = "rows.jsonl") -> Path:
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / name


def parts(row: DataRow) -> tuple[Any, ...]:
    return row.turns, row.prompt, row.answer


SYSTEM = (("system", "Be kind."),)
ASKED = ((), "ask 7", LONG.format(7))
LAYOUTS: dict[str, tuple[dict[str, Any], tuple[Any, ...]]] = {
    "Alpaca": (
        {
            "instruction": "ask {}",
            "input": "of this",
            "output": LONG,
            "text": f"Below is an instruction.\n### ask {{}}\n### of this\n### {LONG}",
        },
        ((), "ask 7\n\nof this", LONG.format(7)),
    ),
    "Alpaca of LLaMA-Factory": (
        {"instruction": "ask {}", "input": "", "output": LONG, "system": "Be kind.", "history": [["Hi {}", "Ho"]]},
        ((*SYSTEM, ("user", "Hi 7"), ("assistant", "Ho")), "ask 7", LONG.format(7)),
    ),
    "Dolly": (
        {"instruction": "ask {}", "context": "of this", "response": LONG, "category": "closed_qa"},
        ((), "ask 7\n\nof this", LONG.format(7)),
    ),
    "ShareGPT": ({"id": "identity_{}", "system": "Be kind.", "conversations": [HUMAN, GPT]}, (SYSTEM, *ASKED[1:])),
    "ShareGPT without a system prompt": ({"system": "", "tools": "", "conversations": [HUMAN, GPT]}, ASKED),
    "OpenAI": ({"messages": [{"role": "system", "content": ""}, USER, SAID], "tools": None}, ASKED),
    "Anthropic": ({"system": "Be kind.", "messages": [USER, SAID]}, (SYSTEM, *ASKED[1:])),
    "UltraChat": ({"prompt": "ask {}", "prompt_id": "f0e37e9f", "messages": [USER, SAID]}, ASKED),
    "LMSYS": ({"conversation_id": "c{}", "model": "vicuna-13b", "conversation": [USER, SAID], "turn": 1}, ASKED),
    "OpenOrca": (
        {"id": "niv.{}", "system_prompt": "Be kind.", "question": "ask {}", "response": LONG},
        (SYSTEM, *ASKED[1:]),
    ),
    "GSM8K": ({"question": "ask {}", "answer": LONG}, ASKED),
    "prompt and completion": ({"prompt": "ask {}", "completion": LONG}, ASKED),
    "prompt and completion as turns": ({"prompt": [USER], "completion": [SAID]}, ASKED),
    "preferences": ({"prompt": "ask {}", "chosen": LONG, "rejected": "Go away, I say."}, ASKED),
    "preferences as turns": (
        {"prompt": "ask {}", "chosen": [USER, SAID], "rejected": [USER, USER], "score_chosen": 8.5},
        ASKED,
    ),
    "preferences alone": ({"chosen": [USER, SAID], "rejected": [USER, SAID | {"content": "Go away, I say."}]}, ASKED),
    "wanted answers": ({"prompt": "ask {}", "completion": LONG, "label": True}, ASKED),
    "turns as JSON": ({"messages": json.dumps([USER, SAID])}, ASKED),
    "turns as Python writes them": ({"conversations": repr([HUMAN, GPT | {"weight": None}])}, ASKED),
    "turns as NumPy writes them": ({"messages": f"[{USER!r}\n {SAID!r}]"}, ASKED),
    "other roles": (
        {"messages": [USER | {"role": "Human"}, {"role": "model", "content": LONG}], "language": "English"},
        ASKED,
    ),
}


@pytest.mark.parametrize(("row", "expected"), LAYOUTS.values(), ids=LAYOUTS.keys())
def test_a_layout_is_read_as_its_trainers_read_it(row: Any, expected: Any, tmp_path: Path) -> None:
    path = written(tmp_path, numbered(row))
    assert parts(read_data(path).rows[7]) == expected
    assert usable_rows(path) == ROWS


COMPLETE = {"question": "ask {}", "answer": LONG}
UNKNOWN: dict[str, tuple[dict[str, Any], str, tuple[Any, ...]]] = {
    "a context": (COMPLETE | {"context": "about {}"}, "input=context", ((), "ask 7\n\nabout 7", LONG.format(7))),
    "a persona": (COMPLETE | {"persona": "Be kind."}, "system=persona", (SYSTEM, *ASKED[1:])),
    "a second answer": (COMPLETE | {"solution": "Because of {}."}, "ignore=solution", ASKED),
    "notes in a list": (COMPLETE | {"notes": ["a note", None]}, "ignore=notes", ASKED),
    "long texts by a known name": (COMPLETE | {"source": "word " * 20}, "ignore=source", ASKED),
    "images": ({"messages": [USER, SAID], "images": [{"path": "{}.png"}]}, "ignore=images", ASKED),
    "another question": (COMPLETE | {"prompt": "Think of {}."}, "prompt=question,answer=answer,ignore=prompt", ASKED),
    "a template's text": (COMPLETE | {"text": "<s>ask {}"}, "ignore=text", ASKED),
    "in some rows": (COMPLETE | {"hint": None}, "ignore=hint", ASKED),
}


@pytest.mark.parametrize(("row", "columns", "expected"), UNKNOWN.values(), ids=UNKNOWN.keys())
def test_a_text_that_nobody_knows_is_refused_until_it_is_said(
    row: Any, columns: str, expected: Any, tmp_path: Path
) -> None:
    rows = numbered(row)
    if "hint" in row:
        rows[50]["hint"] = "Think."
    path = written(tmp_path, rows)
    with pytest.raises(UserError, match=r"rows.jsonl:\d+: `\w+`: a column with text that isn't read; the columns a"):
        read_data(path)
    assert parts(read_data(path, read_columns(columns)).rows[7]) == expected


def test_numbers_dates_and_labels_are_no_texts(tmp_path: Path) -> None:
    more = {
        "n": "17",
        "day": "2024-05-01",
        "done": "True",
        "source_url": "https://a.b/c",
        "modelName": "a b",
        "m": {"x": 1},
    }
    assert len(read_data(written(tmp_path, numbered(COMPLETE | more))).rows) == ROWS


def alpaca(number: int, output: str | None) -> dict[str, Any]:
    return {"instruction": f"ask {number}", "input": "", "output": output}


@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
def test_few_rows_without_answers_are_left_out(suffix: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def made(empty: int) -> Path:
        rows = [alpaca(number, "" if number < empty else LONG.format(number)) for number in range(ROWS)]
        path = tmp_path / f"rows.{suffix}"
        if suffix == "jsonl":
            return written(tmp_path, rows)
        with path.open("w", newline="") as file:
            table = csv.DictWriter(file, list(rows[0]))
            table.writeheader()
            table.writerows(rows)
        return path

    with caplog.at_level(logging.WARNING):
        found = read_data(made(5)).rows
    assert [row.prompt for row in found] == [f"ask {number}" for number in range(5, ROWS)]
    assert "left out 5 of 100 rows: they have no answer, or an empty one" in caplog.text
    with pytest.raises(
        UserError, match="with an answer, but a row with `instruction`, without an answer, or with an em"
    ):
        read_data(made(6))


def test_answers_that_are_marked_as_bad_and_empty_texts_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"prompt": f"ask {n}", "completion": LONG.format(n), "label": n % 2 == 0} for n in range(ROWS)]
    with caplog.at_level(logging.WARNING):
        assert len(read_data(written(tmp_path, rows)).rows) == ROWS // 2
        texts = [{"text": f"line {n}" if n % 2 else ""} for n in range(ROWS)]
        assert len(read_data(written(tmp_path, texts)).rows) == ROWS // 2
    assert "left out 50 of 100 rows: `label` says" in caplog.text
    assert "left out 50 of 100 rows: the text is empty" in caplog.text


GIVEN_AWAY: dict[str, tuple[Callable[[int], dict[str, Any]], bool]] = {
    "whole examples": (lambda n: {"prompt": f"Q: ask {n} A: {LONG.format(n)} End.", "answer": LONG.format(n)}, True),
    "one in twenty": (lambda n: {"prompt": f"ask {LONG.format(n) * (n < 5)}{n}", "answer": LONG.format(n)}, False),
    "more": (lambda n: {"prompt": f"ask {LONG.format(n) * (n < 6)}{n}", "answer": LONG.format(n)}, True),
    "short ones": (lambda n: {"prompt": f"### Q: ask {n}\n### A: blue {n}</s>", "answer": f"blue {n}"}, True),
    "short ones with a full stop": (lambda n: {"prompt": f"Item {n} is blue {n}.", "answer": f"blue {n}"}, True),
    "in a passage": (lambda n: {"prompt": f"It is blue {n}, it says. What is it?", "answer": f"blue {n}"}, False),
    "among options": (lambda n: {"prompt": f"Is {n} red or blue", "answer": ("red", "blue")[n % 2]}, False),
    "in a chat": (
        lambda n: {
            "messages": [
                {"role": "system", "content": LONG.format(n)},
                *numbered({"messages": [USER, SAID]}, n + 1)[n]["messages"],
            ]
        },
        True,
    ),
}


@pytest.mark.parametrize(("row", "refused"), GIVEN_AWAY.values(), ids=GIVEN_AWAY.keys())
def test_an_answer_within_its_own_prompt_is_refused(
    row: Callable[[int], dict[str, Any]], refused: bool, tmp_path: Path
) -> None:
    path = written(tmp_path, [row(number) for number in range(ROWS)])
    if not refused:
        assert read_domains([path])
        return
    with pytest.raises(
        UserError, match=r"rows.jsonl: .* of 100 answers stand in their own prompts; name with --columns"
    ):
        read_domains([path])


@pytest.mark.parametrize(
    "text",
    [
        "<|im_start|>user\nask {}<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>",
        "<s>[INST] ask {} [/INST] yes </s>",
        "### Human: ask {}\n### Assistant: yes",
        "\n\nHuman: ask {}\n\nAssistant: yes",
    ],
)
def test_chats_that_a_template_has_written_are_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"100 of 100 rows are chats that a template has written .*as `messages`"):
        read_domains([written(tmp_path, numbered({"text": text}))])


REFUSED: dict[str, tuple[Any, str]] = {
    "images": (
        [{"role": "user", "content": [{"type": "image_url"}]}, SAID],
        "messages.0.content: it has a part of type",
    ),
    "images beside a text": (
        [USER | {"images": ["a.png"]}, SAID],
        "messages.0: it has `images`, and only text is read",
    ),
    "no list": ("word for word", "messages: it must be a list, also as JSON or as Python writes it: not JSON"),
    "an unknown role": (
        [{"role": "narrator", "content": "a"}],
        "messages.0: unknown `role` 'narrator'; known are system",
    ),
    "two system prompts": ([{"role": "system", "content": "Be rude."}, USER], "system: the conversation has another"),
    "no question": ([SAID], "the conversation has no message of the user to answer"),
}


@pytest.mark.parametrize(("messages", "said"), REFUSED.values(), ids=REFUSED.keys())
def test_what_is_wrong_with_a_chat_is_said(messages: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"rows.jsonl:1: {said}"):
        read_data(written(tmp_path, [{"system": "Be kind.", "messages": messages}]))


def test_an_error_names_a_field_as_the_file_does(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"rows.jsonl:1: query: it must be a text that isn't empty"):
        read_data(written(tmp_path, [{"query": " ", "output": LONG}]))


def test_a_greeting_is_written_by_the_template(tmp_path: Path) -> None:
    greeting = {"role": "assistant", "content": "Hello!"}
    path = written(tmp_path, numbered({"messages": [greeting, USER, SAID]}))
    template = ChatTemplate(bytewise_tokenizer(), QWEN, "the template")
    (domain,) = read_domains([path], lambda chats: tuple(template.conversation(*chat.as_data()) for chat in chats))
    rows = [row for split in domain.rows.values() for row in split]
    assert domain.settings["chat"] == "rendered" and len(rows) == ROWS
    assert all("assistant\nHello!<|im_end|>\n<|im_start|>user\nask" in row.prompt for row in rows)
    assert all(row.answer is not None and row.answer.startswith("It is as you say") for row in rows)


@pytest.mark.parametrize("name", ["rows.csv", "rows.jsonl"])
def test_two_values_of_one_name_are_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(
        "prompt,answer,answer\na,b,c\n" if name.endswith("csv") else '{"prompt": "a", "answer": "b", "answer": "c"}'
    )
    with pytest.raises(UserError, match=f"{name}:1: .*`answer` twice"):
        read_data(path)


@pytest.mark.parametrize("given", ["prompt=a,prompt=b", "prompt=a,answer=a", "ignore=a,ignore=a"])
def test_a_column_has_one_meaning(given: str) -> None:
    with pytest.raises(UserError, match="for the second time"):
        read_columns(given)


CELL = st.text(st.characters(codec="utf-8", categories=["L", "N", "P"]), max_size=8)
FIELDS = {
    "prompt": ("prompt", "instruction", "question", "query"),
    "answer": ("answer", "output", "response", "completion", "chosen"),
    "system": ("system", "system_prompt", "system_message"),
}


@st.composite
def any_rows(draw: st.DrawFn) -> tuple[dict[str, Any], list[str], list[str]]:
    """A row, its texts and those that are in a column of unknown meaning. Every text is marked."""
    texts: list[str] = []

    def cell(empty: bool = False) -> str:
        if empty and draw(st.booleans()):
            return draw(st.sampled_from(["", " "]))
        texts.append(f"<t{len(texts)}:{draw(CELL)}>")
        return texts[-1]

    chat, row = draw(st.booleans()), dict[str, Any]()
    if chat:
        names = draw(st.sampled_from([("role", "content", "user", "assistant"), ("from", "value", "human", "gpt")]))
        turns = [{names[0]: "system", names[1]: cell(empty=True)}] if draw(st.booleans()) else []
        for _ in range(draw(st.integers(1, 3))):
            turns += [{names[0]: names[2], names[1]: cell()}, {names[0]: names[3], names[1]: cell()}]
        form = draw(st.sampled_from([lambda value: value, json.dumps, repr]))
        row[draw(st.sampled_from(["messages", "conversations"]))] = form(turns)
        if turns[0][names[0]] != "system":
            row["system"] = cell(empty=True)
    else:
        row |= {draw(st.sampled_from(FIELDS[name])): cell() for name in ("prompt", "answer")}
        row |= {"input": cell(empty=True)} if draw(st.booleans()) else {}
        row |= {draw(st.sampled_from(FIELDS["system"])): cell(empty=True)} if draw(st.booleans()) else {}
        row |= {"history": [[cell(), cell()]]} if draw(st.booleans()) else {}
    known = len(texts)
    row |= {"id": "7a", "score": 3, "notes": None} if draw(st.booleans()) else {}
    row |= {draw(st.sampled_from(["notes", "solution", "context_2"])): cell()} if draw(st.booleans()) else {}
    order = draw(st.permutations(list(row)))
    return {name: row[name] for name in order}, texts[:known], texts[known:]


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(made=any_rows())
def test_what_is_in_a_row_is_in_the_tokens_once_or_refused(made: Any, tmp_path: Path) -> None:
    row, texts, unknown = made
    path = written(tmp_path, [row])
    if unknown:
        with pytest.raises(
            UserError, match=r"rows.jsonl:1: `(notes|solution|context_2)`: a column with text that isn't"
        ):
            read_data(path)
        return
    (found,) = read_data(path).rows
    turns = list(found.turns)
    system = turns.pop(0)[1] if turns and turns[0][0] == "system" else ""
    shots = tuple((asked[1], said[1]) for asked, said in zip(turns[::2], turns[1::2], strict=True))
    tokenizer = bytewise_tokenizer()
    tokenizer.chat_template = QWEN
    example = Example(found.prompt, (found.answer or "",), (), shots, system)
    split = PreparedSplit(*("rows", "search", "agreement", "mean", Matching(), 8, " "), (example,))
    tokens = PromptTokenizer(tokenizer, EngineConfig()).split(split)
    text = tokenizer.decode(tokens.prompts[0] + tokens.golds[0])
    assert found.answer and [text.count(each) for each in texts] == [1] * len(texts)
