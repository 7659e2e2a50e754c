from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.preparation.prepare import prepare_split, prepare_splits
from moevolve.evaluators.preparation.registry import load_task

WriteTask = Callable[..., Path]
ROWS = [{"text": f"text {i}", "topic": "xy"[i % 2], "label": bool(i % 3)} for i in range(12)]  # as in conftest.py
ASKED = "\nA. Yes\nB. No\nAnswer:"
WRITTEN = [{"text": "snow is hot", "label": False}, {"text": "snow is cold", "label": True}]


def test_shots_written_in_the_task_file(write_task: WriteTask) -> None:
    split = prepare_split(load_task(write_task(shots=WRITTEN, system="Be brief.")), "dev")
    shots = (("snow is hot" + ASKED, "B"), ("snow is cold" + ASKED, "A"))
    assert {example.shots for example in split.examples} == {shots}
    example = split.examples[0]
    assert split.text(example) == (f"Be brief.\n\nsnow is hot{ASKED} B\n\nsnow is cold{ASKED} A\n\n{example.prompt}")
    assert split.turns(example) == (
        ("system", "Be brief."),
        *(("user", shots[0][0]), ("assistant", "B"), ("user", shots[1][0]), ("assistant", "A")),
        ("user", example.prompt),
    )
    assert split.fingerprint != prepare_split(load_task(write_task(shots=WRITTEN)), "dev").fingerprint
    assert split.fingerprint != prepare_split(load_task(write_task(system="Be brief.")), "dev").fingerprint


@pytest.mark.parametrize("chosen", [{"indices": [3, 1]}, {"seed": 0, "count": 2}])
def test_shots_from_a_source_are_in_no_split(write_task: WriteTask, chosen: dict[str, Any]) -> None:
    prepared = prepare_splits(load_task(write_task(shots={"from": "all", **chosen})))
    (shots,) = {example.shots for split in prepared.values() for example in split.examples}
    assert len(shots) == 2
    if "indices" in chosen:
        assert shots == (("text 3" + ASKED, "B"), ("text 1" + ASKED, "A"))
    asked = [example.prompt for split in prepared.values() for example in split.examples]
    assert sorted(asked) == sorted({f"{row['text']}{ASKED}" for row in ROWS} - {prompt for prompt, _ in shots})


def test_shots_are_left_out_of_calibration_too(write_task: WriteTask) -> None:
    rows = [*ROWS, *({"text": f"more {i}", "topic": "x", "label": None} for i in range(3)), WRITTEN[0]]
    splits = {"search": {"from": "all", "count": 4}, "calibration": {"from": "all", "offset": 12}}
    prepared = prepare_splits(load_task(write_task(rows=rows, splits=splits, shots=WRITTEN)))
    assert [example.prompt for example in prepared["calibration"].examples] == [f"more {i}{ASKED}" for i in range(3)]


def test_shots_of_a_rows_own_value(write_task: WriteTask) -> None:
    prepared = prepare_split(load_task(write_task(shots={"from": "all", "per": "topic", "count": 2})), "test")
    topics = {f"{row['text']}{ASKED}": row["topic"] for row in ROWS}
    for example in prepared.examples:
        assert [topics[prompt] for prompt, _ in example.shots] == [topics[example.prompt]] * 2


def test_whole_texts_show_nothing_before_them_and_are_no_conversation(write_task: WriteTask) -> None:
    path = write_task(shots=WRITTEN, system="Be brief.")
    for name, plain in (("", False), ("@kl", False), ("@rank", False), ("@perplexity", True)):
        split = prepare_split(load_task(f"{path}{name}"), "dev")
        assert (split.system, split.chat) == (("", False) if plain else ("Be brief.", True))
        assert {len(example.shots) for example in split.examples} == {0 if plain else 2}
    plain_split = prepare_split(load_task(write_task(chat=False)), "dev")
    example = plain_split.examples[0]
    assert not plain_split.chat and plain_split.text(example) == example.prompt
    assert plain_split.turns(example) == (("user", example.prompt),)
    path = write_task(shots=WRITTEN, answer=None, choices=None, labels=None, matching=None, fitness="agreement")
    with pytest.raises(UserError, match="`shots` show answers"):
        load_task(path)


@pytest.mark.parametrize(
    ("shots", "message"),
    [
        ({"from": "all", "count": 13}, "shots: .*can't take 13 rows"),
        ({"from": "train", "count": 1}, "`shots.from` is `train`, but `source.files` has: all"),
        ({"from": "all"}, "`shots`: say how many with `count`"),
        ([{"label": True}], "field prompt: shots, row 1: 'text' is undefined"),
        ({"from": "all", "count": 1, "per": "topic", "where": {"topic": ["x"]}}, "shots: there are none of topi"),
        ({"from": "all", "count": 12}, "shots: all rows of `search` are shots"),
    ],
)
def test_shots_that_are_not_there(write_task: WriteTask, shots: Any, message: str) -> None:
    path = write_task(shots=shots)
    with pytest.raises(UserError, match=rf"^{path}: .*{message}|^{path}: {message}") as found:
        prepare_split(load_task(path), "search")
    assert "\n" not in str(found.value)
