"""Numbers of tokens that are counted without a model, against a tokenizer with one token per word."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest
from tiny_models import MIXTRAL, save_tiny_model
from tiny_models import WORDS as VOCABULARY

from moevolve.evaluators.preparation.prepare import prepare_split
from moevolve.evaluators.preparation.registry import load_task
from moevolve.evaluators.types import PreparedSplit
from moevolve.workers.contract.settings import EngineConfig, ModelConfig
from moevolve.workers.profiling.prompts import PromptMeter

WORDS = ("red", "the cat", "is a dog", "blue bird")
ROWS = [("which " * (1 + 5 * i % 4) + WORDS[i % 4], WORDS[i % 4]) for i in range(23)]
NEW_TOKENS = 5


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], PreparedSplit]:
    """A task with choices of one and of several tokens, under any fitness."""
    folder = tmp_path_factory.mktemp("tasks")
    lines = "".join(json.dumps({"text": text, "label": label}) + "\n" for text, label in ROWS)
    (folder / "words.jsonl").write_text(lines)
    settings = ["source: {files: {all: words.jsonl}}", "splits: {search: {from: all}}", 'prompt: "{{ text }} Answer :"']
    settings += ['answer: "{{ label }}"', f"choices: {json.dumps(WORDS)}", f"max_new_tokens: {NEW_TOKENS}"]
    (folder / "words.yaml").write_text("\n".join([*settings, "matching: {kind: exact}"]))
    return lambda fitness: prepare_split(load_task(f"{folder}/words.yaml").with_fitness(fitness), "search")  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def meter(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., PromptMeter]:
    folder = tmp_path_factory.mktemp("model")
    save_tiny_model(folder, "mixtral", VOCABULARY, seed=11, num_hidden_layers=1, **MIXTRAL)
    return lambda **engine: PromptMeter(ModelConfig(str(folder), device="cpu"), EngineConfig(**engine))


@pytest.mark.parametrize("fitness", ["rank", "generate", "perplexity"])
def test_prompts_are_counted_with_their_answers(
    meter: Callable[..., PromptMeter], task: Callable[[str], PreparedSplit], fitness: str
) -> None:
    counts = meter().counts(task(fitness))
    # Each begins with a token of its own and ends with "Answer :".
    pairs = [(1 + len(text.split()) + 2, len(label.split())) for text, label in ROWS]
    assert (counts.prompts, counts.tokens, counts.cut) == (len(ROWS), sum(map(sum, pairs)), 0)
    # A prompt is run with every choice, or with as many tokens as may be generated.
    other = {"rank": 3, "generate": NEW_TOKENS, "perplexity": 0}[fitness]
    assert counts.longest == max(prompt + max(answer, other) for prompt, answer in pairs)


def test_windows_of_running_text_have_no_answers(
    meter: Callable[..., PromptMeter], task: Callable[[str], PreparedSplit]
) -> None:
    counts = meter().counts(replace(task("perplexity"), window=13))
    assert counts.longest == 13 and counts.tokens == 13 * counts.prompts


def test_cut_prompts_are_counted(meter: Callable[..., PromptMeter], task: Callable[[str], PreparedSplit]) -> None:
    split = task("rank")
    first = replace(split.examples[0], prompt="which " * 100 + split.examples[0].prompt)
    assert meter().counts(replace(split, examples=(first, *split.examples[1:]))).cut == 1
