"""Rotary embeddings that depend on a text's length: scores are those of `transformers` for each text alone."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from families import DENSE, random_model, representatives
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import word_tokenizer, words

from moevolve.evaluators.types import Example, Matching, PreparedSplit
from moevolve.workers.contract.edits import IdentityEdit
from moevolve.workers.contract.messages import EvaluationRequest
from moevolve.workers.contract.settings import EngineConfig, ModelConfig, Shortcuts
from moevolve.workers.engine.engine import GenerationEngine
from moevolve.workers.families.decoder import decoder_of
from moevolve.workers.families.registry import FAMILIES
from moevolve.workers.families.rotary import separate_texts, unscaled
from moevolve.workers.model.resident import ResidentModel
from moevolve.workers.worker import EvaluationWorker

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

BOS, TRAINED = 1, 16
WAVES = [1.0, 2.0, 4.0, 8.0]
LONG = {"short_factor": [1.0] * 4, "long_factor": WAVES, "original_max_position_embeddings": TRAINED}
ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": TRAINED},
    "llama3": {
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": TRAINED,
    },
    "longrope": {"factor": 4.0, **LONG},
}
"""All kinds that `transformers` has for whole heads of 8 dimensions."""
MIXED = {
    "full_attention": {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0},
    "sliding_attention": {"rope_type": "longrope", "rope_theta": 100.0, "factor": 4.0, **LONG},
}
"""Layers of two kinds, whose frequencies change at the same length and then differently."""


def rope(kind: str, **more: Any) -> dict[str, Any]:
    positions = TRAINED if kind in ("linear", "dynamic") else 4 * TRAINED
    parameters = {"rope_type": kind, "rope_theta": 100.0, **ROPES[kind], **more}
    return {"rope_parameters": parameters, "max_position_embeddings": positions, "head_dim": 8}


# Packed with fused and plain attention, with latent attention and sinks, padded, and with kinds of layers.
ROPED: dict[str, tuple[str, str, dict[str, Any]]] = {
    **{f"mixtral {kind}": ("mixtral", "sdpa", rope(kind)) for kind in ROPES},
    "mixtral dynamic, plain": ("mixtral", "eager", rope("dynamic")),
    "llama longrope, plain": ("llama", "eager", rope("longrope")),
    "mixtral dynamic, window": ("mixtral", "sdpa", {**rope("dynamic"), "sliding_window": 6}),
    "phimoe longrope": ("phimoe", "sdpa", rope("longrope", short_mscale=1.2, long_mscale=1.4)),
    "deepseek_v3 dynamic": ("deepseek_v3", "sdpa", {**rope("dynamic"), "head_dim": 4}),
    "gpt_oss dynamic": ("gpt_oss", "eager", rope("dynamic")),
    "qwen3_next dynamic": ("qwen3_next", "sdpa", rope("dynamic", partial_rotary_factor=1.0)),
    "mellum mixed": ("mellum", "sdpa", {"rope_parameters": MIXED, "max_position_embeddings": TRAINED}),
    "phi3 longrope": ("phi3", "sdpa", rope("longrope", partial_rotary_factor=1.0)),
}
DENSE_MODELS = {
    f"{each} dense": (each, "sdpa" if FAMILIES[each].sdpa else "eager", {}) for each in {*DENSE} & {*FAMILIES}
}
MODELS = ROPED | DENSE_MODELS


def fresh(name: str) -> Any:
    family, attention, more = MODELS[name]
    model = random_model(family, 11, **more)
    model.set_attn_implementation(attention)
    model.generation_config.eos_token_id = [2]
    return model


class Alone:
    """What `transformers` gives for texts that a model runs as its first."""

    def __init__(self, name: str) -> None:
        self._model = fresh(name)
        self._decoder = decoder_of(self._model)
        self._rotary = deepcopy(getattr(self._decoder, "rotary_emb", None))
        self.logits = cache(self._logits)

    @torch.no_grad()
    def _logits(self, text: tuple[int, ...]) -> torch.Tensor:
        if self._rotary is not None:
            self._decoder.rotary_emb = deepcopy(self._rotary)  # it changes while a model runs
        logits: torch.Tensor = self._model(torch.tensor([text]), use_cache=False).logits[0]
        return logits.double().log_softmax(-1)

    def mean(self, text: tuple[int, ...], last: int) -> float:
        """Mean log-probability of a text's last tokens."""
        rows, ids = self.logits(text)[-last - 1 : -1], torch.tensor(text[-last:])
        return float(rows.gather(1, ids[:, None]).mean())

    def greedy(self, text: tuple[int, ...], most: int) -> list[int]:
        answer: list[int] = []
        while len(answer) < most and (token := int(self.logits((*text, *answer))[-1].argmax())) != 2:
            answer.append(token)
        return answer


@pytest.fixture(scope="module")
def alone() -> Callable[[str], Alone]:
    return cache(Alone)


@pytest.fixture(scope="module")
def ours() -> Callable[[str], Any]:
    return cache(fresh)


def split_of(lengths: list[int], seed: int = 3) -> PreparedSplit:
    """Prompts of so many tokens, the odd ones beginning like the one before, with answers and choices of 1 to 3."""
    rng = np.random.default_rng(seed)
    prompts: list[list[int]] = []
    for i, length in enumerate(lengths):
        own = rng.integers(4, 60, size=length - 1).tolist()
        same = prompts[-1] if i % 2 else []
        prompts.append([*same, *own[len(same) :]][: length - 1])
    examples = tuple(
        Example(words(p), (words(rng.integers(60, 90, size=1 + i % 3).tolist()),), ("w30", "w31 w32", "w33 w34 w35"))
        for i, p in enumerate(prompts)
    )
    return PreparedSplit("words", "search", "generate", "accuracy", Matching(), 3, " ", examples)


