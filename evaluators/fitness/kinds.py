"""The kinds of fitness. A new kind is a class here and a line in `FITNESSES`."""

from __future__ import annotations

import numpy as np

from moevolve.evaluators.errors import CandidateError
from moevolve.evaluators.fitness.base import Fitness
from moevolve.evaluators.fitness.engine import Decided, Engine
from moevolve.evaluators.matching.registry import make_matcher
from moevolve.evaluators.types import Example, Floats, Matching, PreparedSplit

# Smallest overlap of two predictions whose logarithm is taken; smaller ones count as this.
_MIN_OVERLAP = 1e-12


class Generate(Fitness):
    """Greedy answers, compared with the references by the task's matcher.

    Source: EEP (arXiv 2407.00945), Sec. 4 and App. E.
    """

    name = "generate"
    metric = "accuracy"
    reads = "generation"
    uses_matching = True

    def outcomes(self, engine: Engine, split: PreparedSplit) -> tuple[Floats, Floats]:
        answers = engine.generate(split, self.decided(split))
        matcher = make_matcher(split.matching)
        matches = [matcher.match(text, example) for text, example in zip(answers.texts, split.examples, strict=True)]
        return np.array(matches, dtype=np.float64), np.asarray(answers.gold_logprobs, dtype=np.float64)

    def decided(self, split: PreparedSplit) -> Decided:
        """Decoding stops as soon as no continuation can change the match."""
        matcher, examples = make_matcher(split.matching), split.examples
        return lambda i, text: matcher.decided(text, examples[i])

    def problem(self, example: Example, matching: Matching) -> str | None:
        return make_matcher(matching).problem(example)


class Rank(Fitness):
    """Whether the likeliest choice is an accepted answer.

    Likelihoods are mean log-probabilities per token; of equally likely choices the first counts.
    """

    name = "rank"
    metric = "accuracy"
    reads = "choices"

    def outcomes(self, engine: Engine, split: PreparedSplit) -> tuple[Floats, Floats]:
        ranked = engine.rank(split)
        outcomes = np.empty(len(ranked))
        gold = np.empty(len(ranked))
        for i, (values, example) in enumerate(zip(ranked, split.examples, strict=True)):
            if not np.isfinite(values).all():
                raise CandidateError(f"{split.task}/{split.split}: log-likelihoods of example {i} are not finite")
            outcomes[i] = example.choices[int(np.argmax(values))] in example.references
            gold[i] = values[example.choices.index(example.references[0])]
        return outcomes, gold

    def problem(self, example: Example, matching: Matching) -> str | None:
        if len(set(example.choices)) < max(2, len(example.choices)):
            return f"ranking needs at least two different choices, got {list(example.choices)}"
        return None


class Perplexity(Fitness):
    """1 / perplexity of whole texts; needs no labels.

    Examples that are read one by one weigh the same, however long they are. Windows of running text all predict equally
    many tokens, so their score is 1 / perplexity per token as papers report it (exp of the mean negative
    log-likelihood).
    """

    name = "perplexity"
    metric = "inverse_perplexity"
    reads = "texts"
    needs_references = False

    def outcomes(self, engine: Engine, split: PreparedSplit) -> tuple[Floats, Floats]:
        """Return exp(mean log-probability per token) as the outcome, and its logarithm as the tie-breaker."""
        logprobs = engine.text_logprobs(split)
        return np.exp(logprobs), logprobs


class Kl(Fitness):
    """exp(-KL) between the unedited model's predictions and the candidate's; needs no labels.

    The unedited model's own score is 1.
    """

    name = "kl"
    metric = "geometric_mean"
    reads = "texts"
    needs_references = False
    compares = True
    tie_break = "divergence"

    def outcomes(self, engine: Engine, split: PreparedSplit) -> tuple[Floats, Floats]:
        """Return exp(-mean divergence per token) as the outcome, and its logarithm as the tie-breaker."""
        logs = 0.0 - engine.divergences(split)  # not -divergences, which makes -0.0 of 0
        return np.exp(logs), logs


class Overlap(Fitness):
    """The overlap of the unedited model's predictions and the candidate's; needs no labels.

    It is the mean per token of sum_v min(p(v), q(v)) for the unedited model's p and the candidate's q, or 1 minus their
    total variation distance. The unedited model's own score is 1.
    """

    name = "agreement"
    metric = "agreement"
    reads = "texts"
    needs_references = False
    compares = True
    positions = "greedy"
    tie_break = "agreement"

    def outcomes(self, engine: Engine, split: PreparedSplit) -> tuple[Floats, Floats]:
        """Return the overlap as the outcome, and its logarithm as the tie-breaker."""
        overlaps = engine.agreements(split)
        # No overlap at all is a bad score and no failure, so its logarithm has to stay finite.
        return overlaps, np.log(np.maximum(overlaps, _MIN_OVERLAP))


class LmEval(Fitness):
    """The score of lm-evaluation-harness on one of its own tasks (`moevolve.evaluators.harness`)."""

    name = "lm_eval"
    metric = "mean"
    reads = "harness"

    def outcomes(self, engine: Engine, split: PreparedSplit) -> tuple[Floats, Floats]:
        return engine.judged(split)


# All kinds by name, in the order in which messages list them.
FITNESSES: dict[str, Fitness] = {
    fitness.name: fitness for fitness in (Generate(), Rank(), Perplexity(), Kl(), Overlap(), LmEval())
}

# The fitness of a task that doesn't name one.
DEFAULT_FITNESS = Generate.name


def task_fitnesses() -> tuple[str, ...]:
    """Return the kinds that any task can use: all but the one of lm-evaluation-harness."""
    return tuple(name for name, fitness in FITNESSES.items() if fitness.reads != "harness")
