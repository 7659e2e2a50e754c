"""The packaged tasks with the EEP authors' prompts and scores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pytest
import yaml

from moevolve.evaluators.preparation import prepare
from moevolve.evaluators.preparation.prepare import prepare_split
from moevolve.evaluators.preparation.registry import load_task
from moevolve.evaluators.tasks.config import Source, TaskConfig
from moevolve.evaluators.tasks.datasets import Table
from moevolve.evaluators.types import PreparedSplit

ROWS: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("rows.yaml").read_text(encoding="utf-8"))


def _prepared(monkeypatch: pytest.MonkeyPatch, task: TaskConfig, rows: list[dict[str, Any]]) -> PreparedSplit:
    """The same rows for every source split."""

    def fake(source: Source, split: str) -> Table:
        return Table(split, datasets.Dataset.from_list(rows))

    monkeypatch.setattr(prepare, "load_table", fake)
    whole = task.splits["test"].model_copy(update={"offset": 0, "count": None, "indices": None})
    return prepare_split(task.model_copy(update={"splits": {"test": whole}}), "test")


def test_all_are_set_as_the_authors_set_them() -> None:
    for name, found in ROWS.items():
        if name.startswith("eep/"):
            task = load_task(name)
            kind = task.matching.kind
            assert (task.name, kind, task.max_new_tokens) == (name, found["matching"], found["max_new_tokens"])
            assert "\n" not in task.matching.build().stop or kind == "eep-squad2"
    for name in ("boolq", "rte", "cb", "record"):
        assert load_task(f"eep/{name}").prompt == load_task(name).prompt
    assert load_task("eep/boolq@rank").name == "eep/boolq@rank"


# Rows that the authors test on, of how many in the validation set, or in their range of it.
TESTED = {"boolq": (500, 3270), "wic": (500, 638), "record": (250, 10_000), "squad2": (500, 1979), "drop": (375, 1529)}


def test_some_are_tested_on_the_authors_rows() -> None:
    for name, (asked, there) in TESTED.items():
        test = load_task(f"eep/{name}").splits["test"]
        assert test.indices is not None and (test.source, len(test.indices)) == ("validation", asked)
        assert list(test.indices) == sorted(test.indices) and test.indices[-1] < there
        assert test.count in (None, there)
    # Scores in the paper are shares of these rows: right answers of the full Mixtral-8x7B in %, its Table 11.
    for name, printed in (("boolq", 77.4), ("wic", 51.8), ("squad2", 53.4)):
        right = printed / 100 * TESTED[name][0]
        assert right == pytest.approx(round(right), abs=1e-6)


def test_squad_rows_without_plausible_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"context": "C.", "question": f"{texts}?", "answers": {"text": texts}} for texts in ([], ["one", "two"])]
    examples = _prepared(monkeypatch, load_task("eep/squad2"), rows).examples
    assert [example.references for example in examples] == [("impossible to answer",), ("one", "two")]


def test_drop_is_text_with_two_shots_and_of_numbers_only(monkeypatch: pytest.MonkeyPatch) -> None:
    other = ROWS["eep/drop"]["row"] | {"passage": "Q.", "answers_spans": {"spans": ["May"], "types": ["date"]}}
    split = _prepared(monkeypatch, load_task("eep/drop"), [ROWS["eep/drop"]["row"], other])
    (example,) = split.examples
    first, second, last = split.text(example).split("\n\n")
    assert last == "Text: P.\nQuestion: Q?\nAnswer:"
    assert first.startswith("Text: In the county, the population")
    assert first.endswith("23.5%-8.7%=14.8%. So the answer is 14.8.")
    assert second.startswith("Text: Playing in their second straight Thanksgiving game")
    assert second.endswith("\nAnswer: According to the text, Stafford threw 5 TD passes, 3 of which were to Johnson. "
                           "5-3=2. So the answer is 2.")  # fmt: skip
    assert not split.chat


def test_gsm8k_is_a_conversation_of_four_solved_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    split = _prepared(monkeypatch, load_task("eep/gsm8k"), [ROWS["eep/gsm8k"]["row"]])
    turns = split.turns(split.examples[0])
    assert [role for role, _ in turns] == ["user", "assistant"] * 4 + ["user"]
    assert all(text.endswith("\nLet's think step by step\nAnswer:") for role, text in turns if role == "user")
    results = [text.splitlines()[-1] for role, text in turns if role == "assistant"]
    assert results == [f"The answer is {number}" for number in (4, 201, 140, 146)]
    assert split.chat


def test_mmlu_shows_five_of_the_subject(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        {"question": f"{subject} {i}", "subject": subject, "choices": ["p", "q", "r", "s"], "answer": i % 4}
        for i in range(7)
        for subject in ("business_ethics", "anatomy")
    ]
    task = load_task("eep/mmlu")
    where_not = {"subject": ("business_ethics",)}
    part = task.splits["test"].model_copy(update={"where_not": where_not})
    split = _prepared(monkeypatch, task.model_copy(update={"splits": {"test": part}}), rows)
    asked = (
        "There is a single choice question about anatomy. Answer the question by replying A, B, C or D.\n"
        "Question: anatomy {}\nA. p\nB. q\nC. r\nD. s\nAnswer: "
    )
    assert [example.prompt for example in split.examples] == [asked.format(5), asked.format(6)]
    for example in split.examples:
        assert example.shots == tuple((asked.format(i), "ABCD"[i % 4]) for i in range(5))
