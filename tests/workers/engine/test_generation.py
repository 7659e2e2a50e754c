"""The engine against `generate` and plain forward passes of `transformers`, one unpadded prompt at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import takewhile
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from tiny_models import words

from moevolve.evaluators.errors import CandidateError
from moevolve.evaluators.matching.registry import make_matcher
from moevolve.evaluators.types import Example, Matching, PreparedSplit
from moevolve.workers.contract.settings import EngineConfig, Shortcuts
from moevolve.workers.engine.engine import GenerationEngine

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

MakeModel = Callable[..., "PreTrainedModel"]
NEW = 5
BOS = 1
ENDS = [2, *range(60, 76)]
"""Many end tokens, so that random models do end their answers."""
VARIANTS = {
    "mixtral": {},
    "mixtral-window": {"sliding_window": 6},
    "deepseek_v3": {},
    "gpt_oss": {},
}
"""Attention of every kind that packs; what else families do in their layers is compared in their own tests."""


def never(_: int, __: str) -> bool:
    return False


def prompts_of(count: int = 8) -> list[list[int]]:
    """Prompts of 2 to 19 tokens; of every four, one shares a prefix with the previous one and one is its prefix."""
    rng = np.random.default_rng(5)
    prompts = [rng.integers(4, 60, size=int(rng.integers(2, 20))).tolist() for _ in range(count)]
    for i in range(0, count - 2, 4):
        half = 1 + len(prompts[i]) // 2
        prompts[i + 1], prompts[i + 2] = [*prompts[i][:half], *prompts[i + 1]][:19], prompts[i][:half]
    return prompts


def greedy(model: PreTrainedModel, prompt: list[int], limit: int = NEW) -> list[int]:
    """Greedy answer tokens from `generate`, without end token."""
    ids = torch.tensor([[BOS, *prompt]])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=limit, pad_token_id=0
    )
    answer = out[0, ids.shape[1] :].tolist()
    return answer[:-1] if answer[-1] in ENDS else answer


@torch.no_grad()
def mean_logprob(model: PreTrainedModel, prompt: list[int], answer: list[int]) -> float:
    logits = model(torch.tensor([[BOS, *prompt, *answer]])).logits[0].float().log_softmax(-1)
    return float(np.mean([logits[len(prompt) + j, token] for j, token in enumerate(answer)]))


def golds_of(answers: list[list[int]]) -> list[list[int]]:
    """Gold answers that greedy decoding follows to the end, follows for a while, or never starts."""
    golds = []
    for i, answer in enumerate(answers):
        right = list(takewhile(lambda token: token > 3, answer)) or [4]
        golds.append([right, [*right[:2], 50, 51, 52], [55, 56, 57], right[:1]][i % 4])
    return golds


def split_of(prompts: list[list[int]], golds: list[list[int]], limit: int = NEW) -> PreparedSplit:
    choices = ("w30", "w31 w32", "w33 w34 w35", "w36")
    examples = tuple(
        Example(words(prompt), (words(gold),), choices[: 1 + i % 4])
        for i, (prompt, gold) in enumerate(zip(prompts, golds, strict=True))
    )
    return PreparedSplit("words", "search", "generate", "accuracy", Matching(), limit, " ", examples)


class Case:
    """A model and a split, with the results of `transformers`."""

    def __init__(self, make: MakeModel, tokenizer: PreTrainedTokenizerFast, variant: str) -> None:
        self.model = make(variant.split("-", maxsplit=1)[0], **VARIANTS[variant])
        self.model.generation_config.eos_token_id = ENDS
        self.tokenizer = tokenizer
        self.prompts = prompts_of()
        self.answers = [greedy(self.model, prompt) for prompt in self.prompts]
        self.golds = golds_of(self.answers)
        self.split = split_of(self.prompts, self.golds)
        lengths = {len(answer) for answer in self.answers}
        assert NEW in lengths and min(lengths) < NEW, "stopped by length and by an end token"
        followed = [gold == answer for gold, answer in zip(self.golds, self.answers, strict=True)]
        assert any(followed) and not all(followed)
        self.logprobs = [mean_logprob(self.model, p, g) for p, g in zip(self.prompts, self.golds, strict=True)]
        choices = [[30], [31, 32], [33, 34, 35], [36]]
        self.ranks = [
            [mean_logprob(self.model, p, c) for c in choices[: 1 + i % 4]] for i, p in enumerate(self.prompts)
        ]

    def engine(self, batch_tokens: int = 4096, config: dict[str, int] | None = None, **on: bool) -> GenerationEngine:
        settings = EngineConfig(batch_tokens=batch_tokens, **(config or {}))
        return GenerationEngine(self.model, self.tokenizer, settings, Shortcuts(**on))

    def count_passes(self, run: Callable[[], object]) -> int:
        passes = 0

        def count(*_: object) -> None:
            nonlocal passes
            passes += 1

        handle = self.model.register_forward_pre_hook(count)
        run()
        handle.remove()
        return passes


@pytest.fixture(scope="module")
def cases(tiny_model: MakeModel, tiny_tokenizer: PreTrainedTokenizerFast) -> Callable[[str], Case]:
    return cache(lambda variant: Case(tiny_model, tiny_tokenizer, variant))


@pytest.fixture
def case(request: pytest.FixtureRequest, cases: Callable[[str], Case]) -> Case:
    return cases(request.param)


@pytest.fixture
def mixtral(cases: Callable[[str], Case]) -> Case:
    return cases("mixtral")


@pytest.fixture
def layout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Sets the layout of sequences; returns whether they share prefixes."""
    if request.param == "padded":
        monkeypatch.setattr("moevolve.workers.engine.forward.packs", lambda *_: False)
    return bool(request.param == "packed")


