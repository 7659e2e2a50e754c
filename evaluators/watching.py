"""Looking on while a split is evaluated: outcomes batch by batch, until a floor is out of reach."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from moevolve.evaluators.early_stopping import LOOKS, Floor, Tally
from moevolve.evaluators.matching import make_matcher
from moevolve.evaluators.types import Example, PreparedSplit


class OutOfReach(Exception):
    """The floor can't be reached any more; the rest of the split needn't run."""


class OutcomeWatch:
    """A `moevolve.evaluators.engine.Watch` that ends the evaluation of a hopeless candidate.

    Attributes:
        outcomes: float64 [examples], NaN for those that didn't run.
        gold: likewise, their gold log-probabilities.
    """

    def __init__(self, split: PreparedSplit, floor: Floor) -> None:
        """Watch one split, of fitness `generate` or `rank`.

        Args:
            split: what is evaluated.
            floor: what its score has to help to reach; the splits before it are known there.
        """
        self._split = split
        self._floor = floor
        self._matcher = make_matcher(split.matching)
        self._looks = 0
        self.outcomes = np.full(len(split.examples), np.nan)
        self.gold = np.full(len(split.examples), np.nan)

    def arrange(self, batches: list[list[int]]) -> list[list[int]]:
        """Batches as they were planned, the cheapest examples first; for racing at random, as its test assumes."""
        if self._floor.alpha is None:
            return batches
        rng = np.random.default_rng(int(self._split.fingerprint[:16], 16))
        return [batches[place] for place in rng.permutation(len(batches))]

    def generated(self, batch: Sequence[int], texts: Sequence[str], gold_logprobs: NDArray[np.float64]) -> None:
        """Match answers; raises `OutOfReach`."""
        for i, text in zip(batch, texts, strict=True):
            self.outcomes[i] = self._matcher.match(text, self._split.examples[i])
        self.gold[list(batch)] = gold_logprobs
        self._look()

    def ranked(self, batch: Sequence[int], logprobs: Sequence[NDArray[np.float64]]) -> None:
        """Compare choices; raises `OutOfReach`."""
        for i, values in zip(batch, logprobs, strict=True):
            finite = bool(np.isfinite(values).all())
            self.outcomes[i], self.gold[i] = rank_outcome(values, self._split.examples[i]) if finite else (0.0, np.nan)
        self._look()

    def _look(self) -> None:
        # By outcomes as they are kept, so that whoever looks at them later comes to the same.
        tally = Tally.of(self.outcomes if self._floor.alpha is None else self.outcomes.astype(np.float32))
        if tally.seen == tally.count:
            return  # all of it ran: that is an evaluation, whatever came out
        looks = LOOKS * tally.seen // tally.count
        if self._floor.rejects(self._split.fingerprint, tally, certainly=looks == self._looks):
            raise OutOfReach
        self._looks = looks


def rank_outcome(logprobs: NDArray[np.float64], example: Example) -> tuple[float, float]:
    """Whether the likeliest choice is right (the first wins a tie), and the gold answer's log-probability."""
    right = example.choices[int(np.argmax(logprobs))] in example.references
    return float(right), float(logprobs[example.choices.index(example.references[0])])
