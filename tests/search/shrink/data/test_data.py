"""Files of requests: what is read of each form, how it is divided, and what is refused, with file and line."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tiny_models import WORDS, word_tokenizer

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.matching.registry import make_matcher
from moevolve.evaluators.preparation.prepare import prepare_splits
from moevolve.evaluators.preparation.registry import load_task, read_function
from moevolve.evaluators.types import PreparedSplit
from moevolve.search.shrink.data.columns import read_columns
from moevolve.search.shrink.data.domains import LEAST_ROWS, read_domains, write_tasks
from moevolve.search.shrink.data.files import read_data
from moevolve.workers.contract.settings import EngineConfig
from moevolve.workers.engine.chat import chat_template
from moevolve.workers.engine.tokenizing import PromptTokenizer

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
    if positions == "greedy":
        assert not splits["test"].matching.stop, "the full model's own answers have all their lines"


@pytest.mark.parametrize(
    ("answer", "tokens", "stop"),
    [("word " * 20, 101, ("\n",)), ("a line\nand " + "word " * 20, 112, ()), ("word " * 200, 512, ("\n",))],
)
def test_long_answers_are_generated_as_long_as_they_are(
    answer: str, tokens: int, stop: tuple[str, ...], tmp_path: Path
) -> None:
    rows = [{"prompt": f"p {n}", "answer": answer} for n in range(ROWS)]
    (task,) = write_tasks(read_domains([written(tmp_path, "long.jsonl", rows)]), tmp_path / "tasks")
    split = dict(prepare_splits(load_task(task).with_fitness("generate")))["test"]
    assert (split.max_new_tokens, split.matching.stop) == (tokens, stop)


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


def test_a_folder_is_read_by_documents_each_of_which_is_in_one_split(tmp_path: Path) -> None:
    (tmp_path / "notes" / "old").mkdir(parents=True)
    for number in range(40):
        paragraphs = (f"Document {number}, paragraph {part} " + "words and more words " * 20 for part in range(6))
        name = f"old/{number}.txt" if number % 2 else f"{number}.md"
        (tmp_path / "notes" / name).write_text("\n\n".join(paragraphs))
    (tmp_path / "notes" / "picture.png").write_bytes(b"\x89PNG")
    (domain,) = read_domains([tmp_path / "notes"])
    (split, *_) = prepared(tmp_path / "notes", tmp_path / "tasks").values()
    assert (domain.name, split.fitness, split.positions) == ("notes", "agreement", "text")
    places: dict[str, set[str]] = {}
    for name, rows in domain.rows.items():
        for row in rows:
            places.setdefault(row.prompt.split(",")[0], set()).add(name)
    assert sum(map(len, domain.rows.values())) == 240 and len(places) == 40
    assert all(len(found) == 1 for found in places.values())
    beginnings = [row.prompt.split(",")[0] for row in domain.rows["search"][:6]]
    assert len(set(beginnings)) > 1, "the first rows, which are all that a large folder gives, are of several documents"


def calling(name: str, arguments: str) -> dict[str, Any]:
    """The assistant's message that calls a tool, as OpenAI's API returns it."""
    call = {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


TOOLED = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A template in the manner of Qwen's."""


def weather(number: int) -> dict[str, Any]:
    """A chat that calls a tool, gets its result, and calls it again."""
    asked = {"role": "user", "content": f"And the weather in place {number}?"}
    call, again = (calling("weather", json.dumps({"place": number, "hours": hours})) for hours in (1, 2))
    result = {"role": "tool", "tool_call_id": "c1", "content": '{"degrees": 20}'}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    return {"messages": [asked, call, result, again], "tools": tools}


