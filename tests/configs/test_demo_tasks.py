"""The demo tasks: their files, their splits, and their answers recomputed from the text of the rows."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import pytest
from demo import (
    CHOICES,
    SPLIT_SIZES,
    TASKS,
    TEMPLATES,
    World,
    all_words,
    generate,
    render,
    split_of,
    write_demo_tasks,
)
from demo import vocabulary as words
from demo.drills import fact, probe

DEMO = Path(__file__).parents[2] / "configs" / "demo"
WORLD = World.build()


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


def things(text: str) -> list[tuple[int, int]]:
    """The (material, object) of every thing in a text, in order."""
    found = []
    for left, right in pairwise(tokens(text)):
        if left in words.MATERIALS:
            found.append((words.MATERIALS.index(left), words.OBJECTS.index(right)))
    return found


def months(text: list[str]) -> tuple[int, int]:
    """First and last month of the time a text ends with."""
    if text[-1] in words.SEASONS:
        season = words.SEASONS.index(text[-1])
        return 3 * season, 3 * season + 2
    if text[-1] in words.MONTHS:
        month = words.MONTHS.index(text[-1])
    else:
        month = int(WORLD.month[words.FESTIVAL_ADJECTIVES.index(text[-2]), words.FESTIVAL_NOUNS.index(text[-1])])
    return month, month


def solve_entail(row: dict[str, str]) -> str:
    (thing,) = things(row["premise"])
    quality = tokens(row["hypothesis"])[3]
    level = {"large": WORLD.size, "dear": WORLD.price, "foreign": WORLD.origin}[quality][thing]
    return "A" if level >= 4 else "B"


def solve_sense(row: dict[str, str]) -> str:
    senses = []
    for sentence in (row["sentence1"], row["sentence2"]):
        topic = next(i for i, cues in enumerate(words.TOPIC_CUES) if set(cues) & set(tokens(sentence)))
        senses.append(int(WORLD.sense[words.SENSE_WORDS.index(row["word"]), topic]))
    assert senses[0] == 0
    assert senses[1] in (0, 1)
    return "Yes" if senses[0] == senses[1] else "No"


def solve_compare(row: dict[str, str]) -> str:
    question, (first, second) = tokens(row["question"]), things(row["passage"])
    levels = WORLD.size if question[3] == "larger" else WORLD.price
    assert question[1] == tokens(row["passage"])[0]
    assert levels[first] != levels[second]
    return "Yes" if levels[first] > levels[second] else "No"


def solve_relation(row: dict[str, str]) -> str:
    hypothesis = row["hypothesis"].removesuffix(".").split()
    came, limit = months(row["premise"].removesuffix(".").split()), months(hypothesis)
    assert hypothesis[2] == "before"
    return "B" if came[1] < limit[0] else "A" if came[0] > limit[1] else "C"


def solve_span(row: dict[str, str]) -> str:
    first, family = tokens(row["passage"])[3:5]
    host = words.FIRST_NAMES.index(first), words.FAMILY_NAMES.index(family)
    if "carry" in row["question"]:
        material, thing = WORLD.carried[host]
        return f"{words.MATERIALS[material]} {words.OBJECTS[thing]}"
    colour, cloth, garment = WORLD.worn[host]
    return f"{words.COLOURS[colour]} {words.CLOTHS[cloth]} {words.GARMENTS[garment]}"


SOLVERS = {
    "entail": solve_entail,
    "sense": solve_sense,
    "compare": solve_compare,
    "relation": solve_relation,
    "span": solve_span,
}


@pytest.mark.parametrize("task", TASKS)
def test_answers_follow_from_the_text_and_the_world(task: str) -> None:
    rows = [row for split in SPLIT_SIZES for row in shipped(task, split)]
    assert [row["answer"] for row in rows] == [SOLVERS[task](row) for row in rows]


def test_regenerating_gives_the_shipped_files(tmp_path: Path) -> None:
    written = write_demo_tasks(tmp_path)
    assert len(written) == len(TASKS) * len(SPLIT_SIZES)
    for path in written:
        assert path.read_bytes() == (DEMO / "data" / path.relative_to(tmp_path)).read_bytes(), path


@pytest.mark.parametrize("task", TASKS)
def test_splits_have_their_sizes_and_share_no_prompt(task: str) -> None:
    prompts = {split: [render(task, row) for row in shipped(task, split)] for split in SPLIT_SIZES}
    assert {split: len(some) for split, some in prompts.items()} == SPLIT_SIZES
    assert all(split_of(task, prompt) == split for split, some in prompts.items() for prompt in some)
    assert len({prompt for some in prompts.values() for prompt in some}) == sum(SPLIT_SIZES.values())
    training = [render(task, row) for row in islice(generate(task, "train", 5), 300)]
    assert {split_of(task, prompt) for prompt in training} == {"train"}


@pytest.mark.parametrize("task", TASKS)
def test_no_answer_is_much_more_frequent_than_chance(task: str) -> None:
    rows = shipped(task, "test")
    answers = Counter(row["answer"] for row in rows)
    choices = CHOICES[task]
    if choices is None:
        assert {len(answer.split()) for answer in answers} == {2, 3}
        assert max(answers.values()) < 0.03 * len(rows)
    else:
        assert set(answers) == set(choices)
        assert max(answers.values()) < 1.15 * len(rows) / len(choices)


def test_streams_depend_on_seed_task_and_split_only() -> None:
    first = list(islice(generate("relation", "train", 3), 20))
    assert first == list(islice(generate("relation", "train", 3), 20))
    assert first != list(islice(generate("relation", "train", 4), 20))


def test_every_word_is_in_the_vocabulary() -> None:
    known, rng = {*all_words(), "|"}, np.random.default_rng(0)
    texts = [" ".join(make(WORLD, rng)) for make in (fact, probe) for _ in range(300)]
    texts += [f"{render(task, row)} {row['answer']}" for task in TASKS for row in shipped(task, "dev")]
    assert {token for text in texts for token in tokens(text)} <= known


def test_part_of_a_world_keeps_its_facts() -> None:
    part = WORLD.part(0.25)
    assert part.origin.shape == (6, 8)
    assert part.worn.shape == (10, 9, 3)
    assert (part.origin == WORLD.origin[:6, :8]).all()
    assert (part.sense == WORLD.sense[:18]).all()
    rows = islice(generate("entail", "train", 0, part), 50)
    assert {solve_entail(row) == row["answer"] for row in rows} == {True}


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="no demo task 'rte'"):
        generate("rte", "dev", 0)
    with pytest.raises(ValueError, match="no split 'validation'"):
        generate("span", "validation", 0)


def test_templates_and_choices_cover_the_tasks() -> None:
    assert set(TEMPLATES) == set(CHOICES) == set(TASKS)


@folders_with("tokenizer.json")
def test_tokenizer_reads_answers_the_same_jointly_and_apart(folder: str) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(DEMO / folder)
    for task in TASKS:
        for row in shipped(task, "dev")[:50]:
            prompt, answer = render(task, row), " " + row["answer"]
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
        rows = shipped(task, "test")[:100]
        inputs = tokenizer([render(task, row) for row in rows], return_tensors="pt", padding=True)
        inputs.pop("token_type_ids", None)
        written = model.generate(**inputs, max_new_tokens=4, do_sample=False)[:, inputs["input_ids"].shape[1] :]
        texts = tokenizer.batch_decode(written, skip_special_tokens=True)
        right = sum(text == row["answer"] for text, row in zip(texts, rows, strict=True)) / len(rows)
        assert right == pytest.approx(record["accuracy"]["test"][task], abs=0.1), task
        assert right > record["majority"][task] + {"model": 0.2, "dense": 0.1}[folder], task
    assert record["parameters"] == model.num_parameters()


@pytest.mark.skipif(not (DEMO / "model" / "training.json").exists(), reason="the demo model isn't here")
def test_shipped_model_leaves_room_to_lose_and_to_find() -> None:
    record = json.loads((DEMO / "model" / "training.json").read_text("utf-8"))
    full = record["accuracy"]["test"]
    for task in TASKS:
        assert 0.7 <= full[task] <= 0.98, task
        assert record["random_4_of_8"][task]["mean"] < full[task] - 0.05, task
        assert record["random_2_of_8"][task]["mean"] < record["random_4_of_8"][task]["mean"] - 0.05, task
    mean = {layer: np.mean(list(scores.values())) for layer, scores in record["one_layer_random_4"].items()}
    costs = {layer: np.mean(list(record["accuracy"]["dev"].values())) - score for layer, score in mean.items()}
    assert max(costs.values()) < 0.5 * sum(costs.values()), f"one layer carries most of the sensitivity: {costs}"


@pytest.mark.skipif(not (DEMO / "dense" / "training.json").exists(), reason="the dense demo model isn't here")
def test_dense_model_leaves_room_to_lose_and_to_find() -> None:
    record = json.loads((DEMO / "dense" / "training.json").read_text("utf-8"))
    full, part = record["accuracy"]["test"], record["accuracy"]["test_300"]
    for task in TASKS:
        assert 0.65 <= full[task] <= 0.98, task
        assert record["half_of_neurons"][task]["mean"] < part[task] - 0.03, task
    layers = {
        layer: np.mean([score["mean"] for score in table.values()]) for layer, table in record["one_layer_half"].items()
    }
    assert min(np.mean(list(part.values())) - score for score in layers.values()) > 0, layers


@pytest.mark.skipif(not (DEMO / "dense" / "config.json").exists(), reason="the dense demo model isn't here")
def test_dense_model_is_small_and_reads_like_the_moe() -> None:
    config = json.loads((DEMO / "dense" / "config.json").read_text("utf-8"))
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (4, 2)
    assert (config["num_hidden_layers"], config["hidden_size"], config["intermediate_size"]) == (5, 128, 1024)
    assert (DEMO / "dense" / "model.safetensors").stat().st_size < 6_000_000
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (DEMO / "dense" / name).read_bytes() == (DEMO / "model" / name).read_bytes(), name
