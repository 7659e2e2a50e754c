"""The packaged tasks with the EEP authors' prompts and scores: on made-up rows, and on the original files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import datasets
import pytest

from moevolve.evaluators.preparation import prepare
from moevolve.evaluators.preparation.prepare import prepare_split
from moevolve.evaluators.preparation.registry import list_tasks, load_task
from moevolve.evaluators.tasks.config import Source, TaskConfig
from moevolve.evaluators.tasks.datasets import Table
from moevolve.evaluators.types import PreparedSplit

_ROOT = Path(__file__).resolve().parents[3]
FOLDER = Path(os.environ.get("MOEVOLVE_SHARED", _ROOT.parent / "shared")) / "data" / "superglue"
originals = pytest.mark.skipif(not FOLDER.is_dir(), reason=f"no SuperGLUE files in {FOLDER}; set MOEVOLVE_SHARED")

YES_NO = "\nA. Yes\nB. No\nAnswer:"
# Matching and tokens of an answer in the authors' configurations (COPA, MultiRC and MMLU: in their suite's).
SETTINGS = {
    "boolq": ("capital", 20),
    "wic": ("capital", 20),
    "wsc": ("capital", 20),
    "rte": ("eep-option", 20),
    "cb": ("eep-option", 20),
    "copa": ("eep-option", 100),
    "multirc": ("eep-option", 100),
    "mmlu": ("eep-option", 100),
    "mmlu-ood": ("eep-option", 100),
    "record": ("eep-record", 50),
    "squad2": ("eep-squad2", 50),
    "drop": ("eep-drop", 30),
    "gsm8k": ("eep-gsm8k", 150),
    "hellaswag": ("eep-option", 30),
    "winogrande": ("eep-option", 30),
    "openbookqa": ("eep-option", 30),
}
FOUR = {"text": ["p", "q", "r", "s"], "label": ["A", "B", "C", "D"]}

# A row in the columns of the hub, the prompt, and the accepted answers.
ROWS: dict[str, tuple[dict[str, Any], str, tuple[str, ...]]] = {
    "wic": (
        {"word": "w", "sentence1": "S1.", "sentence2": "S2.", "label": 1},
        "Sentence 1: S1.\nSentence 2: S2.\nAre 'w' in the above two sentenses the same?" + YES_NO,
        ("A",),
    ),
    "copa": (
        {"premise": "P.", "choice1": "One.", "choice2": "Two.", "question": "effect", "label": 1},
        "P.\nQuestion: Which may be the effect?\nA. One.\nB. Two.\nAnswer:",
        ("B",),
    ),
    "multirc": (
        {"paragraph": "P.", "question": "Q?", "answer": "X", "label": 1},
        "P.\nQuestion: Q?\nAnswer: X\nIs it true?" + YES_NO,
        ("A",),
    ),
    "squad2": (
        {"context": "C.", "question": "Q?", "answers": {"text": []}, "plausible_answers": {"text": ["nearly"]}},
        (
            "C.\nAccording to the above passage, answer the following question. If it is impossible to answer "
            "according to the passage, answer `impossible to answer`:\nQuestion: Q?"
        ),
        ("impossible to answer", "nearly"),
    ),
    "drop": (
        {"passage": "P.", "question": "Q?", "answers_spans": {"spans": ["3", "three"], "types": ["number", "span"]}},
        "Text: P.\nQuestion: Q?\nAnswer:",
        ("3", "three"),
    ),
    "gsm8k": (
        {"question": "2 and 3?", "answer": "2+3=5.\n#### 5"},
        "Question: 2 and 3?\nLet's think step by step\nAnswer:",
        ("2+3=5.\n#### 5",),
    ),
    "winogrande": (
        {"sentence": "Ann beat Eve, so _ won", "option1": "Ann", "option2": "Eve", "answer": "1"},
        "Which of the following is a good sentence:\nA. Ann beat Eve, so Ann won\nB. Ann beat Eve, so Eve won\nAnswer:",
        ("A",),
    ),
    "openbookqa": (
        {"question_stem": "The sun is", "choices": FOUR, "answerKey": "D", "fact1": "suns shine"},
        "Given the fact: suns shine\nQuestion: The sun is\nA. p\nB. q\nC. r\nD. s\nAnswer:",
        ("D",),
    ),
    "hellaswag": (
        {
            "ctx_a": "How to [title] Take flour.",
            "ctx_b": "a man",
            "endings": ["p [step] x.", "q.", " r.", "s [."],
            "label": "2",
        },
        (
            "How to. Take flour. A man\nQuestion: Which ending makes the most sense?\nA. p x.\nB. q.\nC. r.\nD. s [.\n"
            "You may choose from 'A', 'B', 'C', 'D'.\nAnswer:"
        ),
        ("C",),
    ),
}


def _prepared(monkeypatch: pytest.MonkeyPatch, task: TaskConfig, rows: list[dict[str, Any]]) -> PreparedSplit:
    """The same rows for every source split."""

    def fake(source: Source, split: str) -> Table:
        return Table(split, datasets.Dataset.from_list(rows))

    monkeypatch.setattr(prepare, "load_table", fake)
    whole = task.splits["test"].model_copy(update={"offset": 0, "count": None, "indices": None})
    return prepare_split(task.model_copy(update={"splits": {"test": whole}}), "test")


def test_all_are_listed_and_set_as_the_authors_set_them() -> None:
    assert {name for name in list_tasks() if "/" in name} == {f"eep/{name}" for name in SETTINGS}
    for name, (kind, tokens) in SETTINGS.items():
        task = load_task(f"eep/{name}")
        assert (task.name, task.matching.kind, task.max_new_tokens) == (f"eep/{name}", kind, tokens)
        assert "\n" not in task.matching.build().stop or kind == "eep-squad2"
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


def test_prompts_and_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("boolq", "rte", "cb", "record"):
        assert load_task(f"eep/{name}").prompt == load_task(name).prompt
    for name, (row, prompt, references) in ROWS.items():
        (example,) = _prepared(monkeypatch, load_task(f"eep/{name}"), [row]).examples
        assert (example.prompt, example.references) == (prompt, references), name
        assert len(example.shots) == {"drop": 2, "gsm8k": 4}.get(name, 0)


def test_squad_rows_without_plausible_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"context": "C.", "question": f"{texts}?", "answers": {"text": texts}} for texts in ([], ["one", "two"])]
    examples = _prepared(monkeypatch, load_task("eep/squad2"), rows).examples
    assert [example.references for example in examples] == [("impossible to answer",), ("one", "two")]


def test_drop_is_text_with_two_shots_and_of_numbers_only(monkeypatch: pytest.MonkeyPatch) -> None:
    other = ROWS["drop"][0] | {"passage": "Q.", "answers_spans": {"spans": ["May"], "types": ["date"]}}
    split = _prepared(monkeypatch, load_task("eep/drop"), [ROWS["drop"][0], other])
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
    split = _prepared(monkeypatch, load_task("eep/gsm8k"), [ROWS["gsm8k"][0]])
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


# --- The authors' own files -----------------------------------------------------------------------------------------

FILES = {"boolq": "BoolQ", "cb": "CB", "rte": "RTE", "wic": "WiC", "wsc": "WSC"}


def _marked(text: str, target: dict[str, Any]) -> str:
    """WSC's passage as the authors' reader marks it: each span replaces its words."""
    words = text.split(" ")
    spans = {}
    for span, mark in (("span2", "#"), ("span1", "*")):  # the noun's mark wins where they overlap
        start, wording = target[f"{span}_index"], target[f"{span}_text"]
        for i in range(start, start + len(wording.split(" "))):
            spans[i] = (i == start, f"{mark} {wording} {mark}")
    pieces = [spans.get(i, (True, word)) for i, word in enumerate(words)]
    return " ".join(piece for shown, piece in pieces if shown)


def _asked(name: str, row: dict[str, Any]) -> str:
    """The paper's Table 14; WiC spelled as in the authors' configuration."""
    match name:
        case "boolq":
            return f"{row['passage']}\nQuestion: {row['question']}{YES_NO}"
        case "wic":
            return (
                f"Sentence 1: {row['sentence1']}\nSentence 2: {row['sentence2']}\n"
                f"Are '{row['word']}' in the above two sentenses the same?{YES_NO}"
            )
        case "wsc":
            target = row["target"]
            return (
                f"Passage: {_marked(row['text'], target)}\nDoes the pronoun # {target['span2_text']} # refer to "
                f"* {target['span1_text']} *?{YES_NO}"
            )
        case "rte":
            return (
                f"{row['premise']}\n{row['hypothesis']}\nIs the sentence below entailed by the sentence above?{YES_NO}"
            )
    return (
        f"{row['premise']}\n{row['hypothesis']}\nWhat is the relation between the two sentences?\n"
        "A. Contradiction\nB. Entailment\nC. Neutral\nAnswer:"
    )


ANSWERS = {
    "rte": {"entailment": "A", "not_entailment": "B"},
    "cb": {"contradiction": "A", "entailment": "B", "neutral": "C"},
}
TRUTHS = {True: "A", False: "B", "true": "A", "false": "B"}


@originals
def test_wics_rows_are_those_of_the_released_file() -> None:
    rows = [json.loads(line)["idx"] for line in (FOLDER / "WiC" / "val.jsonl").read_text().splitlines()]
    assert load_task("eep/wic").splits["test"].indices == tuple(rows)


@originals
@pytest.mark.parametrize("name", FILES)
def test_every_row_of_the_released_files(tmp_path: Path, name: str) -> None:
    data = FOLDER / FILES[name] / "val.jsonl"
    (tmp_path / "mine.yaml").write_text(
        json.dumps(
            {
                "extends": f"eep/{name}",
                "source": {"files": {"val": str(data)}},
                "splits": {"test": {"from": "val"}},
            }
        )
    )
    examples = prepare_split(load_task(tmp_path / "mine.yaml"), "test").examples
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    assert len(examples) == len(rows)
    wrong = [
        i for i, (row, example) in enumerate(zip(rows, examples, strict=True)) if example.prompt != _asked(name, row)
    ]
    assert wrong == []
    assert [example.references for example in examples] == [(ANSWERS.get(name, TRUTHS)[row["label"]],) for row in rows]