def test_tool_calls_are_what_the_models_template_writes(tmp_path: Path) -> None:
    """Prompt and answer together are the conversation as `transformers` renders it."""
    from moevolve.search.config.files import parse_run_config, with_preset
    from moevolve.search.shrink.data.domains import render_chats

    tokenizer = word_tokenizer([*WORDS, "<tool_call>"])
    tokenizer.chat_template = TOOLED
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text('{"model_type": "mixtral"}')
    run = {"name": "a", "model": {"path": str(tmp_path / "model")}, "tasks": [{"name": "a"}]}
    config = parse_run_config(with_preset(run | {"genome": {"experts": 1}}, "test"), "test")
    rows = [*(weather(n) for n in range(ROWS)), openai(0)]
    path = written(tmp_path, "tools.jsonl", rows)
    (task,) = write_tasks(read_domains([path], lambda chats: render_chats(config, chats)), tmp_path / "tasks")
    splits = prepare_splits(load_task(task))
    seen, tokens = {}, {}
    for split in splits.values():
        assert (split.fitness, split.positions, split.chat) == ("agreement", "answer", "rendered")
        made = PromptTokenizer(tokenizer, EngineConfig()).split(split)
        for example, *ids in zip(split.examples, made.prompts, made.golds, strict=True):
            tokens[example.prompt] = ids
            found = re.search(r"place (\d+)", example.prompt)
            seen[int(found[1]) if found else ROWS] = split.text(example), example.references[0]
    assert len(seen) == ROWS + 1
    for number in (0, 7, ROWS):
        prompt, answer = seen[number]
        row = json.loads(json.dumps(rows[number]))
        for message in row["messages"]:
            message["content"] = message["content"] or ""
            for call in message.get("tool_calls", ()):
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        whole = tokenizer.apply_chat_template(row["messages"], tools=row.get("tools"), tokenize=False)
        assert prompt + answer + "<|im_end|>\n" == whole
        # The tokenizer puts a token before a text, and the template doesn't.
        ids = tokenizer.apply_chat_template(row["messages"], tools=row.get("tools"), return_dict=False)
        ours = (*tokens[prompt][0], *tokens[prompt][1])
        assert ours == tuple(ids[: len(ours)]) and ours[0] != tokenizer.bos_token_id
    assert seen[7][1] == '<tool_call>\n{"name": "weather", "arguments": {"place": 7, "hours": 2}}\n</tool_call>'


def test_sharegpts_roles_of_tools_are_the_same_chats(tmp_path: Path) -> None:
    def turned(number: int) -> dict[str, Any]:
        row = weather(number)
        said: list[dict[str, str]] = []
        for message in row["messages"]:
            role = {"user": "human", "assistant": "function_call", "tool": "observation"}[message["role"]]
            called = [call["function"] for call in message.get("tool_calls", ())]
            calls = [each | {"arguments": json.loads(each["arguments"])} for each in called]
            said.append({"from": role, "value": json.dumps(calls) if calls else message["content"]})
        functions = json.dumps([tool["function"] for tool in row["tools"]])  # as LLaMA-Factory has them
        return {"conversations": said, "system": "Be brief.", "tools": functions}

    (one,) = read_data(written(tmp_path, "one.jsonl", [weather(7)])).rows
    (other,) = read_data(written(tmp_path, "other.jsonl", [turned(7)])).rows
    assert one.chat is not None and other.chat is not None
    assert other.first_message == one.first_message
    (first, *others), *rest = other.chat.as_data()
    assert first == {"role": "system", "content": "Be brief."}
    assert [others, *rest] == without_ids(list(one.chat.as_data()))


def without_ids(value: Any) -> Any:
    """The same without ids of calls, which ShareGPT's form doesn't have."""
    if isinstance(value, dict):
        return {key: without_ids(part) for key, part in value.items() if key not in ("id", "tool_call_id")}
    return [without_ids(part) for part in value] if isinstance(value, list) else value


def test_parquet_has_the_same_rows(tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    rows = [openai(n) | {"tools": None} for n in range(ROWS)]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "chats.parquet")
    lines = read_data(written(tmp_path, "chats.jsonl", [openai(n) for n in range(ROWS)]))
    assert read_data(tmp_path / "chats.parquet").rows == lines.rows


def test_a_data_set_of_the_hub_may_have_other_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from datasets import Dataset

    rows = [openai(n) | {"prompt": f"question {n}", "tools": None, "source": "web"} for n in range(ROWS)]
    asked: list[Any] = []

    def load(*arguments: Any, **options: Any) -> Dataset:  # there is no network here
        asked.append((*arguments, options))
        return Dataset.from_list(rows)

    monkeypatch.setattr("moevolve.evaluators.tasks.datasets.load_dataset", load)
    found = read_data(Path("owner/chats"))
    assert asked == [("owner/chats", None, {"split": "train", "revision": None})]
    assert found.rows == read_data(written(tmp_path, "chats.jsonl", [openai(n) for n in range(ROWS)])).rows


