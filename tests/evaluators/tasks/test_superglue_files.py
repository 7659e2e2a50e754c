"""The packaged tasks on files in SuperGLUE's format: a few made-up rows, and the original files if present."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from moevolve.evaluators.preparation.prepare import prepare_split, prepare_splits
from moevolve.evaluators.preparation.registry import load_task
from moevolve.evaluators.tasks.config import TaskConfig
from moevolve.evaluators.types import PreparedSplit

_ROOT = Path(__file__).resolve().parents[3]
MADE_UP = _ROOT / "tests" / "labs" / "superglue"
FOLDER = Path(os.environ.get("MOEVOLVE_SHARED", _ROOT.parent / "shared")) / "data" / "superglue"

originals = pytest.mark.skipif(not FOLDER.is_dir(), reason=f"no SuperGLUE files in {FOLDER}; set MOEVOLVE_SHARED")

# Task: its folder, the prompt of the first made-up row, and the answers of all.
MADE_UP_ROWS = {
    "boolq": (
        "BoolQ",
        (
            "Brill -- The ferry to Brill runs from March to October. In winter the island is reached on foot over the "
            "ice.\nQuestion: is the ferry to brill open in winter\nA. Yes\nB. No\nAnswer:"
        ),
        "BAA",
    ),
    "cb": (
        "CB",
        (
            "A: I don't think that the baker sold his shop. B: No, nor do I.\nthe baker sold his shop\n"
            "What is the relation between the two sentences?\nA. Contradiction\nB. Entailment\nC. Neutral\nAnswer:"
        ),
        "ABC",
    ),
    "copa": (
        "COPA",
        (
            "The lamp went out.\nQuestion: Which of these is the more plausible cause?\n"
            "A. The oil was used up.\nB. The window was painted.\nAnswer:"
        ),
        "AB",
    ),
    "rte": (
        "RTE",
        (
            "The harbour of Brill was deepened in 1902, after two ships had run aground.\n"
            "Two ships ran aground at Brill.\n"
            "Is the sentence below entailed by the sentence above?\nA. Yes\nB. No\nAnswer:"
        ),
        "ABAB",
    ),
    "wic": (
        "WiC",
        (
            "Sentence 1: They rowed to the other bank.\nSentence 2: The bank lent them the money.\n"
            "Are 'bank' in the above two sentences the same?\nA. Yes\nB. No\nAnswer:"
        ),
        "BA",
    ),
    "wsc": (
        "WSC",
        (
            "Passage: * Old Anna * gave Marta the key because # she # was leaving.\n"
            "Does the pronoun # she # refer to * Old Anna *?\nA. Yes\nB. No\nAnswer:"
        ),
        "AB",
    ),
}

# Task: its folder, rows, and how often each answer is right.
FACTS = {
    "boolq": ("BoolQ", 3270, {"A": 2033, "B": 1237}),
    "cb": ("CB", 56, {"A": 28, "B": 23, "C": 5}),
    "rte": ("RTE", 277, {"A": 146, "B": 131}),
    "wic": ("WiC", 500, {"A": 255, "B": 245}),
    "wsc": ("WSC", 104, {"A": 38, "B": 66}),
}


def _on_own_files(name: str, data: Path, splits: dict[str, Any]) -> TaskConfig:
    """A packaged task on a folder's validation file, as a user would write it."""
    source = {"files": {"val": str(data / "val.jsonl")}}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"{name}.yaml")
        path.write_text(json.dumps({"extends": name, "source": source, "splits": splits}))
        return load_task(str(path))


@cache
def _validation(name: str) -> PreparedSplit:
    return prepare_split(_on_own_files(name, FOLDER / FACTS[name][0], {"test": {"from": "val"}}), "test")


@pytest.mark.parametrize("name", sorted(MADE_UP_ROWS))
def test_made_up_rows_become_prompts_and_answers(name: str) -> None:
    folder, prompt, answers = MADE_UP_ROWS[name]
    task = _on_own_files(name, MADE_UP / folder, {"test": {"from": "val"}})
    examples = prepare_split(task, "test").examples
    assert examples[0].prompt == prompt
    assert [example.references for example in examples] == [(answer,) for answer in answers]


def test_made_up_rows_give_all_splits() -> None:
    splits = {
        "search": {"from": "val", "seed": 0, "count": 2},
        "dev": {"from": "val", "seed": 0, "offset": 2, "count": 1},
        "test": {"from": "val", "seed": 0, "offset": 3},
    }
    prepared = prepare_splits(_on_own_files("rte", MADE_UP / "RTE", splits))
    assert [len(split.examples) for split in prepared.values()] == [2, 1, 1]
    assert len({example.prompt for split in prepared.values() for example in split.examples}) == 4


@originals
@pytest.mark.parametrize("name", sorted(FACTS))
def test_rows_and_answers(name: str) -> None:
    _, rows, answers = FACTS[name]
    examples = _validation(name).examples
    assert len(examples) == rows
    assert Counter(example.references[0] for example in examples) == answers


@originals
def test_wsc_marks_stand_around_the_spans() -> None:
    wrong = []
    for i, example in enumerate(_validation("wsc").examples):
        passage, question, *_ = example.prompt.split("\n")
        asked = re.fullmatch(r"Does the pronoun # (.*) # refer to \* (.*) \*\?", question)
        noun, pronoun = re.search(r"\* (.*) \*", passage), re.search(r"# (.*) #", passage)
        assert asked and noun and pronoun
        marked = (
            pronoun[1].casefold(),
            noun[1].replace("# ", "").replace(" #", "").casefold(),
        )  # one lies in the other
        if marked != (asked[1].casefold(), asked[2].casefold()):
            wrong.append(i)
    assert wrong == [42]  # the data's own slip: its index points one word beside the pronoun
