"""The demo tasks: their files, their splits, and their answers recomputed from the text of the rows."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest
from demo import (
    CHOICES,
    SPLIT_SIZES,
    TASKS,
    generate,
    render,
    split_of,
    write_demo_tasks,
)
from demo import vocabulary as words
from demo.tasks import COMPOSED, facts

DEMO = Path(__file__).parents[2] / "configs" / "demo"


def folders_with(name: str) -> pytest.MarkDecorator:
    """One case for each demo model, skipped where its files aren't here."""
    here = {folder: (DEMO / folder / name).exists() for folder in ("model", "dense")}
    skip = pytest.mark.skipif
    cases = [pytest.param(f, marks=skip(not found, reason=f"demo/{f} isn't here")) for f, found in here.items()]
    return pytest.mark.parametrize("folder", cases)


def shipped(task: str, split: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (DEMO / "data" / task / f"{split}.jsonl").read_text("utf-8").splitlines()]


def tokens(text: str) -> list[str]:
    for mark in words.PUNCTUATION:
        text = text.replace(mark, f" {mark} ".replace("\n", "|"))
    return text.split()


def looked_up(text: str) -> dict[str, str]:
    """By person, the word two places before: a month or season, a number, or the person they are something to."""
    found = tokens(text)
    return {word: found[i - 2] for i, word in enumerate(found) if word in words.PEOPLE}


def solve_calendar(row: dict[str, str]) -> str:
    """By leafing through the months one by one."""
    _, _, _, number, _, direction, person, _ = tokens(row["question"])
    month = words.MONTHS.index(looked_up(row["passage"])[person])
    for _ in range(words.NUMBERS.index(number)):
        month = (month + {"after": 1, "before": -1}[direction]) % 12
    return words.MONTHS[month]


def solve_count(row: dict[str, str]) -> str:
    question = tokens(row["question"])
    first, second = (words.NUMBERS.index(looked_up(row["passage"])[word]) for word in question if word in words.PEOPLE)
    return words.NUMBERS[first - second if "more" in question else first + second]


def solve_compare(row: dict[str, str]) -> str:
    _, *people, _ = tokens(row["question"])
    first, second = (words.NUMBERS.index(looked_up(row["passage"])[person]) for person in people[::2])
    holds = {"above": first > second, "below": first < second}
    assert first != second
    return "Yes" if holds[people[1]] else "No"


def solve_relation(row: dict[str, str]) -> str:
    """By trying every month in which it may have been."""
    _, person, order, limit, _ = tokens(row["question"])
    came, limits = months(looked_up(row["passage"])[person]), months(limit)
    holds = {"before": lambda m: m < min(limits), "after": lambda m: m > max(limits), "in": lambda m: m in limits}
    true = {holds[order](month) for month in came}
    return "Maybe" if len(true) == 2 else "Yes" if true.pop() else "No"


def months(time: str) -> set[int]:
    if time in words.SEASONS:
        season = words.SEASONS.index(time)
        return {3 * season, 3 * season + 1, 3 * season + 2}
    return {words.MONTHS.index(time)}


def solve_kin(row: dict[str, str]) -> str:
    stated = {}
    for fact in row["passage"].removesuffix(".").split(". "):
        _, relation, _, whose, _, who = fact.split()
        stated[who] = (relation, whose)
    _, _, outer, _, inner, _ = tokens(row["question"])
    first, middle = stated[outer]
    second, last = stated[middle]
    assert last == inner
    return COMPOSED[first, second]


def solve_span(row: dict[str, str]) -> str:
    first, family = tokens(row["passage"])[3:5]
    (asked,) = {"carry", "wear"} & set(tokens(row["question"]))
    return facts()[asked][words.FIRST_NAMES.index(first)][words.FAMILY_NAMES.index(family)]


SOLVERS = {
    "calendar": solve_calendar,
    "count": solve_count,
    "kin": solve_kin,
    "compare": solve_compare,
    "relation": solve_relation,
    "span": solve_span,
}
LABELLED = ("search", "dev", "test")


@pytest.mark.parametrize("task", TASKS)
def test_answers_follow_from_the_text(task: str) -> None:
    rows = [row for split in LABELLED for row in shipped(task, split)]
    assert [row["answer"] for row in rows] == [SOLVERS[task](row) for row in rows]
    unlabelled = shipped(task, "calibration")
    assert {frozenset(row) for row in unlabelled} == {frozenset(rows[0]) - {"answer"}}
    assert all(SOLVERS[task](row) for row in unlabelled[::10]), "they have answers all the same"
    # No answer is much more frequent than chance.
    answers = Counter(row["answer"] for row in shipped(task, "test"))
    if task in CHOICES:
        assert set(answers) == set(CHOICES[task])
        assert max(answers.values()) < 1.15 * answers.total() / len(CHOICES[task])
    else:
        assert len(answers) >= 12 and max(answers.values()) < 0.12 * answers.total()


def test_regenerating_gives_the_shipped_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first twentieth of them: rows of a split are drawn one after the other."""
    monkeypatch.setattr("demo.files.SPLIT_SIZES", {split: size // 20 for split, size in SPLIT_SIZES.items()})
    written = write_demo_tasks(tmp_path)
    assert len(written) == len(TASKS) * len(SPLIT_SIZES)
    for path in written:
        found = path.read_bytes()
        assert found.count(b"\n") == SPLIT_SIZES[path.stem] // 20
        assert (DEMO / "data" / path.relative_to(tmp_path)).read_bytes().startswith(found), path
    first = list(islice(generate("relation", "train", 3), 20))
    assert first != list(islice(generate("relation", "train", 4), 20))


@pytest.mark.parametrize("task", TASKS)
def test_splits_have_their_sizes_and_share_no_prompt(task: str) -> None:
    prompts = {split: [render(row) for row in shipped(task, split)] for split in SPLIT_SIZES}
    assert {split: len(some) for split, some in prompts.items()} == SPLIT_SIZES
    assert all(split_of(task, prompt) == split for split, some in prompts.items() for prompt in some)
    assert len({prompt for some in prompts.values() for prompt in some}) == sum(SPLIT_SIZES.values())
    training = [render(row) for row in islice(generate(task, "train", 5), 100)]
    assert {split_of(task, prompt) for prompt in training} == {"train"}


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