CHAT = {"role": "user", "content": "a"}
BAD: dict[str, tuple[str, str]] = {
    "not JSON": ('{"prompt": "a"}\n{"prompt"', r":2: not JSON"),
    "no known key": ('{"question": "a"}', r":1: .*none of the keys .*; it has: question"),
    "an unknown key": ('{"prompt": "a", "answers": "b"}', r":1: answers: unknown key \(did you mean `answer`\?\)"),
    "one of other choices": ('{"prompt": "a", "answer": "b", "choices": ["c", "d"]}', r":1: the answer must be one of"),
    "two forms": (
        '{"prompt": "a"}\n\n{"text": "b"}',
        r":3: a row with `text`, .*, but a row with `prompt`, .* at .*:1",
    ),
    "some answers": (
        '{"prompt": "a", "answer": "b"}\n{"prompt": "a"}',
        r":2: a row with `prompt`, without an answer, or with an empty one, but a row with `prompt`, with an answer",
    ),
    "two questions": (json.dumps({"messages": [CHAT, CHAT]}), r":1: turns must be of user and assistant by turns"),
    "a result alone": (
        json.dumps({"conversations": [{"from": "observation", "value": "a"}]}),
        r"turn 1: a tool's result",
    ),
    "no call": (
        json.dumps({"conversations": [{"from": "human", "value": "a"}, {"from": "function_call", "value": "b"}]}),
        r":1: conversations.1: it must be JSON",
    ),
    "arguments": (
        json.dumps({"messages": [CHAT, calling("look_up", "[1]")]}),
        r":1: messages.1.tool_calls.0.function.arguments: expected a mapping",
    ),
    "few rows": ('{"prompt": "a"}\n' * 400, rf"1 rows with different first messages; give {LEAST_ROWS} or more"),
}


