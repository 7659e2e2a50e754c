"""Files of requests: what is read of each form, how it is divided, and what is refused, with file and line."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tiny_models import WORDS, word_tokenizer

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.preparation.prepare import prepare_splits
from moevolve.evaluators.preparation.registry import load_task
from moevolve.evaluators.types import PreparedSplit
from moevolve.search.shrink.domains import LEAST_ROWS, read_domains, write_tasks
from moevolve.search.shrink.forms import read_data
from moevolve.search.shrink.guard import is_loop
from moevolve.workers.contract.settings import EngineConfig
from moevolve.workers.engine.chat import chat_template

ROWS = 400


def written(folder: Path, name: str, rows: Sequence[Any]) -> Path:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def prepared(path: Path, folder: Path) -> dict[str, PreparedSplit]:
    (task,) = write_tasks(read_domains([path]), folder)
    return dict(prepare_splits(load_task(task)))


def openai(number: int) -> dict[str, Any]:
    first = {"role": "user", "content": f"question {number}"}
    turns = [{"role": "assistant", "content": "which?"}, {"role": "user", "content": "the last"}]
    last = {"role": "assistant", "content": f"A long answer to question {number}, of more than a few words."}
    return {"messages": [{"role": "system", "content": f"system {number % 3}"}, first, *turns, last]}


def sharegpt(number: int) -> dict[str, Any]:
    said = ((("system", "human", "gpt", "human", "gpt")[place], turn) for place, turn in enumerate(_contents(number)))
    return {"id": number, "conversations": [{"from": role, "value": text} for role, text in said]}


def _contents(number: int) -> list[str]:
    return [message["content"] for message in openai(number)["messages"]]


def test_both_forms_of_chats_are_the_same_conversations_in_the_models_template(tmp_path: Path) -> None:
    one = prepared(written(tmp_path, "chats.jsonl", [openai(n) for n in range(ROWS)]), tmp_path / "openai")
    other = prepared(written(tmp_path, "chats.jsonl", [sharegpt(n) for n in range(ROWS)]), tmp_path / "sharegpt")
    assert {name: split.fingerprint for name, split in one.items()} == {
        name: split.fingerprint for name, split in other.items()
    }
    split = one["search"]
    assert (split.fitness, split.positions) == ("agreement", "answer")
    example = split.examples[0]
    number = int(re.findall(r"\d+", example.references[0])[0])
    tokenizer = word_tokenizer(WORDS)
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    template = chat_template(tokenizer, EngineConfig())
    assert template is not None
    expected = f"<system>system {number % 3}<user>question {number}<assistant>which?<user>the last"
    assert template.prompt(split.turns(example)).text.startswith(expected)
    assert split.text(example).split("\n\n") == [f"system {number % 3}", f"question {number} which?", "the last"]


def test_rows_of_one_conversation_are_in_one_split_in_every_file_and_stay_there(tmp_path: Path) -> None:
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"first {n % 150}"},
                {"role": "assistant", "content": "an answer " * n},
            ]
        }
        for n in range(1, ROWS)
    ]
    one = read_domains([written(tmp_path, "one.jsonl", rows)])[0]
    (grown,) = read_domains([written(tmp_path, "more.jsonl", [*rows, *(openai(n) for n in range(ROWS))])])
    found = {}
    for domain in (one, grown):
        for split, chosen in domain.rows.items():
            for row in chosen:
                assert found.setdefault(row.first_message, split) == split
    shares = {split: len(chosen) / (2 * ROWS - 1) for split, chosen in grown.rows.items()}
    assert shares == pytest.approx({"calibration": 0.25, "search": 0.35, "dev": 0.15, "test": 0.25}, abs=0.08)


@pytest.mark.parametrize(
    ("row", "fitness", "positions"),
    [
        ({"prompt": "p {}", "answer": "a {}"}, "generate", "text"),
        ({"prompt": "p {}", "answer": "a {}", "choices": ["a {}", "b"]}, "rank", "text"),
        ({"prompt": "p {}", "answer": "one two three four five six seven {}"}, "agreement", "answer"),
        ({"prompt": "p {}"}, "agreement", "greedy"),
        ({"text": "p {}"}, "agreement", "greedy"),
    ],
)
def test_the_rows_decide_what_is_scored(row: dict[str, Any], fitness: str, positions: str, tmp_path: Path) -> None:
    rows = [json.loads(json.dumps(row).replace("{}", str(n))) for n in range(ROWS)]
    splits = prepared(written(tmp_path, "some.jsonl", rows), tmp_path / "tasks")
    assert {(split.fitness, split.positions) for split in splits.values()} == {(fitness, positions)}
    if fitness == "generate":
        assert splits["test"].max_new_tokens == len("a 399") + 1


def test_text_is_read_in_whole_paragraphs(tmp_path: Path) -> None:
    lines = [f"Paragraph {n} " + "words and more words " * 12 for n in range(ROWS)]
    path = tmp_path / "book.txt"
    path.write_text("\n\n\n".join(lines))
    data = read_data(path)
    assert data.is_text and len(data.rows) == ROWS // 2
    assert "".join(row.prompt for row in data.rows).count("Paragraph") == ROWS
    assert data.rows[1].prompt.startswith("Paragraph 2")
    (split, *_) = prepared(path, tmp_path / "tasks").values()
    assert (split.fitness, split.positions, split.chat) == ("agreement", "text", False)


CHAT = {"role": "user", "content": "a"}
BAD: dict[str, tuple[str, str]] = {
    "not JSON": ('{"prompt": "a"}\n{"prompt"', r":2: not JSON"),
    "no object": ("[1]", r":1: expected a JSON object"),
    "no known key": ('{"question": "a"}', r":1: .*none of the keys .*; it has: question"),
    "an unknown key": ('{"prompt": "a", "answers": "b"}', r":1: unknown key `answers`"),
    "an empty prompt": ('{"prompt": " "}', r":1: `prompt` must be a text"),
    "a number": ('{"prompt": "a", "answer": 4}', r":1: `answer` must be a text"),
    "one of other choices": ('{"prompt": "a", "answer": "b", "choices": ["c", "d"]}', r":1: the answer must be one of"),
    "two forms": ('{"prompt": "a"}\n\n{"text": "b"}', r":3: a row with `text`, but one with `prompt` at .*:1"),
    "some answers": ('{"prompt": "a", "answer": "b"}\n{"prompt": "a"}', r":2: a row without an answer"),
    "two questions": (json.dumps({"messages": [CHAT, CHAT]}), r":1: turns must be of user and assistant by turns"),
    "an answer alone": (json.dumps({"messages": [{"role": "assistant", "content": "a"}]}), r":1: turns must be"),
    "tools": (json.dumps({"messages": [CHAT], "tools": [{}]}), r":1: `tools`: tool calls aren't read yet"),
    "a tool's turn": (json.dumps({"messages": [CHAT | {"role": "tool"}]}), r":1: turn 1: tool: tool calls"),
    "an image": (json.dumps({"messages": [CHAT | {"content": [{"type": "image_url"}]}]}), r"part of type 'image_url'"),
    "a stranger": ('{"conversations": [{"from": "narrator", "value": "a"}]}', r":1: turn 1: unknown `from` 'narrator'"),
    "nothing": ("\n", r"the file is empty"),
    "few rows": ('{"prompt": "a"}\n' * 400, rf"1 rows with different first messages; give {LEAST_ROWS} or more"),
}


@pytest.mark.parametrize("content", BAD.values(), ids=BAD.keys())
def test_a_bad_file_is_named_with_its_line(content: tuple[str, str], tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(content[0])
    with pytest.raises(UserError, match=content[1]) as error:
        read_domains([path])
    assert str(path) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("rows.parquet", "parquet isn't read yet"),
        ("owner/data", "data sets of the hub aren't read yet"),
        ("gone.jsonl", "no such file"),
    ],
)
def test_what_is_not_read_is_refused_by_name(name: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=said):
        read_data(tmp_path / name)


def test_a_loop_is_told_from_an_answer() -> None:
    assert is_loop([1, 2, 3] * 8) and is_loop([*range(12), *[7] * 36])
    assert not is_loop(list(range(48))) and not is_loop([*range(30), *range(10)])
    assert not is_loop([5] * 8), "a short answer"
