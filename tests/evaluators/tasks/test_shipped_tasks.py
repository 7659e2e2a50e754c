"""Every task file that comes with the package: parses, renders a row in the hub's format, keeps its splits apart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
from demo.prompts import CHOICES, TEMPLATE
from demo.tasks import TASKS

from moevolve.evaluators.matching.registry import make_matcher
from moevolve.evaluators.preparation import prepare
from moevolve.evaluators.preparation.registry import list_tasks, load_task
from moevolve.evaluators.tasks.config import Source
from moevolve.evaluators.tasks.datasets import Table
from moevolve.evaluators.tasks.installed import DOMAINS
from moevolve.evaluators.tasks.selection import check_disjoint, select_rows
from moevolve.evaluators.types import Example

HELD_OUT = {
    "electrical_engineering",
    "professional_accounting",
    "high_school_macroeconomics",
    "high_school_computer_science",
    "business_ethics",
    "miscellaneous",
    "high_school_psychology",
}


LINE = f" The {'very ' * 40}old <unk> was 3 @.@ 5 m high . \n"
# A row with the columns of the hub data set that are used, its prompt, and its accepted answers or its option.
HUB_ROWS: dict[str, tuple[dict[str, Any], str, str | tuple[str, ...]]] = {
    "boolq": (
        {"question": "is it so", "passage": "P.", "label": 0},
        "P.\nQuestion: is it so\nA. Yes\nB. No\nAnswer:",
        "B of AB",
    ),
    "cb": (
        {"premise": "P.", "hypothesis": "H", "label": 0},
        "P.\nH\nWhat is the relation between the two sentences?\nA. Contradiction\nB. Entailment\nC. Neutral\nAnswer:",
        "B of ABC",
    ),
    "copa": (
        {"premise": "P.", "choice1": "One.", "choice2": "Two.", "question": "effect", "label": 1},
        "P.\nQuestion: Which of these is the more plausible effect?\nA. One.\nB. Two.\nAnswer:",
        "B of AB",
    ),
    "multirc": (
        {"paragraph": "P.", "question": "Q?", "answer": "X", "label": 1},
        "P.\nQuestion: Q?\nProposed answer: X\nIs the proposed answer right?\nA. Yes\nB. No\nAnswer:",
        "A of AB",
    ),
    "rte": (
        {"premise": "P.", "hypothesis": "H.", "label": 0},
        "P.\nH.\nIs the sentence below entailed by the sentence above?\nA. Yes\nB. No\nAnswer:",
        "A of AB",
    ),
    "wic": (
        {"word": "w", "sentence1": "S1.", "sentence2": "S2.", "start1": 0, "label": 1},
        "Sentence 1: S1.\nSentence 2: S2.\nAre 'w' in the above two sentences the same?\nA. Yes\nB. No\nAnswer:",
        "A of AB",
    ),
    "wsc": (
        {
            "text": "Old Ann saw it. She hid it.",
            "span1_index": 0,
            "span2_index": 6,
            "span1_text": "Old Ann",
            "span2_text": "it",
            "label": 0,
        },
        (
            "Passage: * Old Ann * saw it. She hid # it. #\nDoes the pronoun # it # refer to * Old Ann *?\n"
            "A. Yes\nB. No\nAnswer:"
        ),
        "B of AB",
    ),
    "record": (
        {
            "passage": "News.\n@highlight\nPoint",
            "query": "@placeholder won",
            "entities": ["X", "Y"],
            "answers": ["X", "x"],
        },
        (
            "Passage: News.\n\nPoint\nResult: ____ won\nQuestion: What entity does ____ refer to in the result? "
            "Give me the entity name:"
        ),
        ("X", "x"),
    ),
    "drop": (
        {"passage": "P.", "question": "Q?", "answers_spans": {"spans": ["3", "three"], "types": ["number", "span"]}},
        "\n\nText: P.\nQuestion: Q?\nAnswer:",
        ("3", "three"),
    ),
    "squad2": (
        {"context": "C.", "question": "Q?", "answers": {"text": []}},
        (
            "C.\nAccording to the above passage, answer the following question. If it is impossible to answer "
            "according to the passage, answer `impossible to answer`:\nQuestion: Q?"
        ),
        ("impossible to answer",),
    ),
    "mmlu": (
        {"question": "Q?", "subject": "high_school_biology", "choices": ["p", "q", "r", "s"], "answer": 2},
        (
            "This question about high school biology has one right answer. Reply with A, B, C or D.\nQuestion: Q?\nA. "
            "p\nB. q\nC. r\nD. s\nAnswer:"
        ),
        "C of ABCD",
    ),
    "arc-easy": (
        {"question": "Q?", "choices": {"text": ["p", "q", "r"], "label": ["1", "2", "3"]}, "answerKey": "3"},
        "Question: Q?\nA. p\nB. q\nC. r\nAnswer:",
        "C of ABC",
    ),
    "arc-challenge": (
        {
            "question": "Q?",
            "choices": {"text": ["p", "q", "r", "s", "t"], "label": ["A", "B", "C", "D", "E"]},
            "answerKey": "A",
        },
        "Question: Q?\nA. p\nB. q\nC. r\nD. s\nE. t\nAnswer:",
        "A of ABCDE",
    ),
    "openbookqa": (
        {
            "question_stem": "The sun is",
            "choices": {"text": ["p", "q", "r", "s"], "label": ["A", "B", "C", "D"]},
            "answerKey": "D",
        },
        "Question: The sun is\nA. p\nB. q\nC. r\nD. s\nAnswer:",
        "D of ABCD",
    ),
    "winogrande": (
        {"sentence": "Ann beat Eve, so _ won.", "option1": "Ann", "option2": "Eve", "answer": "1"},
        "Sentence: Ann beat Eve, so ____ won.\nQuestion: What does ____ stand for?\nA. Ann\nB. Eve\nAnswer:",
        "A of AB",
    ),
    "hellaswag": (
        {
            "activity_label": "Baking",
            "ctx_a": "A man bakes.",
            "ctx_b": "he",
            "ctx": "A man bakes. he",
            "endings": ["p.", "q.", " r.", "s."],
            "label": "2",
        },
        (
            "Baking: A man bakes. he\nQuestion: Which of these continues it most plausibly?\n"
            "A. p.\nB. q.\nC. r.\nD. s.\nAnswer:"
        ),
        "C of ABCD",
    ),
    "piqa": (
        {"goal": "Open a jar", "sol1": "Twist it.", "sol2": "Eat it.", "label": 0},
        "Goal: Open a jar\nQuestion: Which solution reaches the goal?\nA. Twist it.\nB. Eat it.\nAnswer:",
        "A of AB",
    ),
    "gsm8k": (
        {"question": "2 and 3?", "answer": "It is 2+3=<<2+3=5>>5.\n#### 5"},
        (
            "Question: 2 and 3?\nWork it out step by step. Then write the result on a line of its own behind ####, "
            "like this: #### 42\nAnswer:"
        ),
        ("It is 2+3=<<2+3=5>>5.\n#### 5",),
    ),
    "wikitext2": ({"text": LINE}, LINE, ()),
}


# Rows of the hub's `train`.
TRAINING_ROWS = {
    "arc-challenge": 1_119,
    "arc-easy": 2_251,
    "boolq": 9_427,
    "cb": 250,
    "copa": 400,
    "drop": 77_400,
    "gsm8k": 7_473,
    "hellaswag": 39_905,
    "multirc": 27_243,
    "openbookqa": 4_957,
    "piqa": 16_113,
    "record": 100_730,
    "rte": 2_490,
    "squad2": 130_319,
    "wic": 5_428,
    "wikitext2": 36_718,
    "winogrande": 40_398,
    "wsc": 554,
}


def _serve(monkeypatch: pytest.MonkeyPatch, rows: list[dict[str, Any]]) -> None:
    """Return the same rows for every source split of the hub."""

    def fake(source: Source, split: str) -> Table:
        return Table(split, datasets.Dataset.from_list(rows))

    monkeypatch.setattr(prepare, "load_table", fake)


def test_a_hub_row_becomes_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = {name for name in list_tasks() if not name.startswith("eep/")}  # those: test_eep_tasks.py
    installed = {f"text-{name}" for name in DOMAINS}
    assert plain == set(HUB_ROWS) | {"mmlu-ood"} | {f"demo-{name}" for name in TASKS} | installed
    for name, (row, prompt, answer) in HUB_ROWS.items():
        _serve(monkeypatch, [row])
        task = load_task(name)
        whole = task.model_copy(update={"splits": {"test": task.splits["test"].model_copy(update={"where_not": {}})}})
        (example,) = prepare.prepare_split(whole, "test").examples
        right, _, options = answer.partition(" of ") if isinstance(answer, str) else (answer, "", "")
        assert example == Example(prompt, (right,) if options else right, tuple(options)), name


def test_splits_take_different_training_rows_and_leave_some_to_measure_on() -> None:
    """The sizes are those that the data sets' authors give, as far as splits reach."""
    tasks = {name: load_task(name) for name in HUB_ROWS}
    assert set(TRAINING_ROWS) == {
        name for name, task in tasks.items() if any(each.source == "train" for each in task.splits.values())
    }
    for name, given in TRAINING_ROWS.items():
        splits, count = tasks[name].splits, min(given, 10_000 if name == "wikitext2" else 2_600)
        table = Table(name, datasets.Dataset.from_dict({"text": ["word " * 50] * count}))
        rows = {split: select_rows(table, chosen) for split, chosen in splits.items() if chosen.source == "train"}
        check_disjoint(rows, name)
        assert len(rows["search"]) >= 150 and len(rows.get("dev", range(100))) >= 100, name
        if "calibration" in splits:
            assert len(rows["calibration"]) == {"wsc": 42}.get(name, splits["calibration"].row_count)
            assert len(rows["calibration"]) >= 512 or name == "wsc"
        else:
            assert count - sum(map(len, rows.values())) == 0, "rows are left to measure on"


