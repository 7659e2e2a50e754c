"""The demo tasks and models as they are shipped: their splits, their answers, and where they come from."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from demo.files import SPLIT_SIZES, split_of, write_demo_tasks
from demo.prompts import CHOICES, render
from demo.tasks import TASKS

DEMO = Path(__file__).parents[2] / "configs" / "demo"


def folders_with(name: str) -> pytest.MarkDecorator:
    """One case for each demo model, skipped where its files aren't here."""
    here = {folder: (DEMO / folder / name).exists() for folder in ("model", "dense")}
    skip = pytest.mark.skipif
    cases = [pytest.param(f, marks=skip(not found, reason=f"demo/{f} isn't here")) for f, found in here.items()]
    return pytest.mark.parametrize("folder", cases)


def shipped(task: str, split: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (DEMO / "data" / task / f"{split}.jsonl").read_text("utf-8").splitlines()]


@pytest.mark.parametrize("task", TASKS)
def test_no_answer_is_much_more_frequent_than_chance(task: str) -> None:
    answers = Counter(row["answer"] for row in shipped(task, "test"))
    if task in CHOICES:
        assert set(answers) == set(CHOICES[task])
        assert max(answers.values()) < 1.15 * answers.total() / len(CHOICES[task])
    else:
        assert len(answers) >= 12 and max(answers.values()) < 0.12 * answers.total()
    assert not any("answer" in row for row in shipped(task, "calibration"))


def test_regenerating_gives_the_shipped_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first twentieth of them: rows of a split are drawn one after the other."""
    monkeypatch.setattr("demo.files.SPLIT_SIZES", {split: size // 20 for split, size in SPLIT_SIZES.items()})
    written = write_demo_tasks(tmp_path)
    assert len(written) == len(TASKS) * len(SPLIT_SIZES)
    for path in written:
        found = path.read_bytes()
        assert found.count(b"\n") == SPLIT_SIZES[path.stem] // 20
        assert (DEMO / "data" / path.relative_to(tmp_path)).read_bytes().startswith(found), path


@pytest.mark.parametrize("task", TASKS)
def test_splits_have_their_sizes_and_share_no_prompt(task: str) -> None:
    prompts = {split: [render(row) for row in shipped(task, split)] for split in SPLIT_SIZES}
    assert {split: len(some) for split, some in prompts.items()} == SPLIT_SIZES
    assert all(split_of(task, prompt) == split for split, some in prompts.items() for prompt in some)
    assert len({prompt for some in prompts.values() for prompt in some}) == sum(SPLIT_SIZES.values())


@folders_with("tokenizer.json")
def test_tokenizer_reads_answers_the_same_jointly_and_apart(folder: str) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(DEMO / folder)
    for task in TASKS:
        for row in shipped(task, "dev")[:20]:
            prompt, answer = render(row), " " + row["answer"]
            apart = tokenizer(prompt)["input_ids"] + tokenizer(answer, add_special_tokens=False)["input_ids"]
            assert tokenizer(prompt + answer)["input_ids"] == apart
            assert tokenizer.unk_token_id not in apart
            assert apart[0] == tokenizer.bos_token_id
            assert len(apart) <= 40
            assert tokenizer.decode(apart[-len(answer.split()) :]) == row["answer"]


@folders_with("training.json")
def test_shipped_model_scores_what_its_record_says(folder: str) -> None:
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    tokenizer = transformers.AutoTokenizer.from_pretrained(DEMO / folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO / folder, dtype=torch.float32).eval()
    record = json.loads((DEMO / folder / "training.json").read_text("utf-8"))
    for task in TASKS:
        rows = shipped(task, "test")[:60]
        inputs = tokenizer([render(row) for row in rows], return_tensors="pt", padding=True)
        inputs.pop("token_type_ids", None)
        written = model.generate(**inputs, max_new_tokens=4, do_sample=False)[:, inputs["input_ids"].shape[1] :]
        texts = tokenizer.batch_decode(written, skip_special_tokens=True)
        right = sum(text == row["answer"] for text, row in zip(texts, rows, strict=True)) / len(rows)
        assert right == pytest.approx(record["accuracy"]["test"][task], abs=0.13), task
        # The dense model hasn't learnt to compare, and half of the answers are right by chance.
        assert right > {"model": 0.8, "dense": 0.4}[folder], task
    assert record["parameters"] == model.num_parameters()
