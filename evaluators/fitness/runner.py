"""Scoring whatever model the engine holds on one prepared split."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from moevolve.evaluators.errors import CandidateError
from moevolve.evaluators.fitness.engine import Engine
from moevolve.evaluators.matching import make_matcher
from moevolve.evaluators.metrics import score
from moevolve.evaluators.types import FitnessKind, PreparedSplit, SplitResult

Floats = NDArray[np.float64]

_LEAST = 1e-12
"""Agreement whose logarithm stands for everything below it."""


def run_split(engine: Engine, split: PreparedSplit) -> SplitResult:
    """Scores the engine's model on a split.

    `generate`: greedy answers compared with the references by the task's matcher. `rank`: right when the choice of the
    highest mean log-probability per token is an accepted answer; the first wins a tie. `perplexity`: outcomes are
    exp(mean log-probability per token) of the texts, so their geometric mean is the reciprocal of the perplexity in
    which every example counts the same, however long. `kl`: outcomes are exp(-mean KL divergence per token) from the
    unedited model, which the engine must have remembered; its own score is 1. `agreement`: outcomes are the mean per
    token of sum_v min(p(v), q(v)) of the unedited model's p and the model's q, which is 1 less their total variation
    distance; the unedited model's own score is 1 here too. `lm_eval`: outcomes are what
    lm-evaluation-harness makes of the answers.

    Raises:
        CandidateError: a log-probability is not finite, which is the candidate's fault.
        ValueError: the engine did not answer every example.
    """
    outcomes, gold = _SCORERS[split.fitness](engine, split)
    _require_finite(gold, split)
    return _result(split, outcomes, gold)


def _result(split: PreparedSplit, outcomes: Floats, gold: Floats) -> SplitResult:
    return SplitResult(
        score=score(split.metric, outcomes),
        gold_logprob=score("mean", gold),
        outcomes=outcomes.astype(np.float32),
    )


def _generate(engine: Engine, split: PreparedSplit) -> tuple[Floats, Floats]:
    matcher = make_matcher(split.matching)
    examples = split.examples
    answers = engine.generate(split, lambda i, text: matcher.decided(text, examples[i]))
    if len(answers.texts) != len(examples) or answers.gold_logprobs.shape != (len(examples),):
        raise ValueError(
            f"the engine gave {len(answers.texts)} answers and {answers.gold_logprobs.shape[0]} log-probabilities for "
            f"{len(examples)} examples of {split.task}/{split.split}"
        )
    matches = [matcher.match(text, example) for text, example in zip(answers.texts, examples, strict=True)]
    return np.array(matches, dtype=np.float64), np.asarray(answers.gold_logprobs, dtype=np.float64)


def _rank(engine: Engine, split: PreparedSplit) -> tuple[Floats, Floats]:
    ranked = engine.rank(split)
    if [len(values) for values in ranked] != [len(example.choices) for example in split.examples]:
        raise ValueError(f"the engine did not rank every choice of every example of {split.task}/{split.split}")
    outcomes = np.empty(len(ranked))
    gold = np.empty(len(ranked))
    for i, (values, example) in enumerate(zip(ranked, split.examples, strict=True)):
        if not np.isfinite(values).all():
            raise CandidateError(f"{split.task}/{split.split}: log-likelihoods of example {i} are not finite")
        outcomes[i] = example.choices[int(np.argmax(values))] in example.references
        gold[i] = values[example.choices.index(example.references[0])]
    return outcomes, gold


def _perplexity(engine: Engine, split: PreparedSplit) -> tuple[Floats, Floats]:
    return _likelihoods(engine.text_logprobs(split), split)


def _kl(engine: Engine, split: PreparedSplit) -> tuple[Floats, Floats]:
    return _likelihoods(0.0 - engine.divergences(split), split)


def _agreement(engine: Engine, split: PreparedSplit) -> tuple[Floats, Floats]:
    overlaps = engine.agreements(split)
    _require_all(overlaps, split)
    # Nothing in common at all is a bad score, not a failure: its logarithm stays finite.
    return overlaps, np.log(np.maximum(overlaps, _LEAST))


def _likelihoods(logs: Floats, split: PreparedSplit) -> tuple[Floats, Floats]:
    """Outcomes and what takes the place of gold log-probabilities, from logarithms of the former."""
    _require_all(logs, split)
    return np.exp(logs), logs


def _require_all(values: Floats, split: PreparedSplit) -> None:
    if values.shape != (len(split.examples),):
        raise ValueError(
            f"the engine scored {values.shape[0]} of {len(split.examples)} texts of {split.task}/{split.split}"
        )


def _lm_eval(engine: Engine, split: PreparedSplit) -> tuple[Floats, Floats]:
    return engine.judged(split)


_SCORERS: dict[FitnessKind, Callable[[Engine, PreparedSplit], tuple[Floats, Floats]]] = {
    "generate": _generate,
    "rank": _rank,
    "perplexity": _perplexity,
    "kl": _kl,
    "agreement": _agreement,
    "lm_eval": _lm_eval,
}


def _require_finite(gold: Floats, split: PreparedSplit) -> None:
    wrong = np.flatnonzero(~np.isfinite(gold))
    if wrong.size:
        what = {"kl": "divergence", "agreement": "agreement"}.get(split.fitness, "gold log-probability")
        raise CandidateError(
            f"{split.task}/{split.split}: {what} of example {int(wrong[0])} is {gold[wrong[0]]} "
            f"({wrong.size} of {gold.size} not finite)"
        )