def test_mmlu_searches_on_fifty_subjects_and_holds_out_seven(monkeypatch: pytest.MonkeyPatch) -> None:
    subjects = sorted(HELD_OUT) + [f"subject_{i}" for i in range(50)]
    row = HUB_ROWS["mmlu"][0]
    _serve(monkeypatch, [row | {"subject": s, "question": f"{s} {i}"} for i in range(8) for s in subjects])
    seen = prepare.prepare_splits(load_task("mmlu"))
    held = prepare.prepare_splits(load_task("mmlu-ood"))
    assert [len(split.examples) for split in seen.values()] == [200, 200, 400]
    assert {name: len(split.examples) for name, split in held.items()} == {"test": 56}
    questions = {name: {e.prompt.split("\n")[1].split()[1] for e in split.examples} for name, split in seen.items()}
    assert all(len(found) == 50 and not found & HELD_OUT for found in questions.values())
    assert {e.prompt.split("\n")[1].split()[1] for e in held["test"].examples} == HELD_OUT


@pytest.mark.parametrize("name", ["hellaswag", "gsm8k"])
def test_the_authors_further_sets_on_local_files(tmp_path: Path, name: str) -> None:
    """With JSONL files that have the hub data sets' columns, splits take different rows."""
    row = HUB_ROWS[name][0]
    field = {"hellaswag": "ctx", "gsm8k": "question"}[name]
    for source, count in (("train", 1540), ("validation", 7), ("test", 7)):
        rows = [row | {field: f"{source} {n} {row[field]}"} for n in range(count)]
        (tmp_path / f"{source}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in rows))
    files = {source: f"{source}.jsonl" for source in ("train", "validation", "test")}
    (tmp_path / "mine.yaml").write_text(json.dumps({"extends": name, "source": {"files": files}}))
    prepared = prepare.prepare_splits(load_task(tmp_path / "mine.yaml"))
    sizes = {split: len(value.examples) for split, value in prepared.items()}
    assert sizes == {"calibration": 1024, "search": 256, "dev": 256, "test": 7}
    prompts = [example.prompt for value in prepared.values() for example in value.examples]
    assert len(set(prompts)) == len(prompts)
    tested = {"hellaswag": "validation", "gsm8k": "test"}[name]
    assert all(f"{tested} " in example.prompt for example in prepared["test"].examples)
    assert all("train " in example.prompt for example in prepared["dev"].examples)
    matcher, example = make_matcher(prepared["test"].matching), prepared["test"].examples[0]
    right = {"gsm8k": " 2 and 3 are 5.\n#### 5.00\n\n#### 6"}.get(name, f" {example.references[0]}.\nno")
    wrong = {"gsm8k": "5 of 6 are\n#### 6"}.get(name, " none")
    assert (matcher.match(right, example), matcher.match(wrong, example)) == (1.0, 0.0)
    assert matcher.decided(right, example)


def test_wikitext2_is_running_text_in_windows(tmp_path: Path) -> None:
    """With files that have the hub data set's columns, every row is a line of an article, complete and in order."""
    lines = ["", " = Valkyria = \n", "", *(f" Line {i} .\n" for i in range(8_500)), ""]
    for source in ("train", "validation", "test"):
        rows = [{"text": line and line.replace("Line", source)} for line in lines]
        (tmp_path / f"{source}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = {source: f"{source}.jsonl" for source in ("train", "validation", "test")}
    (tmp_path / "mine.yaml").write_text(json.dumps({"extends": "wikitext2", "source": {"files": files}}))
    prepared = prepare.prepare_splits(load_task(tmp_path / "mine.yaml"))
    assert {name: len(split.examples) for name, split in prepared.items()} == {
        "calibration": 4000,
        "search": 4000,
        "dev": len(lines),
        "test": len(lines),
    }
    # As GPTQ and those after it join the rows.
    assert prepared["test"].running_text == "\n\n".join(line.replace("Line", "test") for line in lines)
    assert prepared["search"].running_text.startswith("\n\n = Valkyria = \n\n\n\n\n train 0 .\n")
    assert {(split.fitness, split.metric, split.window) for split in prepared.values()} == {
        ("perplexity", "inverse_perplexity", 4096)
    }


def test_demo_tasks_are_ready_to_use() -> None:
    for demo in TASKS:
        task = load_task(f"demo-{demo}")
        assert (task.prompt, tuple(task.choices or ())) == (TEMPLATE, CHOICES.get(demo, ()))
        assert [chosen.source for chosen in task.splits.values()] == ["calibration", "search", "dev", "test"]
    prepared = prepare.prepare_splits(task)
    assert [len(split.examples) for split in prepared.values()] == [2000, 400, 300, 1000]
