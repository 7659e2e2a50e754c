"""Calibrations and expert usage of a resident model: the tokens that they run, and their errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.types import Example, Matching, Positions, PreparedSplit
from moevolve.workers.contract.edits import Calibration, CombinedMeasurement, IdentityEdit
from moevolve.workers.contract.fitting import FitRows, RowsMeasurement
from moevolve.workers.contract.settings import EngineConfig
from moevolve.workers.contract.usage import RoutedLayer
from moevolve.workers.engine.decoding import SampledAnswers
from moevolve.workers.engine.engine import GenerationEngine
from moevolve.workers.engine.measuring import analyse_usage, calibrate, token_sequences
from moevolve.workers.engine.tokenizing import end_tokens
from moevolve.workers.methods.eep.edit import ExpertsMeasurement, Until
from moevolve.workers.model.resident import ResidentModel


def engine_of(resident: ResidentModel, **settings: Any) -> GenerationEngine:
    return GenerationEngine(resident.model, resident.tokenizer, EngineConfig(**settings))


def calibrated(resident: ResidentModel, measurement: Any, splits: Sequence[PreparedSplit]) -> Calibration:
    return calibrate(resident, engine_of(resident), measurement, splits)


def split_of(examples: Sequence[Example], fitness: str = "generate", positions: Positions = "text") -> PreparedSplit:
    return PreparedSplit(
        *("t", "calibration", fitness, "mean", Matching(), 4, " "), examples=tuple(examples), positions=positions
    )


def test_prompts_without_answers_are_followed_by_the_models_own(resident: Callable[[str], ResidentModel]) -> None:
    model = resident("mixtral")
    examples = [Example(f"the {word} dog is", ()) for word in ("quick", "brown", "larger", "lazy", "red")]
    prompts = engine_of(model).tokens_of(split_of(examples)).prompts
    ends = end_tokens(model.model, model.tokenizer, EngineConfig())
    expected = []
    for prompt in prompts:
        made = model.model.generate(torch.tensor([prompt]), max_new_tokens=4, do_sample=False)[0].tolist()
        expected.append(tuple(token for place, token in enumerate(made) if place < len(prompt) or token not in ends))
    assert any(len(each) > len(prompt) for each, prompt in zip(expected, prompts, strict=True))
    for batch_tokens in (1, 4096):
        engine = engine_of(model, batch_tokens=batch_tokens)
        assert token_sequences(engine, [split_of(examples)], 10**6) == expected
    length = len(prompts[0])
    assert token_sequences(engine, [split_of(examples)], length + 1) == expected[: 1 + (len(expected[0]) == length)]
    # Of several splits in turn, each with or without answers.
    gold = split_of([replace(example, references=("fox",)) for example in examples[:2]])
    mixed = token_sequences(engine, [gold, split_of(examples)], 10**6)
    assert mixed[1::2][:2] == expected[:2] and mixed[4:] == expected[2:]
    assert [each[: len(prompt)] for each, prompt in zip(mixed[:4:2], prompts, strict=False)] == list(prompts[:2])
    assert all(len(each) == len(prompt) + 1 for each, prompt in zip(mixed[:4:2], prompts, strict=False))


def test_running_text_is_read_as_it_stands(resident: Callable[[str], ResidentModel]) -> None:
    engine = engine_of(resident("mixtral"))
    examples = [Example(f"the {word} dog is", ()) for word in ("quick", "brown")]
    whole, asked = (split_of(examples, "agreement", positions) for positions in ("text", "greedy"))
    prompts = list(engine.tokens_of(whole).prompts)
    assert token_sequences(engine, [whole], 10**6) == prompts == token_sequences(engine, [whole], 6)
    assert token_sequences(engine, [asked], 10**6) != prompts


def test_the_cost_is_noted(resident: Callable[[str], ResidentModel]) -> None:
    examples = tuple(Example(f"the {word} dog is", ("fox",), ()) for word in ("quick", "brown", "larger"))
    split = PreparedSplit("t", "search", "generate", "mean", Matching(), 4, " ", examples)
    made = calibrated(resident("mixtral"), ExpertsMeasurement(("usage",), None, 11), [split])
    made = Calibration.from_bytes(made.to_bytes())
    assert made.tokens_run == 12, "whole prompts with their answers, until 11 tokens are reached"
    assert made.arrays["counts"].sum() == 12 * 2 * 3
    assert made.seconds is not None and made.seconds > 0


def test_combined_calibrations_are_those_by_themselves(resident: Callable[[str], ResidentModel]) -> None:
    examples = tuple(Example(f"which is larger {a} : {b}", (a,), (a, b)) for a, b in (("a", "b"), ("fox", "dog")))
    split = PreparedSplit("pick", "search", "rank", "mean", Matching(), 1, " ", examples)
    measurements = RowsMeasurement(1000), ExpertsMeasurement(("usage",), None, 5)
    alone = [calibrated(resident("mixtral"), measurement, [split]) for measurement in measurements]
    both = calibrated(resident("mixtral"), CombinedMeasurement(measurements), [split])
    for each in alone:
        for name in set(each.arrays) - {"seconds", "tokens_run"}:
            assert np.array_equal(both.arrays[name], each.arrays[name])
    assert both.tokens_run == sum(each.tokens_run for each in alone)


def test_rows_that_are_too_few_are_continued_by_the_model(resident: Callable[[str], ResidentModel]) -> None:
    long = " ".join(["quick brown lazy red"] * 8)
    asked = split_of([Example("which is larger", (f"{word} {long}",)) for word in ("fox", "dog")])
    texts = split_of([Example(f"the {word} {long}", ()) for word in ("quick", "brown", "red")], "perplexity")
    short = split_of([Example("the fox is", ("red",))])
    model, splits = resident("mixtral"), [asked, texts, short]
    own = FitRows.of(calibrated(model, RowsMeasurement(10**4), splits).arrays)
    assert [int(own.lengths[place] - own.prompts[place] > 1) for place in range(len(own.lengths))] == [1, 0, 0, 1, 0, 0]
    for measurement in (RowsMeasurement(10**4, continuations=2), RowsMeasurement(len(own.tokens), continuations=2)):
        made = calibrated(model, measurement, splits)
        rows = FitRows.of(made.arrays)
        sequences, before = rows.sequences, own.sequences
        assert sequences[: len(before)] == before and rows.prompts[: len(before)].tolist() == own.prompts.tolist()
        assert made.tokens_run == len(rows.tokens)
        written = sequences[len(before) :]
        assert int(made.arrays["repair_written"][0]) == sum(map(len, written))
        if measurement.tokens == len(own.tokens):
            assert not written and measurement.note(made.arrays) is None
            continue
        # The short one isn't: the model would write nothing but its answer.
        continued = [place for place, each in enumerate(before) if len(each) > 10]
        assert len(continued) == 5 and len(written) == 2 * len(continued)
        for place, text, prompt in zip(continued * 2, written, rows.prompts[len(before) :].tolist(), strict=True):
            source, answers = before[place], own.prompts[place] < own.lengths[place]
            start = int(own.prompts[place]) if answers else len(source) // 4
            assert text[:start] == source[:start] and len(text) <= len(source) and text != source
            assert prompt == (start if answers else len(text))
        assert len(set(written)) == len(written), "every continuation is drawn anew"
        note = f"repair: the calibration rows have {len(own.tokens)} tokens; the full model continued them with "
        assert measurement.note(made.arrays) == f"{note}{sum(map(len, written))}"
    some = FitRows.of(calibrated(model, RowsMeasurement(len(own.tokens) + 10, continuations=2), splits).arrays)
    assert len(some.lengths) == len(own.lengths) + 1, "as many as are needed"


@pytest.mark.parametrize("family", ["mixtral", "qwen3_next"])
def test_continuations_are_drawn_from_the_models_predictions(
    family: str, resident: Callable[[str], ResidentModel]
) -> None:
    model, count = resident(family), 2000
    start = engine_of(model).tokens_of(split_of([Example("the quick brown fox", ())])).prompts[0]
    with torch.inference_mode():
        expected = model.model(torch.tensor([start])).logits[0, -1].double().softmax(-1).numpy()
    texts = engine_of(model).continued([start] * count, [1] * count, np.random.default_rng(0))
    ends = end_tokens(model.model, model.tokenizer, EngineConfig())
    counts = np.bincount([each[-1] for each in texts if len(each) > len(start)], minlength=len(expected))
    kept = np.array([token not in ends for token in range(len(expected))])
    assert counts[~kept].sum() == 0
    deviations = (counts - count * expected)[kept] / np.sqrt(count * expected * (1 - expected))[kept]
    assert abs(deviations).max() < 4.5 and 0.6 < (deviations**2).mean() < 1.4
    # What is decoded together changes nothing.
    starts, limits = [start[:place] for place in (1, 3, 2, 4, 3)], [7, 1, 9, 4, 9]
    found = [
        engine_of(model, batch_tokens=tokens).continued(starts, limits, np.random.default_rng(5))
        for tokens in (1, 4096)
    ]
    assert found[0] == found[1]
    assert all(
        len(start) <= len(text) <= len(start) + limit
        for start, text, limit in zip(starts, found[0], limits, strict=True)
    )


def test_the_largest_draw_is_the_last_token() -> None:
    class Largest(np.random.Generator):
        def random(self, *_args: Any, **_settings: Any) -> Any:
            return np.array([np.nextafter(1.0, 0.0)])

    answers = SampledAnswers([1], (), Largest(np.random.PCG64()))
    assert answers.choose([0], torch.zeros(1, 7)) == [6]


def test_no_prompts_are_refused(resident: Callable[[str], ResidentModel]) -> None:
    with pytest.raises(UserError, match="calibration_tokens: there are no prompts"):
        calibrated(resident("mixtral"), ExpertsMeasurement(("usage",), None, 5), [split_of([])])
    with pytest.raises(UserError, match="no prompts"):
        analyse_usage(resident("mixtral"), IdentityEdit(), [])


def test_effective_experts_are_those_of_even_use() -> None:
    even = RoutedLayer(0, np.array([5, 5, 0, 5]), np.zeros(4), np.zeros((4, 4)), np.zeros((0, 4)))
    assert even.effective == pytest.approx(3)
    assert RoutedLayer(0, np.array([0, 7]), np.zeros(2), np.zeros((2, 2)), np.zeros((0, 2))).effective == pytest.approx(
        1
    )


Residents = Callable[[str], ResidentModel]
WORDS = ("quick", "brown", "larger", "lazy", "red")
VARIED = split_of([Example(f"the {a} {b} is {a}", (b,)) for a in WORDS for b in WORDS])
EQUAL = split_of([Example("the quick brown is quick", ("brown",))] * 25)
ROW = 7
"""Tokens of each of their rows."""


@pytest.fixture
def unpacked(resident: Residents, monkeypatch: pytest.MonkeyPatch) -> Residents:
    """Models that run every sequence by itself."""
    monkeypatch.setattr("moevolve.workers.model.resident.ROW_TOKENS", 0)
    return resident


def growing(loss: float, tokens: int = 2 * ROW, most: int = 16 * ROW) -> ExpertsMeasurement:
    return ExpertsMeasurement(("importance", "pairs", "usage"), None, tokens, Until(3, loss, most))


@pytest.mark.parametrize(
    ("split", "measurement", "rows", "why"),
    [
        (EQUAL, growing(0.001), 2, "experts' scores"),
        (VARIED, growing(0.001), 16, "; genome.calibration_most allows no more"),
        (VARIED, growing(-1.0, most=10**6), 25, "; more `calibration` rows would help"),
        (VARIED, growing(1.0), 2, "experts' scores"),
    ],
)
def test_scores_are_measured_until_their_errors_cost_little(
    split: PreparedSplit, measurement: ExpertsMeasurement, rows: int, why: str, unpacked: Residents
) -> None:
    """Rows that are all alike say the same from the beginning on; others are measured on twice as many, and again."""
    made = calibrated(unpacked("mixtral"), measurement, [split])
    assert made.tokens_run == rows * ROW == made.arrays["importance_tokens"][0]
    note = measurement.note(made.arrays)
    counts = made.arrays["counts"]
    assert note.startswith(f"expert scores come from {rows * ROW} tokens (median ")
    assert f" per expert, least {counts.min()})" in note and note.endswith(why)


def test_neither_steps_nor_the_order_of_rows_change_sums(unpacked: Residents) -> None:
    model, other = unpacked("mixtral"), replace(VARIED, examples=VARIED.examples[::-1])
    steps, again, once, turned = (
        calibrated(model, measurement, [split])
        for measurement, split in (
            *[(growing(-1.0, most=10**6), VARIED)] * 2,
            (growing(-1.0, tokens=10**6), VARIED),
            (growing(-1.0, most=10**6), other),
        )
    )
    for name in set(steps.arrays) - {"seconds"}:
        assert np.array_equal(steps.arrays[name], again.arrays[name])
        for each in (once, turned):
            np.testing.assert_allclose(steps.arrays[name], each.arrays[name], rtol=1e-6, atol=1e-12)