def check(engine: GenerationEngine, split: PreparedSplit, expected: Alone) -> None:
    tokens = engine.tokens_of(split)
    golds = list(zip(tokens.prompts, tokens.golds, strict=True))
    texts = [expected.mean((*p, *g), len(p) + len(g) - 1) for p, g in golds]
    np.testing.assert_allclose(engine.text_logprobs(split), texts, rtol=1e-4)
    pairs = zip(tokens.prompts, tokens.choices, strict=True)
    ranks = [[expected.mean((*prompt, *each), len(each)) for each in choices] for prompt, choices in pairs]
    np.testing.assert_allclose(np.stack(engine.rank(split)), ranks, rtol=1e-4)
    made = engine.generate(split, lambda _, text: False)
    np.testing.assert_allclose(made.gold_logprobs, [expected.mean((*p, *g), len(g)) for p, g in golds], rtol=1e-4)
    assert list(made.texts) == [words(expected.greedy(p, split.max_new_tokens)) for p in tokens.prompts]


@pytest.mark.parametrize("name", representatives([*ROPED, "gemma2 dense", "cohere2 dense"], MODELS))
def test_scores_are_those_of_every_text_alone(
    name: str, alone: Callable[[str], Alone], ours: Callable[[str], Any], tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    # Long texts before and after short ones, at the limit, and over it with the answer's first or last tokens.
    split = split_of([30, 5, 15, 14, 16, 17, 40, 13, 5, 24])
    engine = GenerationEngine(ours(name), tiny_tokenizer, EngineConfig())
    layout = "padded" if name.startswith(("qwen3_next", "qwen3_5")) else "packed"
    assert engine.forward.batcher.layout == layout
    depends = name.split()[1].strip(",") in ("dynamic", "longrope", "mixed")
    assert (engine.forward.batcher.scale is not unscaled) == depends
    check(engine, split, alone(name))


@pytest.mark.parametrize("name", representatives(["mixtral dynamic", "phimoe longrope", "gemma2 dense"], DENSE_MODELS))
@settings(max_examples=4, deadline=None)
@given(st.lists(st.integers(2, 36), min_size=1, max_size=6), st.integers(20, 200), st.booleans())
def test_company_batches_and_shortcuts_change_nothing(
    name: str,
    alone: Callable[[str], Alone],
    ours: Callable[[str], Any],
    tiny_tokenizer: PreTrainedTokenizerFast,
    lengths: list[int],
    batch_tokens: int,
    shortcuts: bool,
) -> None:
    config, on = EngineConfig(batch_tokens=batch_tokens), Shortcuts(draft=shortcuts, prefixes=shortcuts)
    check(GenerationEngine(ours(name), tiny_tokenizer, config, on), split_of(lengths), alone(name))


@pytest.mark.parametrize("name", ["mixtral dynamic", "phimoe longrope", "qwen3_next dynamic"])
def test_calibrations_run_texts_as_if_they_were_alone(
    name: str, alone: Callable[[str], Alone], tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    resident = ResidentModel(fresh(name), tiny_tokenizer, ModelConfig("none", device="cpu"))
    rng = np.random.default_rng(5)
    texts = [(BOS, *rng.integers(4, 60, size=size).tolist()) for size in (4, 30, 9, 22)]
    seen: list[torch.Tensor] = []
    decoder = decoder_of(resident.model)
    handle = decoder.register_forward_hook(lambda *call: seen.append(call[-1].last_hidden_state[0]))
    with torch.inference_mode():
        resident.run(resident.rows(texts))
        found = resident.model.lm_head(torch.cat(seen)).double().log_softmax(-1)
    handle.remove()
    expected = torch.cat([alone(name).logits(text) for text in texts])
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["mixtral dynamic", "phimoe longrope"])
def test_scores_are_the_same_one_layer_at_a_time(name: str, tmp_path: Path) -> None:
    fresh(name).save_pretrained(tmp_path)
    word_tokenizer([f"w{i}" for i in range(4, 97)]).save_pretrained(tmp_path)
    config = ModelConfig(str(tmp_path), device="cpu", dtype="float32")
    whole, parts = (
        EvaluationWorker(each, EngineConfig(batch_tokens=60))
        for each in (config, replace(config, expert_offload="disk"))
    )
    asked = split_of([30, 5, 14, 17, 5])
    asked = replace(asked, examples=tuple(replace(each, references=each.choices[1:]) for each in asked.examples))
    kinds = {"generate": "accuracy", "rank": "accuracy", "perplexity": "inverse_perplexity"}
    splits = tuple(replace(asked, fitness=kind, metric=metric) for kind, metric in kinds.items())
    request = EvaluationRequest(IdentityEdit(), tuple(split.ref for split in splits))
    one, other = (worker.evaluate(request, splits) for worker in (whole, parts))
    assert one.failure is None and parts.resident.one_layer_at_a_time
    for split in splits:
        found, expected = (reply.results[split.fingerprint] for reply in (other, one))
        assert found.gold_logprob == expected.gold_logprob
        np.testing.assert_array_equal(found.outcomes, expected.outcomes)


def test_what_longer_texts_left_behind_is_forgotten(ours: Callable[[str], Any]) -> None:
    """`transformers` keeps the frequencies of dynamic NTK's longest text, also for texts at the limit."""
    model = ours("mixtral dynamic")
    separate_texts(model)
    rotary, states = model.model.rotary_emb, torch.zeros(1, 1, 8)
    positions = torch.arange(TRAINED)[None]
    before = rotary(states, positions)[0]
    rotary(states, position_ids=torch.arange(3 * TRAINED)[None])
    assert torch.equal(rotary(states, positions)[0], before)