# Layouts, sizes of batches, and whether answers are drafted; the last ones are tried with every kind of attention.
WAYS = [
    ("packed", 1, False),
    ("unshared", 90, True),
    ("padded", 1, True),
    ("padded", 4096, False),
    ("packed", 90, True),
    ("padded", 90, True),
]


@pytest.mark.parametrize(
    ("case", "layout", "batch_tokens", "draft"),
    [(name, *way) for name in VARIANTS for way in (WAYS if name == "mixtral" else WAYS[-2:])],
    indirect=["case", "layout"],
)
def test_answers_and_gold_logprobs_are_those_of_single_unpadded_prompts(
    case: Case, batch_tokens: int, draft: bool, layout: bool
) -> None:
    got = case.engine(batch_tokens, draft=draft, prefixes=layout).generate(case.split, never)
    assert list(got.texts) == [words(answer) for answer in case.answers]
    assert got.gold_logprobs.dtype == np.float64
    np.testing.assert_allclose(got.gold_logprobs, case.logprobs, atol=1e-4)


@pytest.mark.parametrize(
    ("case", "layout", "batch_tokens"),
    [*((name, "packed", 90) for name in VARIANTS), ("mixtral", "unshared", 4096), ("mixtral", "padded", 1)],
    indirect=["case", "layout"],
)
def test_ranks_are_those_of_single_unpadded_prompts(case: Case, batch_tokens: int, layout: bool) -> None:
    got = case.engine(batch_tokens, prefixes=layout).rank(case.split)
    for values, expected in zip(got, case.ranks, strict=True):
        assert values.dtype == np.float64
        np.testing.assert_allclose(values, expected, atol=1e-4)


@pytest.mark.parametrize("kind", ["exact", "contains"])
def test_stopping_once_decided_changes_no_outcome(mixtral: Case, kind: str) -> None:
    matcher = make_matcher(Matching(kind))
    examples = mixtral.split.examples
    early = mixtral.engine().generate(mixtral.split, lambda i, text: matcher.decided(text, examples[i]))
    for cut, whole, example in zip(early.texts, map(words, mixtral.answers), examples, strict=True):
        assert matcher.match(cut, example) == matcher.match(whole, example)
        assert whole.startswith(cut)


def test_a_truncated_prompt_keeps_its_end(mixtral: Case) -> None:
    long = list(range(10, 40))
    split = split_of([long, [7, 8]], [[20, 21], [22]])
    got = mixtral.engine(config={"max_prompt_tokens": 12}).generate(split, never)
    kept = long[-11:]  # with the opening token, 12
    assert got.texts == (words(greedy(mixtral.model, kept)), words(greedy(mixtral.model, [7, 8])))
    np.testing.assert_allclose(got.gold_logprobs[0], mean_logprob(mixtral.model, kept, [20, 21]), atol=1e-4)