@pytest.mark.parametrize("content", BAD.values(), ids=BAD.keys())
def test_a_bad_file_is_named_with_its_line(content: tuple[str, str], tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(content[0])
    with pytest.raises(UserError, match=content[1]) as error:
        read_domains([path])
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_what_is_not_read_is_refused_by_name(tmp_path: Path) -> None:
    for name, said in (("rows.csv", "no such file"), ("", "the folder has no .txt or .md files")):
        with pytest.raises(UserError, match=said):
            read_data(tmp_path / name)
    (tmp_path / "rows.xlsx").touch()
    with pytest.raises(UserError, match=r"the name must end in one of \.jsonl, \.json, \.csv, \.tsv, \.parquet"):
        read_data(tmp_path / "rows.xlsx")


PAIRS = [("What is 2 + 2?", "4"), ("Name a colour, or two.", 'red, "blue"'), ("Say hi.\nTwice.", "hi\nhi")]
OTHER_NAMES: dict[str, tuple[dict[str, str], str | None]] = {
    "question and response": ({"prompt": "question", "answer": "response"}, None),
    "prompt and completion": ({"prompt": "prompt", "answer": "completion"}, None),
    "instruction and output": ({"prompt": "instruction", "answer": "output"}, None),
    "any names": ({"prompt": "ask", "answer": "reply"}, "prompt=ask, answer=reply"),
}


@pytest.mark.parametrize(("names", "given"), OTHER_NAMES.values(), ids=OTHER_NAMES.keys())
def test_rows_are_read_by_other_names_from_every_kind_of_file(
    names: dict[str, str], given: str | None, tmp_path: Path
) -> None:
    rows = [{names["prompt"]: prompt, names["answer"]: answer, "id": "7"} for prompt, answer in PAIRS]
    files = [written(tmp_path, "rows.jsonl", rows)]
    (tmp_path / "rows.json").write_text(json.dumps(rows, indent=1))
    for name, delimiter in (("rows.csv", ","), ("rows.tsv", "\t")):
        with (tmp_path / name).open("w", newline="", encoding="utf-8-sig") as file:
            writer = csv.DictWriter(file, list(rows[0]), delimiter=delimiter)
            writer.writeheader()
            writer.writerows(rows)
        files.append(tmp_path / name)
    for path in (*files, tmp_path / "rows.json"):
        found = read_data(path, None if given is None else read_columns(given)).rows
        assert [(row.prompt, row.answer) for row in found] == PAIRS, path


def test_alpacas_input_is_a_part_of_the_prompt(tmp_path: Path) -> None:
    rows = [
        {"instruction": "Translate.", "input": "Hallo", "output": "Hello"},
        {"instruction": "Say hi.", "input": "", "output": "hi"},
    ]
    found = read_data(written(tmp_path, "alpaca.jsonl", rows)).rows
    assert [row.prompt for row in found] == ["Translate.\n\nHallo", "Say hi."]


WRONG_COLUMNS = {
    "no pair": ("prompt", "give NAME=COLUMN"),
    "an unknown name": ("promt=ask", "unknown name `promt`; there are answer, choices, conversations"),
}


@pytest.mark.parametrize(("given", "said"), WRONG_COLUMNS.values(), ids=WRONG_COLUMNS.keys())
def test_wrong_columns_are_refused(given: str, said: str) -> None:
    with pytest.raises(UserError, match=f"--columns {given}: {said}"):
        read_columns(given)


def test_columns_that_a_file_lacks_are_named(tmp_path: Path) -> None:
    path = written(tmp_path, "rows.jsonl", [{"question": "a", "answer": "b"}])
    with pytest.raises(UserError, match=r"rows.jsonl:1: --columns: the row has no `ask`; it has: question, answer"):
        read_data(path, read_columns("prompt=ask,answer=answer"))
    with pytest.raises(UserError, match="--columns: the row has no `reply`; it has: question, answer"):
        read_data(path, read_columns("prompt=question,answer=reply"))
    context = written(tmp_path, "context.jsonl", [{"question": "a", "context": "c", "answer": "b"}])
    with pytest.raises(UserError, match="say with --columns what is what"):
        read_data(context)


def test_all_malformed_rows_are_counted_and_the_first_three_named(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    lines = [json.dumps({"prompt": f"question {n}"}) for n in range(100)]
    for place, line in ((4, "{"), (8, "[1]"), (12, '{"prompt": ""}'), (16, "{}"), (20, '{"text": "a"}')):
        lines[place] = line
    path.write_text("\n".join(lines))
    with pytest.raises(UserError) as caught:
        read_data(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: 5 of 100 rows can't be used: {path}:5: not JSON")
    assert f"{path}:9: expected" in message and f"{path}:13: " in message and message.endswith("; ...")
    assert f"{path}:17" not in message and "\n" not in message
    path.write_text(json.dumps({"ask": "a"}) + "\n" + json.dumps({"ask": "b"}))
    with pytest.raises(UserError, match=f"2 of 2 rows can't be used: {path}:1, {path}:2: the row has none") as caught:
        read_data(path)
    assert str(caught.value).count("say with --columns") == 1
    path.write_text("".join(json.dumps({key: "a"}) + "\n" for key in ("ask", "query", "word", "line")))
    with pytest.raises(
        UserError, match=r"it has: ask; .*it has: query; .*it has: word; \.\.\.; say with --c"
    ) as caught:
        read_data(path)
    assert str(caught.value).count("say with --columns") == 1
    table = tmp_path / "bad.csv"
    table.write_text("prompt,answer\na,b\nc,d,e\n")
    with pytest.raises(UserError, match=r"bad.csv:3: it has 3 cells, and the first line 2 names"):
        read_data(table)


def test_a_file_of_faults_is_soon_given_up_and_its_message_is_short(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text("{}\n" * 5000)
    with pytest.raises(UserError, match=r"1,000 of the first 1,000 rows can't be used: .*:3: the row has none"):
        read_data(path)
    asked = [{"role": "user", "content": "a"}]
    for row in ({"messages": asked, "tools": [0] * 10_000}, {"messages": [0] * 10_000}, {"a" * 10_000: "b"}):
        for times in (1, 2):
            path.write_text((json.dumps(row) + "\n") * times)
            with pytest.raises(UserError) as caught:
                read_data(path)
            assert str(caught.value).count(f"{path}:1: ") == times % 2 and len(str(caught.value)) < 1000


def test_answers_are_scored_by_a_function_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "share.py").write_text(
        "def share(answer, expected):\n    wanted = set(expected.split())\n"
        "    return len(wanted & set(answer.split())) / len(wanted)\n"
    )
    answer = "a long answer to number {} of many\nin two lines"
    rows = [{"prompt": f"question {n}", "answer": answer.format(n)} for n in range(ROWS)]
    metric = read_function("share.py:share", tmp_path, "--metric")
    (path,) = write_tasks(read_domains([written(tmp_path, "own.jsonl", rows)], metric=metric), tmp_path / "tasks")
    split = dict(prepare_splits(load_task(path)))["search"]
    assert (split.fitness, split.metric) == ("generate", "accuracy")
    assert (split.matching.kind, split.matching.stop) == ("function", ())
    assert split.matching.source == (tmp_path / "share.py").read_text()
    assert make_matcher(split.matching).match("a long answer", split.examples[0]) == pytest.approx(3 / 11)
    alone = written(tmp_path, "alone.jsonl", [{"prompt": f"question {n}"} for n in range(ROWS)])
    with pytest.raises(UserError, match=r"alone\.jsonl: --metric compares answers with expected ones"):
        read_domains([alone], metric=metric)
    with pytest.raises(UserError, match=r"absent\.py: no such file"):
        read_function("absent.py:share", tmp_path, "--metric")
