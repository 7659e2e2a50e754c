"""Perplexity and divergence of whole texts against plain forwards of one unpadded text at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from families import family_edit
from torch import Tensor

from moevolve.evaluators.errors import CandidateError, UserError
from moevolve.evaluators.fitness.scoring import run_split
from moevolve.evaluators.types import Example, Matching, PreparedSplit
from moevolve.workers.contract.edits import IdentityEdit
from moevolve.workers.contract.messages import EvaluationRequest
from moevolve.workers.contract.settings import EngineConfig, ModelConfig
from moevolve.workers.engine import texts as texts_module
from moevolve.workers.engine.engine import GenerationEngine
from moevolve.workers.worker import EvaluationWorker

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

MakeModel = Callable[..., "PreTrainedModel"]
BOS = 1
FAMILIES = ["mixtral", "opt"]


def some_texts(count: int = 7) -> list[list[int]]:
    """Texts of 2 to 20 tokens, without the beginning-of-sequence token."""
    rng = np.random.default_rng(8)
    return [rng.integers(4, 97, size=int(rng.integers(2, 21))).tolist() for _ in range(count)]


def split_of(texts: list[list[int]], fitness: str = "perplexity") -> PreparedSplit:
    """A split in which the last two tokens of every second text are its answer, if a prompt remains."""
    examples = []
    for i, ids in enumerate(texts):
        head, tail = (ids[:-2], ids[-2:]) if i % 2 and len(ids) > 2 else (ids, [])
        references = (" ".join(f"w{token}" for token in tail),) if tail else ()
        examples.append(Example(" ".join(f"w{token}" for token in head), references))
    return PreparedSplit("words", "search", fitness, "geometric_mean", Matching(), 4, " ", tuple(examples))


@torch.no_grad()
def plain_logits_of(model: PreTrainedModel, text: list[int]) -> Tensor:
    """Log-probabilities at every position that predicts a token of the text, float64 [tokens, vocabulary]."""
    return model(torch.tensor([[BOS, *text]])).logits[0, :-1].double().log_softmax(dim=-1)


def mean_logprob(logs: Tensor, text: list[int]) -> float:
    return float(logs[torch.arange(len(text)), torch.tensor(text)].mean())


def mean_overlap(full: Tensor, edited: Tensor) -> float:
    return float(torch.minimum(full.exp(), edited.exp()).sum(dim=-1).mean())


def mean_kl(full: Tensor, edited: Tensor) -> float:
    return float((full.exp() * (full - edited)).sum(dim=-1).mean())


@contextmanager
def changed(model: PreTrainedModel) -> Iterator[None]:
    """Context manager that changes a feed-forward layer of the model."""
    weight = next(
        p for name, p in model.named_parameters() if name.endswith(("down_proj", "down_proj.weight", "fc2.weight"))
    )
    kept = weight.detach().clone()
    weight.data.mul_(0.5)
    try:
        yield
    finally:
        weight.data.copy_(kept)


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tiny_model: MakeModel) -> PreTrainedModel:
    return tiny_model(request.param)


@pytest.fixture(scope="module")
def plain(model: PreTrainedModel) -> tuple[list[Tensor], list[Tensor]]:
    """What the model gives for each of `some_texts` as it is and `changed`."""
    full = [plain_logits_of(model, text) for text in some_texts()]
    with changed(model):
        return full, [plain_logits_of(model, text) for text in some_texts()]


Plain = tuple[list[Tensor], list[Tensor]]
Engines = Callable[..., GenerationEngine]


@pytest.fixture
def engine_of(tiny_tokenizer: PreTrainedTokenizerFast) -> Engines:
    def make(model: PreTrainedModel, batch_tokens: int = 4096, **config: Any) -> GenerationEngine:
        return GenerationEngine(model, tiny_tokenizer, EngineConfig(batch_tokens=batch_tokens, **config))

    return make


def test_what_a_model_does_behind_its_head_counts(tiny_model: MakeModel, engine_of: Engines) -> None:
    """Granite divides the logits, as other families cap or multiply them."""
    model = tiny_model("granitemoe")
    got = engine_of(model).text_logprobs(split_of(some_texts(3)))
    expected = [mean_logprob(plain_logits_of(model, text), text) for text in some_texts(3)]
    np.testing.assert_allclose(got, expected, atol=1e-5)


@pytest.mark.parametrize("batch_tokens", [1, 60])
def test_numbers_are_those_of_single_unpadded_texts_and_of_two_models_side_by_side(
    model: PreTrainedModel, plain: Plain, engine_of: Engines, batch_tokens: int
) -> None:
    texts, split = some_texts(), replace(split_of(some_texts(), "agreement"), metric="mean")
    engine = engine_of(model, batch_tokens)
    engine.remember(split)
    logprobs = engine.text_logprobs(split)
    with changed(model):
        divergences, agreements = engine.divergences(split), engine.agreements(split)
        result = run_split(engine, split)
    expected = [mean_logprob(logs, text) for logs, text in zip(plain[0], texts, strict=True)]
    np.testing.assert_allclose(logprobs, expected, atol=2e-5)
    expected = [mean_kl(before, now) for before, now in zip(*plain, strict=True)]
    assert min(expected) > 1e-3
    np.testing.assert_allclose(divergences, expected, rtol=1e-3, atol=2e-5)
    expected = [mean_overlap(before, now) for before, now in zip(*plain, strict=True)]
    assert max(expected) < 0.999
    np.testing.assert_allclose(agreements, expected, atol=2e-5)
    np.testing.assert_allclose(result.outcomes, expected, atol=2e-5)
    assert result.score == pytest.approx(np.mean(expected), abs=2e-5)
    assert result.gold_logprob == pytest.approx(np.mean(np.log(expected)), abs=1e-4)
    assert logprobs.dtype == divergences.dtype == np.float64
    assert not engine.divergences(split).any(), "the unedited model again: not a bit is different"
    np.testing.assert_allclose(engine.agreements(split), 1.0, atol=1e-6)


@pytest.mark.parametrize(("fitness", "batch_tokens"), [("kl", 60), ("agreement", 4096)])
def test_only_the_positions_that_predict_the_answer_count(
    model: PreTrainedModel, plain: Plain, engine_of: Engines, fitness: str, batch_tokens: int
) -> None:
    texts = [text for text in some_texts() if len(text) > 3]
    heads, tails = [text[:-2] for text in texts], [text[-2:] for text in texts]
    examples = tuple(
        Example(" ".join(f"w{t}" for t in head), (" ".join(f"w{t}" for t in tail),))
        for head, tail in zip(heads, tails, strict=True)
    )
    split = replace(split_of(texts, fitness), examples=examples, positions="answer")
    engine = engine_of(model, batch_tokens)
    engine.remember(split)
    with changed(model):
        got = engine.divergences(split) if fitness == "kl" else engine.agreements(split)
    compare = mean_kl if fitness == "kl" else mean_overlap
    pairs = [pair for pair in zip(*plain, strict=True) if len(pair[0]) > 3]
    expected = [compare(before[-2:], now[-2:]) for before, now in pairs]
    np.testing.assert_allclose(got, expected, rtol=1e-3, atol=2e-5)
    ((_, kept),) = engine._scorer.remembered.values()
    assert sum(part.shape[0] for part in kept) == 2 * len(texts), "nothing but these positions is kept"


@torch.no_grad()
def greedy_of(model: PreTrainedModel, prompt: list[int], limit: int) -> list[int]:
    """Greedy continuation, including its end token."""
    made: list[int] = []
    while len(made) < limit and (not made or made[-1] != 2):
        made.append(int(model(torch.tensor([[BOS, *prompt, *made]])).logits[0, -1].argmax()))
    return made


def test_without_labels_the_full_models_own_answer_is_the_text(
    model: PreTrainedModel, engine_of: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = some_texts(3)
    examples = tuple(Example(" ".join(f"w{token}" for token in prompt), ()) for prompt in prompts)
    split = replace(split_of(prompts, "agreement"), examples=examples, positions="greedy", metric="mean")
    with torch.no_grad():  # one prompt of the model's is answered by the end token at once
        first = model(torch.tensor([[BOS, *prompts[0]]])).logits[0, -1].argsort(descending=True)
    ends = frozenset([2, int(first[0])])
    monkeypatch.setattr(model.generation_config, "eos_token_id", sorted(ends))
    engine = engine_of(model)
    answers = [greedy_of(model, prompt, split.max_new_tokens) for prompt in prompts]
    answers = [cut_at(answer, ends) for answer in answers]
    assert len(answers[0]) == 1
    engine.remember(split)
    full, edited = [], []
    for store, context in ((full, nullcontext()), (edited, changed(model))):
        with context:
            for prompt, answer in zip(prompts, answers, strict=True):
                store.append(plain_logits_of(model, [*prompt, *answer])[-len(answer) :])
    with changed(model):
        got = run_split(engine, split)
    expected = [mean_overlap(before, now) for before, now in zip(full, edited, strict=True)]
    np.testing.assert_allclose(got.outcomes, expected, atol=2e-5)
    assert run_split(engine, split).score == pytest.approx(1.0, abs=1e-6)


def cut_at(answer: list[int], ends: frozenset[int]) -> list[int]:
    """The answer up to and including its first end token."""
    stop = next((place for place, token in enumerate(answer) if token in ends), len(answer))
    return answer[: stop + 1]


def test_chunks_of_positions_change_nothing_and_results_repeat_bit_for_bit(
    tiny_model: MakeModel, engine_of: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, split = tiny_model(), split_of(some_texts(), "kl")
    engine = engine_of(model, 60)
    engine.remember(split)
    with changed(model):
        whole = engine.text_logprobs(split), engine.divergences(split)
        engine.generate(split, lambda _, text: bool(text))
        again = engine_of(model, 60).text_logprobs(split), engine.divergences(split)
        monkeypatch.setattr(texts_module, "_CHUNK", 97 * 3)
        parts = engine.text_logprobs(split), engine.divergences(split)
    for one, same, other in zip(whole, again, parts, strict=True):
        assert np.array_equal(one, same)
        np.testing.assert_allclose(other, one, atol=1e-5)
    assert not model.get_output_embeddings()._forward_pre_hooks


def test_what_is_remembered_stays_and_lies_on_the_host_in_the_models_dtype(
    tiny_model: MakeModel, engine_of: Engines
) -> None:
    model = tiny_model().to(torch.bfloat16)
    texts = some_texts()
    split = split_of(texts, "kl")
    engine = engine_of(model, 60)
    engine.remember(split)
    with changed(model):
        engine.remember(replace(split))  # known by its fingerprint: the edited model must not take its place
        assert engine.divergences(split).min() > 0
    ((_, kept),) = engine._scorer.remembered.values()
    assert sum(part.shape[0] for part in kept) == sum(map(len, texts))  # the opening token predicts, the last does not
    assert {(part.shape[1], part.dtype, part.device.type) for part in kept} == {(32, torch.bfloat16, "cpu")}


def test_a_pass_makes_logits_of_one_position_only(tiny_model: MakeModel, engine_of: Engines) -> None:
    model = tiny_model()
    shapes: list[tuple[int, ...]] = []
    handle = model.register_forward_hook(lambda *args: shapes.append(tuple(args[-1].logits.shape)))
    engine_of(model).text_logprobs(split_of(some_texts()))
    handle.remove()
    assert shapes[0] == (1, 1, 97)
    read = sum(len(text) for text in some_texts())
    assert all(shape[1] <= read for shape in shapes[1:]), "the output head by itself, where logits are read"


def test_long_prompts_are_truncated_before_the_answer_follows(tiny_model: MakeModel, engine_of: Engines) -> None:
    model, long = tiny_model(), list(range(10, 42))
    engine = engine_of(model, max_prompt_tokens=12)
    (got,) = engine.text_logprobs(replace(split_of([[5, 6], long]), examples=split_of([[5, 6], long]).examples[1:]))
    kept = [*long[19:30], *long[30:]]  # with the opening token 12 of the prompt, then the answer
    assert got == pytest.approx(mean_logprob(plain_logits_of(model, kept), kept), abs=2e-5)


def test_non_finite_numbers_are_the_candidates_fault_but_not_the_full_models(
    model: PreTrainedModel, engine_of: Engines
) -> None:
    split = split_of([[5, 6], [7, 8, 9]], "kl")
    engine = engine_of(model)
    engine.remember(split)
    with changed(model):
        weight = next(
            p for n, p in model.named_parameters() if n.endswith(("down_proj", "down_proj.weight", "fc2.weight"))
        )
        weight.data.fill_(float("nan"))
        for run in (engine.text_logprobs, engine.divergences):
            with pytest.raises(CandidateError, match="non-finite logits for 2 of 2 texts"):
                run(split)
        with pytest.raises(UserError, match="unedited model's hidden states are not finite"):
            engine_of(model).remember(split)
    assert np.isfinite(engine.text_logprobs(split)).all()


def test_a_worker_looks_at_the_unedited_model_by_itself(model_config: Callable[..., ModelConfig]) -> None:
    """The edit comes first; its divergence is that of an engine which has remembered the model before."""
    edit = family_edit("qwen2_moe", "both")
    texts = ("the quick brown fox", "which is larger : a b", "dog .")
    split = replace(split_of([]), fitness="kl", examples=tuple(Example(text, ()) for text in texts))
    worker = EvaluationWorker(model_config("qwen2_moe"), EngineConfig(batch_tokens=11))
    replies = [worker.evaluate(EvaluationRequest(each, (split.ref,)), (split,)) for each in (edit, IdentityEdit())]
    (edited,), (full,) = (reply.results.values() for reply in replies)
    assert full.score == pytest.approx(1.0, abs=1e-6)
    engine = GenerationEngine(worker.resident.model, worker.resident.tokenizer, EngineConfig())
    engine.remember(split)
    with worker.resident.edited(edit):
        divergences = engine.divergences(split)
    assert min(divergences) > 1e-4
    np.testing.assert_allclose(edited.outcomes, np.exp(-divergences), rtol=1e-3)
    assert edited.score == pytest.approx(np.exp(edited.gold_logprob))