def test_an_answer_of_one_token_and_a_right_one_take_one_pass(mixtral: Case) -> None:
    split = split_of(mixtral.prompts, [[20, 21, 22]] * len(mixtral.prompts), limit=1)
    engine = mixtral.engine()
    assert mixtral.count_passes(lambda: engine.generate(split, never)) == 1
    ended = [i for i, answer in enumerate(mixtral.answers) if 0 < len(answer) < NEW]
    right = split_of([mixtral.prompts[i] for i in ended], [mixtral.answers[i] for i in ended])
    assert mixtral.count_passes(lambda: mixtral.engine().generate(right, never)) == 1
    assert mixtral.count_passes(lambda: mixtral.engine(draft=False).generate(right, never)) > 1
    longer = replace(split, max_new_tokens=NEW)
    assert mixtral.count_passes(lambda: engine.generate(longer, lambda _, text: bool(text))) == 1


def test_results_repeat_bit_for_bit_and_edits_made_after_construction_are_seen(mixtral: Case) -> None:
    engine = mixtral.engine(90)
    before = engine.generate(mixtral.split, never).gold_logprobs
    gate = mixtral.model.model.layers[0].mlp.gate.weight
    kept = gate.detach().clone()
    try:
        gate.data.neg_()
        changed = engine.generate(mixtral.split, never).gold_logprobs
    finally:
        gate.data.copy_(kept)
    assert not np.allclose(before, changed)
    assert np.array_equal(before, engine.generate(mixtral.split, never).gold_logprobs)


def test_non_finite_logits_are_the_candidates_fault(
    tiny_model: MakeModel, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    model = tiny_model()
    engine = GenerationEngine(model, tiny_tokenizer, EngineConfig())
    split = split_of([[5, 6], [7]], [[8], [9]])
    kept = model.model.layers[1].mlp.experts.down_proj.data.clone()
    model.model.layers[1].mlp.experts.down_proj.data.fill_(float("nan"))
    for run in (lambda: engine.generate(split, never), lambda: engine.rank(split)):
        with pytest.raises(CandidateError, match=r"non-finite logits at (\d) of \1 positions"):
            run()
    assert not model.model.layers[1].mlp._forward_hooks
    model.model.layers[1].mlp.experts.down_proj.data.copy_(kept)
    assert np.isfinite(engine.generate(split, never).gold_logprobs).all()


def test_passes_run_common_tokens_once(mixtral: Case) -> None:
    seen: dict[int, int] = {}
    handles = [
        layer.mlp.experts.register_forward_pre_hook(lambda _, args, i=i: seen.update({i: args[0].shape[0]}))
        for i, layer in enumerate(mixtral.model.model.layers)
    ]
    split = split_of([[5, 6, 7, 8], [9]], [[20], [21, 22]], limit=1)
    # Prompts of 5 and 2 tokens with their opening token; only the second gold answer needs a token fed.
    for share, tokens in ((True, 7), (False, 8)):
        mixtral.engine(prefixes=share).generate(split, never)
        assert seen == dict.fromkeys(range(3), tokens)
    for handle in handles:
        handle.remove()


def test_examples_without_references_or_choices_are_answered_all_the_same(mixtral: Case) -> None:
    bare = tuple(Example(example.prompt, ()) for example in mixtral.split.examples)
    split = replace(mixtral.split, examples=bare)
    got = mixtral.engine().generate(split, never)
    assert list(got.texts) == [words(answer) for answer in mixtral.answers]
    assert not got.gold_logprobs.any()
    assert [len(values) for values in mixtral.engine().rank(split)] == [0] * len(bare)


@pytest.mark.parametrize("family", ["mixtral", "opt"])
def test_answers_end_with_the_models_context(
    family: str, tiny_model: MakeModel, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    model = tiny_model(family, max_position_embeddings=12)
    model.generation_config.eos_token_id = ENDS
    split = split_of([[5] * 9, [6] * 3], [[7], [8]], 30)
    engine = GenerationEngine(model, tiny_tokenizer, EngineConfig())
    prompts = engine.tokens_of(split).prompts
    assert [len(prompt) for prompt in prompts] == [6, 4], "half of the context is for the answer"
    answers = engine.generate(split, never).texts
    assert answers == tuple(words(greedy(model, list(prompt[1:]), 12 - len(prompt))) for prompt in prompts)
