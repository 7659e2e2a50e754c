"""Scoring a split with an engine whose answers are known."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from numpy.typing import NDArray

from moevolve.evaluators.errors import CandidateError
from moevolve.evaluators.fitness.engine import Decided, Generation
from moevolve.evaluators.fitness.scoring import Answer, run_split, transcribe
from moevolve.evaluators.types import Example, Matching, PreparedSplit

SPLIT = PreparedSplit(
    task="t",
    split="search",
    fitness="generate",
    metric="accuracy",
    matching=Matching("option"),
    max_new_tokens=8,
    answer_prefix=" ",
    examples=tuple(Example(f"p{i}", (gold,), ("A", "B")) for i, gold in enumerate("AABB")),
)


@dataclass
class ScriptedEngine:
    """Generates given answers piece by piece, and stops when the outcome is decided."""

    answers: tuple[str, ...] = ()
    gold: tuple[float, ...] = ()
    choices: tuple[tuple[float, ...], ...] = ()
    texts: tuple[float, ...] = ()
    written: list[str] = field(default_factory=list)

    def generate(self, split: PreparedSplit, decided: Decided) -> Generation:
        for i, answer in enumerate(self.answers):
            text = ""
            for character in answer:
                if decided(i, text):
                    break
                text += character
            self.written.append(text)
        return Generation(tuple(self.written), np.array(self.gold))

    def rank(self, split: PreparedSplit) -> tuple[NDArray[np.float64], ...]:
        return tuple(np.array(values) for values in self.choices)

    def text_logprobs(self, split: PreparedSplit) -> NDArray[np.float64]:
        return np.array(self.texts)

    def remember(self, split: PreparedSplit) -> None:
        raise AssertionError("that is the worker's task, while the model is unedited")

    def divergences(self, split: PreparedSplit) -> NDArray[np.float64]:
        return -np.array(self.texts)


def test_generated_answers_are_matched_and_cut_short() -> None:
    engine = ScriptedEngine((" A. Yes", " B. No", "It is B, really", "none"), (-0.5, -1.5, -1.0, -2.0))
    result = run_split(engine, SPLIT)
    assert result.outcomes.tolist() == [1, 0, 1, 0]
    assert result.outcomes.dtype == np.float32
    assert (result.score, result.gold_logprob, result.examples_seen) == (0.5, -1.25, 4)
    assert engine.written == [" A.", " B.", "It is B,", "none"]


def test_graded_outcomes_are_averaged() -> None:
    split = replace(
        SPLIT, metric="mean", matching=Matching("f1"), examples=(Example("p", ("red cup",)), Example("q", ("x",)))
    )
    result = run_split(ScriptedEngine(("red hat\nmore", "x"), (-1.0, -1.0)), split)
    assert result.score == 0.75
    assert result.outcomes.tolist() == [0.5, 1.0]


def test_ranking_takes_the_likeliest_choice_and_the_first_of_equals() -> None:
    split = replace(SPLIT, fitness="rank")
    result = run_split(ScriptedEngine(choices=((-1.0, -2.0), (-3.0, -2.0), (-1.0, -1.0), (-4.0, -2.0))), split)
    assert result.outcomes.tolist() == [1, 0, 0, 1]
    assert result.gold_logprob == (-1 - 3 - 1 - 2) / 4


@pytest.mark.parametrize("fitness", ["perplexity", "kl"])
def test_texts_score_the_exponential_of_their_mean(fitness: str) -> None:
    split = replace(SPLIT, fitness=fitness, metric="geometric_mean")
    result = run_split(ScriptedEngine(texts=(-1.0, -2.0, -3.0, -0.0)), split)
    np.testing.assert_allclose(result.outcomes, np.exp([-1, -2, -3, 0]), rtol=1e-6)
    assert result.score == pytest.approx(np.exp(-1.5))
    assert result.gold_logprob == -1.5
    assert run_split(ScriptedEngine(texts=(-0.0,) * 4), split).score == 1.0
    assert run_split(ScriptedEngine(texts=(-2000.0,) * 4), split).score == 0.0
    with pytest.raises(ValueError, match="t/search: the engine scored 3 of 4 examples"):
        run_split(ScriptedEngine(texts=(-1.0,) * 3), split)


def test_numbers_that_are_not_finite_are_the_candidates_fault() -> None:
    bad = float("nan")
    with pytest.raises(CandidateError, match=r"t/search: gold log-probability of example 2 is .*1 of 4 not finite"):
        run_split(ScriptedEngine(("A",) * 4, (-1.0, -1.0, bad, -1.0)), SPLIT)
    with pytest.raises(CandidateError, match="t/search: log-likelihoods of example 1 are not finite"):
        run_split(
            ScriptedEngine(choices=((-1.0, -2.0), (-1.0, bad), (-1, -1), (-1, -1))), replace(SPLIT, fitness="rank")
        )
    with pytest.raises(CandidateError, match="t/search: gold log-probability of example 3 is"):
        run_split(ScriptedEngine(texts=(-1.0, -1.0, -1.0, bad)), replace(SPLIT, fitness="perplexity"))
    with pytest.raises(CandidateError, match="t/search: divergence of example 3 is"):
        run_split(ScriptedEngine(texts=(-1.0, -1.0, -1.0, bad)), replace(SPLIT, fitness="kl"))


def test_a_transcript_has_whole_answers_with_the_same_outcomes() -> None:
    """Scoring stops at the letter; a transcript continues to the stop string, which isn't part of the answer."""
    said = ("A. Yes, it is\nB", "B) No\n", "\n B", "neither of them")
    outcomes = run_split(ScriptedEngine(said, (-1.0,) * 4), SPLIT).outcomes.tolist()
    found = transcribe(ScriptedEngine(said, (-1.0,) * 4), SPLIT)
    assert [answer.outcome for answer in found] == outcomes == [1, 0, 1, 0]
    assert [answer.text for answer in found] == ["A. Yes, it is", "B) No", "B", "neither of them"]
    assert {answer.logprobs for answer in found} == {()}
    split = replace(SPLIT, matching=Matching("eep-squad2"), examples=(Example("p", ("cat",)),) * 3)
    found = transcribe(ScriptedEngine(("cat\ndog", "\ncat", " cat"), (-1.0,) * 3), split)
    assert [(answer.text, answer.outcome) for answer in found] == [("cat", 1), ("", 0), (" cat", 1)]


def test_a_transcript_of_ranked_choices_and_of_texts() -> None:
    ranked = ((-1.0, -2.0), (-3.0, -0.5), (-2.0, -1.0), (-1.0, -1.0))
    found = transcribe(ScriptedEngine(choices=ranked), replace(SPLIT, fitness="rank"))
    assert found[1] == Answer("B", (-3.0, -0.5), 0.0) and [answer.text for answer in found] == ["A", "B", "B", "A"]
    found = transcribe(ScriptedEngine(texts=(-1.0, -2.0, -0.5, 0.0)), replace(SPLIT, fitness="perplexity"))
    assert [answer.text for answer in found] == [None] * 4 and found[3].outcome == 1.0
