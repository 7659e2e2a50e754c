"""Loops: answers that repeat themselves, and whether one model gives more of them than another to the same prompts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from moevolve.search.loop.significance import mcnemar

_ALPHA = 0.05
_GRAM = 4
# Fewest tokens of an answer that can be called a loop.
_FEWEST_TOKENS = 16
# Tokens at the end of an answer that are a loop by themselves: one that begins late is endless, too.
END_TOKENS = 128
# Share of different 4-grams of tokens below which an answer is a loop; pruned models that repeat themselves have less.
_LOOP_RATIO = 0.55


def is_loop(tokens: Sequence[int]) -> bool:
    """Tell whether an answer repeats itself: too few 4-grams of its tokens differ, in all of it or at its end."""
    for part in (tokens, tokens[-END_TOKENS:]):
        grams = [tuple(part[start : start + _GRAM]) for start in range(len(part) - _GRAM + 1)]
        if len(part) >= _FEWEST_TOKENS and len(set(grams)) < _LOOP_RATIO * len(grams):
            return True
    return False


@dataclass(frozen=True, slots=True)
class Loops:
    """Loops among two models' answers to the same prompts of all domains.

    Attributes:
        prompts: Number of prompts that both have answered.
        tokens: Longest answer, in tokens.
        full, shrunk: Number of answers that are loops, of the full model and of the winner.
        low, high: 95 % confidence interval of the winner's share of loops minus the full model's.
        p: One-sided p-value of McNemar's exact test for the winner's share being larger.
        fault: That it is larger, as the end of a sentence that begins with the candidate; None if the test doesn't
            find that.
    """

    prompts: int
    tokens: int
    full: int
    shrunk: int
    low: float
    high: float
    p: float
    fault: str | None = None

    def __str__(self) -> str:
        full, shrunk = self.full / self.prompts, self.shrunk / self.prompts
        return (
            f"Loops among answers of up to {self.tokens} tokens to {self.prompts} held-out prompts: the full model's "
            f"{full:.1%}, the candidate's {shrunk:.1%}, which is {100 * (shrunk - full):+.1f} points "
            f"({100 * self.low:+.1f} to {100 * self.high:+.1f}, p = {self.p:.2g})"
        )


def compared(pairs: Sequence[tuple[bool, bool]], tokens: int) -> Loops:
    """Compare two models.

    Args:
        pairs: Whether the full model's and the candidate's answer to each prompt are loops.
        tokens: Longest answer.
    """
    lost, gained = sum(new and not old for old, new in pairs), sum(old and not new for old, new in pairs)
    full, shrunk = (sum(each) for each in zip(*pairs, strict=True))
    p = mcnemar(lost, gained, "greater")
    low, high = _difference(lost, gained, len(pairs))
    fault = f"repeats itself in {shrunk} of {len(pairs)} answers, the full model in {full} (p = {p:.2g})"
    return Loops(len(pairs), tokens, full, shrunk, low, high, p, fault if p <= _ALPHA else None)


def _difference(lost: int, gained: int, prompts: int) -> tuple[float, float]:
    """95 % interval of a difference of paired shares (Bonett and Price, J. Educ. Behav. Stat. 37, 2012)."""
    mean = (lost - gained) / (prompts + 2)
    half = 1.96 * math.sqrt(((lost + gained + 2) / (prompts + 2) - mean**2) / (prompts + 2))
    return max(-1.0, mean - half), min(1.0, mean + half)
