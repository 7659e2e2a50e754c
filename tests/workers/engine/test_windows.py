"""Running text in windows: perplexity per token against plain `transformers` in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.fitness.scoring import run_split
from moevolve.evaluators.types import Example, Matching, PreparedSplit
from moevolve.workers.contract.settings import EngineConfig
from moevolve.workers.engine.engine import GenerationEngine
from moevolve.workers.engine.measuring import token_sequences

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

MakeModel = Callable[..., "PreTrainedModel"]
BOS, WINDOW = 1, 16


def words(rng: np.random.Generator, count: int) -> str:
    return " ".join(f"w{token}" for token in rng.integers(4, 97, size=count))


@pytest.fixture
def split() -> PreparedSplit:
    """Rows of 0 to 20 tokens, every third with an answer: 9 windows and a remainder."""
    rng = np.random.default_rng(3)
    examples = [
        Example(words(rng, int(rng.integers(0, 21))), (words(rng, 2),) if i % 3 == 1 else ()) for i in range(16)
    ]
    return PreparedSplit(
        "running",
        "test",
        "perplexity",
        "geometric_mean",
        Matching(),
        4,
        " ",
        tuple(examples),
        chat=False,
        window=WINDOW,
    )


@pytest.fixture
def engine(tiny_model: MakeModel, tiny_tokenizer: PreTrainedTokenizerFast) -> GenerationEngine:
    return GenerationEngine(
        tiny_model("llama", max_position_embeddings=256), tiny_tokenizer, EngineConfig(batch_tokens=100)
    )


def all_tokens(tokenizer: PreTrainedTokenizerFast, split: PreparedSplit) -> list[int]:
    text = "\n\n".join(" ".join((each.prompt, *each.references)) for each in split.examples)
    return [BOS, *(token for token in tokenizer(text)["input_ids"] if token != BOS)]


def test_the_score_is_one_over_the_perplexity_per_token(
    tiny_model: MakeModel, tiny_tokenizer: PreTrainedTokenizerFast, split: PreparedSplit
) -> None:
    model, tokens = tiny_model("opt"), all_tokens(tiny_tokenizer, split)
    assert len(tokens) % WINDOW and len(tokens) > 5 * WINDOW
    losses = []
    for start in range(0, len(tokens) - WINDOW + 1, WINDOW):
        ids = torch.tensor([tokens[start : start + WINDOW]])
        with torch.no_grad():
            logs = model(ids).logits[0, :-1].double().log_softmax(dim=-1)
        losses += (-logs[torch.arange(WINDOW - 1), ids[0, 1:]]).tolist()
    perplexity = math.exp(sum(losses) / len(losses))
    result = run_split(GenerationEngine(model, tiny_tokenizer, EngineConfig(batch_tokens=50)), split)
    assert 1 / result.score == pytest.approx(perplexity, rel=1e-5)
    assert result.examples_seen == len(tokens) // WINDOW == len(losses) // (WINDOW - 1)
    assert result.gold_logprob == pytest.approx(-math.log(perplexity), rel=1e-5)
    rows = run_split(
        GenerationEngine(model, tiny_tokenizer, EngineConfig()),
        replace(split, window=None, examples=tuple(each for each in split.examples if each.prompt)),
    )
    assert abs(rows.score - result.score) > 1e-4 * result.score, "rows that weigh alike give another number"


def test_windows_are_the_text_without_its_rest(
    engine: GenerationEngine, tiny_tokenizer: PreTrainedTokenizerFast, split: PreparedSplit
) -> None:
    tokens = all_tokens(tiny_tokenizer, split)
    windows = engine.tokens_of(split).prompts
    assert {len(window) for window in windows} == {WINDOW}
    assert [token for window in windows for token in window] == tokens[: len(tokens) // WINDOW * WINDOW]
    assert [window.count(BOS) for window in windows] == [1] + [0] * (len(windows) - 1)
    exact = replace(split, window=len(tokens))
    assert engine.tokens_of(exact).prompts == (tuple(tokens),)
    # Methods measure on windows, too.
    assert token_sequences(engine, [split], 3 * WINDOW) == list(windows[:3])


def test_predictions_on_windows_are_compared_with_the_full_models(
    engine: GenerationEngine, split: PreparedSplit
) -> None:
    for fitness in ("kl", "agreement"):
        compared = replace(split, fitness=fitness, positions="text")
        engine.remember(compared)
        result = run_split(engine, compared)
        assert result.score == pytest.approx(1) and result.examples_seen == len(engine.tokens_of(split).prompts)


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_windows_beyond_the_context_are_refused(
    family: str, tiny_model: MakeModel, tiny_tokenizer: PreTrainedTokenizerFast, split: PreparedSplit
) -> None:
    engine = GenerationEngine(tiny_model(family, max_position_embeddings=15), tiny_tokenizer, EngineConfig())
    expected = (
        "windows of 16 tokens are longer than the model's context of 15 positions; give the task a `window` of 15"
    )
    with pytest.raises(UserError, match=expected):
        engine.text_logprobs(split)
    engine.text_logprobs(replace(split, window=15))
