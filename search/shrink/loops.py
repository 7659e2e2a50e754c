"""Loops: answers that repeat themselves, and whether a model gives more of them than another one, or than is known."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from moevolve.evaluators.metrics import wilson
from moevolve.search.loop.significance import mcnemar

_ALPHA = 0.05
# Share of the full model's own answers that are loops above which these say nothing of another model, and the largest
# increase that may stay unseen without a word: 530 prompts find 3.6 points with a power of 0.8.
_MOST_OWN, _TOLERATED = 0.5, 0.05
_GRAM = 4
# Fewest tokens of an answer that can be called a loop.
_FEWEST_TOKENS = 16
# Tokens at the end of an answer that are a loop by themselves: one that begins late is endless, too.
END_TOKENS = 128
# Share of different 4-grams of tokens below which an answer is a loop; pruned models that repeat themselves have less.
_LOOP_RATIO = 0.55
# Share of loops that no model is refused for, where the full model's own isn't known: GLM-5.2 has 3.6 % of them, and
# pruned 7.2 % (`guard.py`), and another good model may have a few more. By the exact binomial test of 530 answers,
# one-sided at 0.05, a model with 3.6 % is refused with a probability below 0.001, one with 5 % with 0.04, one with
# 7.2 % with 0.67 and one with 10 % with 0.99.
_MOST_LOOPS = 0.05


def is_loop(tokens: Sequence[int]) -> bool:
    """Tell whether an answer repeats itself: too few 4-grams of its tokens differ, in all of it or at its end."""
    for part in (tokens, tokens[-END_TOKENS:]):
        grams = [tuple(part[start : start + _GRAM]) for start in range(len(part) - _GRAM + 1)]
        if len(part) >= _FEWEST_TOKENS and len(set(grams)) < _LOOP_RATIO * len(grams):
            return True
    return False


@dataclass(frozen=True, slots=True)
class Loops:
    """Loops among two models' answers to the same prompts of all domains, or among the winner's alone.

    Attributes:
        prompts: Number of prompts that were answered.
        tokens: Longest answer, in tokens.
        full, shrunk: Number of answers that are loops, of the full model and of the winner; the former is None if the
            full model didn't answer.
        low, high: 95 % confidence interval of the winner's share of loops minus the full model's; of its share alone
            if that is unknown.
        p: One-sided p-value of McNemar's exact test for the winner's share being larger than the full model's, or of
            the exact binomial test for its being larger than a fixed limit.
        fault: That it is larger, as the end of a sentence that begins with the candidate; None if the test doesn't
            find that.
    """

    prompts: int
    tokens: int
    full: int | None
    shrunk: int
    low: float
    high: float
    p: float
    fault: str | None = None

    def __str__(self) -> str:
        answers = f"Loops among answers of up to {self.tokens} tokens to {self.prompts} held-out prompts"
        shrunk = self.shrunk / self.prompts
        if self.full is None:
            return (
                f"The full model did not answer, since it doesn't fit on the device; limits are fixed. {answers}: the "
                f"candidate's {shrunk:.1%} ({100 * self.low:.1f} to {100 * self.high:.1f}, p = {self.p:.2g} for more "
                f"than {_MOST_LOOPS:.0%})"
            )
        full = self.full / self.prompts
        said = (
            f"{answers}: the full model's {full:.1%}, the candidate's {shrunk:.1%}, which is "
            f"{100 * (shrunk - full):+.1f} points ({100 * self.low:+.1f} to {100 * self.high:+.1f}, p = {self.p:.2g})"
        )
        if full > _MOST_OWN:
            return f"{said}. Most of the full model's own answers are loops, so that more can't show: check its prompts"
        if self.fault is None and self.high > _TOLERATED:
            return f"{said}. So few prompts can't show smaller increases; a longer --guard-time asks more"
        return said


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


def counted(loops: Sequence[bool], tokens: int) -> Loops:
    """Compare one model with a fixed limit, by whether its answer to each prompt is a loop; for `tokens` see above."""
    from scipy.stats import binomtest

    shrunk, prompts = sum(loops), len(loops)
    p = float(binomtest(shrunk, prompts, _MOST_LOOPS, alternative="greater").pvalue)
    fault = f"repeats itself in {shrunk} of {prompts} answers, more than {_MOST_LOOPS:.0%} (p = {p:.2g})"
    return Loops(prompts, tokens, None, shrunk, *wilson(shrunk, prompts), p, fault if p <= _ALPHA else None)


def _difference(lost: int, gained: int, prompts: int) -> tuple[float, float]:
    """95 % interval of a difference of paired shares (Bonett and Price, J. Educ. Behav. Stat. 37, 2012)."""
    mean = (lost - gained) / (prompts + 2)
    half = 1.96 * math.sqrt(((lost + gained + 2) / (prompts + 2) - mean**2) / (prompts + 2))
    return max(-1.0, mean - half), min(1.0, mean + half)
