"""Errors in task files and their messages."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.preparation.prepare import prepare_splits
from moevolve.evaluators.preparation.registry import load_task
from moevolve.evaluators.types import HarnessTask

WriteTask = Callable[..., Path]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"promt": "x"}, "promt: unknown key (did you mean `prompt`?)"),
        ({"matching": {"kind": "bleu"}}, "matching.kind: unknown matching kind `bleu`; known: capital, contains"),
        ({"answer": None}, "give `answer`"),
        ({"choices": None}, "`option` looks for one of the choices"),
        ({"choices": None, "fitness": "rank", "matching": None}, "give `choices`"),
        ({"source": {"hub": "a/b", "files": {"all": "rows.jsonl"}}}, "give one of `hub`, `files` and `installed`"),
        ({"source": {"installed": "novels"}}, "unknown domain of installed text `novels`; known: manual, docstrings"),
        (
            {"source": {"installed": "code"}},
            "`splits.search.from` is `all`, but installed text has: train, calibration",
        ),
        ({"source": {"files": {"all": "rows.jsonl", "more": "./rows.jsonl"}}}, "stands under both `all` and `more`"),
        (
            {"source": {"files": {"other": "rows.jsonl"}}},
            "`splits.search.from` is `all`, but `source.files` has: other",
        ),
        ({"source": {"hub": "a/b"}, "splits": {"test": {"from": "train[:9]"}}}, "must be a plain split name"),
        ({"splits": {"test": {"from": "all", "indices": [1, 1]}}}, "`indices` names a row twice"),
        ({"splits": {"test": {"from": "all", "indices": [1], "seed": 1}}}, "can't be combined"),
        ({"fitness": "lm_eval"}, "a task of lm-evaluation-harness is judged by it, and no other task is"),
        ({"name": "other"}, "a task is called like its file: `small`"),
    ],
)
def test_wrong_task_files_are_named_with_their_field(write_task: WriteTask, changes: dict[str, Any], said: str) -> None:
    path = write_task(**changes)
    with pytest.raises(UserError) as caught:
        load_task(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_broken_yaml_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "broken.yaml"
    for text, said in (("prompt: [1,\n", ":2: "), ("prompt: a\nprompt: b\n", ":2: key `prompt` given twice")):
        path.write_text(text)
        with pytest.raises(UserError, match=f"broken\\.yaml{said}"):
            load_task(path)


def test_label_keys_keep_their_spelling(tmp_path: Path, write_task: WriteTask) -> None:
    """As YAML values `true` and `1` are one dictionary key in Python, and `no` is false."""
    path = write_task()
    text = path.read_text().replace("labels:\n  label:\n    'true': A\n    'false': B\n",
                                    "labels:\n  label: {true: A, 1: B, no: C, 0: D, false: B}\n")  # fmt: skip
    assert "no: C" in text
    path.write_text(text)
    assert load_task(path).labels["label"] == {"true": "A", "1": "B", "no": "C", "0": "D", "false": "B"}


@pytest.mark.parametrize(("fitness", "metric"), [("perplexity", "inverse_perplexity"), ("kl", "geometric_mean")])
def test_texts_need_neither_answers_nor_choices(write_task: WriteTask, fitness: str, metric: str) -> None:
    task = load_task(
        write_task(fitness=fitness, prompt="{{ text }}", answer=None, choices=None, labels=None, matching=None)
    )
    split = prepare_splits(task)["search"]
    assert (split.fitness, split.metric) == (fitness, metric)
    assert {(example.references, example.choices) for example in split.examples} == {((), ())}
    graded = load_task(write_task(fitness=fitness))
    assert {example.references for example in prepare_splits(graded)["search"].examples} <= {("A",), ("B",)}
    words = load_task(write_task(fitness=fitness, answer="of the", labels=None, choices=None, matching={"kind": "em"}))
    assert prepare_splits(words)["search"].examples[0].references == ("of the",), "nobody matches it"


def test_running_text_has_windows(write_task: WriteTask) -> None:
    prompts = {"prompt": "{{ text }}", "answer": None, "choices": None, "labels": None, "matching": None}
    task = load_task(write_task(fitness="perplexity", window=64, **prompts))
    split = prepare_splits(task)["search"]
    assert split.window == 64 and split.running_text == "\n\n".join(each.prompt for each in split.examples)
    assert replace(split, window=65).fingerprint != split.fingerprint != replace(split, window=None).fingerprint
    for fitness in ("kl", "agreement"):
        compared = prepare_splits(task.with_fitness(fitness))["search"]
        assert (compared.window, compared.positions) == (64, "text")
    answered = prepare_splits(load_task(write_task("answered", fitness="perplexity", window=64)))["search"]
    assert answered.running_text.startswith(f"{answered.examples[0].prompt} {answered.examples[0].references[0]}\n\n")
    for wrong in ({}, {"fitness": "rank"}, {"fitness": "kl"}, {"fitness": "kl", "positions": "greedy"}):
        with pytest.raises(UserError, match="`window` cuts running text"):
            load_task(write_task("wrong", window=64, **wrong))
    with pytest.raises(UserError, match="window"):
        load_task(write_task("small", fitness="perplexity", window=1, **prompts))


def test_answers_are_compared_where_there_are_some(write_task: WriteTask) -> None:
    path = write_task()
    whole = write_task("whole", positions="text")
    for fitness in ("kl", "agreement"):
        assert prepare_splits(load_task(f"{path}@{fitness}"))["search"].positions == "answer"
        assert prepare_splits(load_task(f"{whole}@{fitness}"))["search"].positions == "text"
    chosen = write_task("chosen", positions="greedy")
    assert prepare_splits(load_task(chosen))["search"].positions == "text", "nothing is compared"
    for fitness in ("kl", "agreement"):
        assert prepare_splits(load_task(f"{chosen}@{fitness}"))["search"].positions == "greedy"


def test_agreement_needs_no_labels(write_task: WriteTask) -> None:
    prompts = {"prompt": "{{ text }}", "answer": None, "choices": None, "labels": None, "matching": None}
    split = prepare_splits(load_task(write_task(fitness="agreement", **prompts)))["search"]
    assert (split.fitness, split.metric, split.positions) == ("agreement", "agreement", "greedy")
    assert split.examples[0].references == ()
    text = write_task("running", fitness="perplexity", **prompts)
    for fitness in ("agreement", "kl"):
        assert prepare_splits(load_task(f"{text}@{fitness}"))["search"].positions == "text"
    with pytest.raises(UserError, match="positions `answer` needs `answer` or `references`"):
        load_task(write_task("wrong", fitness="kl", positions="answer", **prompts))


def test_fingerprints_are_of_all_fields_but_where_a_file_lies(write_task: WriteTask) -> None:
    split = prepare_splits(load_task(write_task()))["search"]
    content = asdict(split)
    del content["matching"]["function"], content["matching"]["source"]  # it has none
    payload = json.dumps(content, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    assert split.fingerprint == hashlib.sha256(payload.encode()).hexdigest()
    judged = replace(split, harness=HarnessTask("one.yaml", "{}", "0.4", "acc", "none", (), ()))
    assert judged.harness is not None
    moved = replace(judged, harness=replace(judged.harness, yaml="other.yaml"))
    later = replace(judged, harness=replace(judged.harness, version="0.5"))
    others = (split, replace(split, positions="greedy"), replace(split, task="other"), judged, later)
    assert len({each.fingerprint for each in others}) == 5
    assert moved.fingerprint == judged.fingerprint


def test_counts_can_be_replaced(write_task: WriteTask) -> None:
    task = load_task(write_task())
    assert len(prepare_splits(task.with_counts({"search": 2}))["search"].examples) == 2
    with pytest.raises(UserError, match=r"row .* is in both `search` and `dev`"):
        prepare_splits(task.with_counts({"search": 6}))
    two = {"search": {"from": "all", "count": 2}, "dev": {"from": "all", "offset": 2}}
    task = load_task(write_task(splits=two))
    with pytest.raises(UserError, match="no `test` split; it has: search, dev"):
        task.with_counts({"test": 1})
