"""Finding tasks by name, and preparing their splits."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.preparation.prepare import prepare_split, prepare_splits
from moevolve.evaluators.preparation.registry import FOLDERS_VARIABLE, list_tasks, load_task, split_fitness

WriteTask = Callable[..., Path]


def test_own_folders_come_before_the_packaged_tasks(
    write_task: WriteTask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(FOLDERS_VARIABLE, raising=False)
    path = write_task("boolq")
    packaged = list_tasks()
    assert packaged["boolq"].parent.name == "tasks"
    assert load_task("boolq").source.hub == "aps/super_glue"
    monkeypatch.setenv(FOLDERS_VARIABLE, str(tmp_path))
    assert list_tasks() == packaged | {"boolq": path}
    assert load_task("boolq").source.files is not None
    monkeypatch.setenv(FOLDERS_VARIABLE, str(tmp_path / "absent"))
    with pytest.raises(UserError, match="absent: no such folder"):
        list_tasks()
    monkeypatch.delenv(FOLDERS_VARIABLE)
    for name, said in (
        ("bolq", "; did you mean boolq"),
        ("zzzzzz", "; there are arc-challenge, arc-easy, boolq, cb, copa and "),
    ):
        with pytest.raises(UserError, match=f"unknown task `{name}`{said}"):
            load_task(name)
    with pytest.raises(UserError, match=r"mine\.yaml: no such file"):
        load_task(tmp_path / "mine.yaml")


def test_tasks_in_a_folder_below_have_its_name_before_theirs(
    write_task: WriteTask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDERS_VARIABLE, str(tmp_path))
    (tmp_path / "mine").mkdir()
    write_task()
    path = tmp_path / "mine" / "quick.yaml"
    path.write_text("extends: ../small.yaml\nmax_new_tokens: 3\n")
    assert list_tasks()["mine/quick"] == path
    named, given = load_task("mine/quick"), load_task(path)
    assert (named.name, given.name, named.max_new_tokens) == ("mine/quick", "quick", 3)
    assert load_task("mine/quick@rank").name == "mine/quick@rank"
    with pytest.raises(UserError, match="unknown task `mine/quik`; did you mean mine/quick"):
        load_task("mine/quik")


def test_row_numbers_in_a_file_of_their_own(write_task: WriteTask, tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text("[3, 0]")
    splits = {"test": {"from": "all", "offset": 2, "where": {"topic": ["x"]}, "indices": "rows.json"}}
    task = load_task(write_task(splits=splits, shots={"from": "all", "indices": "rows.json"}))
    prepared = prepare_split(task, "test")
    assert [example.prompt.split("\n")[0] for example in prepared.examples] == ["text 10", "text 4"]
    assert [prompt.split("\n")[0] for prompt, _ in prepared.examples[0].shots] == ["text 3", "text 0"]
    with pytest.raises(UserError, match=r"small\.yaml: the rows of `test` are listed by `indices`"):
        task.with_counts({"test": 1})
    for content, wrong in (
        ("[1, 2.5]", "splits.test.indices.1: Input should be a valid integer"),
        ("{", "field splits.test.indices: .*rows.json can't be read"),
    ):
        (tmp_path / "rows.json").write_text(content)
        with pytest.raises(UserError, match=rf"small\.yaml: {wrong}"):
            load_task(write_task(splits=splits))


def test_extends_lays_a_task_over_another(write_task: WriteTask, tmp_path: Path) -> None:
    write_task()
    (tmp_path / "sub").mkdir()
    child = tmp_path / "sub" / "child.yaml"
    child.write_text("extends: ../small.yaml\nfitness: rank\n")
    task = load_task(child)
    assert (task.name, task.fitness, task.choices) == ("child", "rank", ("A", "B"))
    assert prepare_split(task, "dev").examples == prepare_split(load_task(tmp_path / "small.yaml"), "dev").examples
    child.write_text("extends: rte\nsource: {files: {train: t.jsonl, validation: v.jsonl}}\n")
    assert load_task(child).source.files == {
        "train": (child.parent / "t.jsonl",),
        "validation": (child.parent / "v.jsonl",),
    }
    child.write_text("extends: child.yaml\n")
    with pytest.raises(UserError, match="goes round in a circle"):
        load_task(child)


def test_any_task_under_another_fitness_is_a_task_of_its_own(
    write_task: WriteTask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_task()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(FOLDERS_VARIABLE, str(tmp_path))
    plain = load_task(path)
    for name in (f"{path}@kl", "small.yaml@kl", "./small.yaml@kl"):
        assert load_task(name).model_dump() == load_task("small@kl").model_dump()
    other = load_task("small@kl")
    assert (other.name, other.fitness, other.origin) == ("small@kl", "kl", str(path))
    ours, theirs = prepare_splits(plain), prepare_splits(other)
    assert [split.examples for split in ours.values()] == [split.examples for split in theirs.values()]
    assert not {split.fingerprint for split in ours.values()} & {split.fingerprint for split in theirs.values()}
    assert theirs["dev"].task == "small@kl"
    same = load_task("small.yaml@generate")
    assert (same.name, theirs["dev"].metric) == ("small@generate", "geometric_mean")
    assert prepare_split(same, "dev").fingerprint != ours["dev"].fingerprint
    assert load_task("small.yaml@perplexity").with_counts({"search": 2}).name == "small@perplexity"


def test_a_fitness_that_is_unknown_or_does_not_suit_is_refused(write_task: WriteTask, tmp_path: Path) -> None:
    path = write_task(fitness="perplexity", answer=None, choices=None, labels=None, matching=None)
    with pytest.raises(UserError, match=r"small\.yaml@bleu: unknown fitness `bleu`; .* generate, rank, perplexity, kl"):
        load_task(f"{path}@bleu")
    with pytest.raises(UserError, match="unknown fitness ``"):
        load_task("boolq@")
    with pytest.raises(UserError, match=r"small\.yaml: give `answer`"):
        load_task(f"{path}@generate")
    with pytest.raises(UserError, match=r"squad2\.yaml: fitness `rank` compares the likelihood of choices"):
        load_task("squad2@rank")
    other = tmp_path / "mine@kl.yaml"
    other.write_text(path.read_text())
    with pytest.raises(UserError, match=r"mine@kl\.yaml: an @ in a task's name sets another fitness; rename the file"):
        load_task(other)
    (tmp_path / "a@b").mkdir()
    (tmp_path / "a@b" / "small.yaml").write_text(path.read_text())
    assert load_task(tmp_path / "a@b" / "small.yaml").name == "small"
    assert split_fitness(str(tmp_path / "a@b" / "small.yaml@kl"))[1] == "@kl"


def test_splits_are_disjoint_ordered_and_fingerprinted(write_task: WriteTask, caplog: pytest.LogCaptureFixture) -> None:
    task = load_task(write_task())
    prepared = prepare_splits(task)
    assert {name: len(split.examples) for name, split in prepared.items()} == {"search": 4, "dev": 3, "test": 5}
    assert len({example.prompt for split in prepared.values() for example in split.examples}) == 12
    assert prepared == prepare_splits(task)
    assert len({split.fingerprint for split in prepared.values()}) == 3
    assert prepare_split(task, "dev").fingerprint == prepared["dev"].fingerprint
    other = load_task(write_task(answer_prefix=""))
    assert prepare_split(other, "dev").fingerprint != prepared["dev"].fingerprint
    with caplog.at_level(logging.WARNING):
        prepare_splits(load_task(write_task(rows=[{"text": "same", "label": True}] * 12)))
    assert "1 prompts of `dev` also stand in an earlier split" in caplog.text


def test_overlapping_splits_are_refused_even_if_only_one_is_asked_for(write_task: WriteTask) -> None:
    task = load_task(write_task(splits={"search": {"from": "all", "count": 5}, "test": {"from": "all", "offset": 4}}))
    with pytest.raises(UserError, match=r"row 4 is in both `search` and `test`"):
        prepare_split(task, "search")
    with pytest.raises(UserError, match="no `dev` split; it has: search, test"):
        prepare_split(task, "dev")


def test_wrong_rows_are_named_with_file_and_line(write_task: WriteTask, tmp_path: Path) -> None:
    task = load_task(write_task(rows='{"text": "t", "label": true}\n{"text": \n', splits={"test": {"from": "all"}}))
    with pytest.raises(UserError, match=r"rows\.jsonl:2: not JSON"):
        prepare_split(task, "test")
    lacking = '{"text": "t", "label": true}\n{"label": true}\n'
    with pytest.raises(UserError, match=r"small\.yaml: field prompt: .*rows\.jsonl:2: a value in it is null or absent"):
        prepare_split(load_task(write_task(rows=lacking, splits={"test": {"from": "all"}})), "test")
    with pytest.raises(UserError, match=r"rows\.jsonl:1: 'text' is undefined; the row has: label"):
        prepare_split(load_task(write_task(rows='{"label": true}\n', splits={"test": {"from": "all"}})), "test")
    with pytest.raises(UserError, match=r"rows\.jsonl:\d+: choices must be single capital letters"):
        prepare_split(load_task(write_task(choices=["A", "B", "none"])), "test")
    with pytest.raises(UserError, match="at least two different choices"):
        prepare_split(load_task(write_task(choices=["A", "A", "B"], fitness="rank")), "test")
