"""Loops: answers that repeat themselves, and whether one model gives more of them than another to the same prompts.

The test is McNemar's exact one (one-sided, p <= 0.05). Its power is computed as if loops of the two models were
independent, which is the hardest case. With one task and 560 prompts it looks after 70, 140, 280 and 560 of them, and
ends the answers if p <= 0.001, or if p > 0.05 and the 95 % interval of the difference is below 3.6 points.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

_USUAL = 0.036
"""Share of loops that `power` doubles: GLM-5.2's, which pruning from 256 to 168 experts made 7.2 %."""
ALPHA = 0.05
_CLEAR = 0.001
"""p-value that ends the answers early. It is so small that looking several times hardly adds false alarms."""
_DRAWS = 10_000

_GRAM = 4
_FEWEST_TOKENS = 16
"""Fewest tokens of an answer that can be called a loop."""
_END_TOKENS = 128
"""Tokens at the end of an answer that are a loop by themselves: one that begins late is endless, too."""
_LOOP_RATIO = 0.55
"""Share of different 4-grams of tokens below which an answer is a loop; pruned models that repeat themselves have less.
"""


def is_loop(tokens: Sequence[int]) -> bool:
    """Tell whether an answer repeats itself: too few 4-grams of its tokens differ, in all of it or at its end."""
    for part in (tokens, tokens[-_END_TOKENS:]):
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
        p: One-sided p-value of the exact McNemar test for the winner's share being larger.
        power: Probability with which such a test, which may end before all prompts are answered, finds a doubling of
            3.6 %.
        fault: That there are more, as the end of a sentence that begins with the candidate.
    """

    prompts: int
    tokens: int
    full: int
    shrunk: int
    low: float
    high: float
    p: float
    power: float
    fault: str | None = None

    @property
    def more(self) -> float:
        """The winner's share of loops minus the full model's."""
        return (self.shrunk - self.full) / self.prompts

    def judged(self) -> Loops:
        """The same with a fault if the test finds that the winner has more."""
        if self.p > ALPHA:
            return replace(self, fault=None)
        fault = f"repeats itself in {self.shrunk} of {self.prompts} answers, the full model in {self.full}"
        return replace(self, fault=f"{fault} (p = {self.p:.2g})")

    def __str__(self) -> str:
        return (
            f"Loops among answers of up to {self.tokens} tokens to {self.prompts} held-out prompts: the full model's "
            f"{self.full / self.prompts:.1%}, the candidate's {self.shrunk / self.prompts:.1%}, which is "
            f"{100 * self.more:+.1f} points ({100 * self.low:+.1f} to {100 * self.high:+.1f}, p = {self.p:.2g}); a "
            f"doubling of {_USUAL:.1%} would be found with a probability of {self.power:.2f}"
        )


def compared(pairs: Sequence[tuple[bool, bool]], tokens: int, looks: Sequence[int]) -> Loops:
    """Compare two models.

    Args:
        pairs: Whether the full model's and the candidate's answer to each prompt are loops.
        tokens: Longest answer.
        looks: Numbers of prompts at which the answers could have ended.
    """
    lost, gained = discordant(pairs)
    full, shrunk = (sum(each) for each in zip(*pairs, strict=True))
    low, high = difference(lost, gained, len(pairs))
    return Loops(len(pairs), tokens, full, shrunk, low, high, p_value(lost, gained), power(looks))


def discordant(pairs: Sequence[tuple[bool, bool]]) -> tuple[int, int]:
    """Numbers of prompts to which only the candidate's answer is a loop, and only the full model's."""
    return sum(new and not old for old, new in pairs), sum(old and not new for old, new in pairs)


@cache
def p_value(lost: int, gained: int) -> float:
    """One-sided p-value of McNemar's test in its exact, binomial form, for `lost` being larger by chance alone."""
    differing = lost + gained
    return sum(math.comb(differing, count) for count in range(lost, differing + 1)) / 2**differing


def difference(lost: int, gained: int, prompts: int) -> tuple[float, float]:
    """95 % interval of a difference of paired shares (Bonett and Price, J. Educ. Behav. Stat. 37, 2012)."""
    mean = (lost - gained) / (prompts + 2)
    half = 1.96 * math.sqrt(((lost + gained + 2) / (prompts + 2) - mean**2) / (prompts + 2))
    return max(-1.0, mean - half), min(1.0, mean + half)


def looks_at(most: int, least: int) -> list[int]:
    """Numbers of prompts after which the answers may end: `most`, and its halves down to `least`."""
    looks = [most]
    while looks[0] // 2 >= least:
        looks.insert(0, looks[0] // 2)
    return looks


def is_clear(lost: int, gained: int, prompts: int) -> bool:
    """Whether further prompts are needless: there are more loops, or certainly not as many more as a doubling adds."""
    p = p_value(lost, gained)
    return p <= _CLEAR or (p > ALPHA and difference(lost, gained, prompts)[1] < _USUAL)


def power(looks: Sequence[int], full: float = _USUAL, shrunk: float = 2 * _USUAL, both: float | None = None) -> float:
    """Probability of finding more loops, from 10,000 seeded draws.

    Args:
        looks: See `compared`.
        full, shrunk: Shares of loops of the two models.
        both: Share of prompts to which both answer with a loop. By default the models loop independently, which is the
            hardest case: the more prompts make both of them loop, the fewer differ by chance.
    """
    both = full * shrunk if both is None else both
    shares = [shrunk - both, full - both, 1 - shrunk - full + both]
    rng = np.random.default_rng(0)
    drawn = rng.multinomial(np.diff([0, *looks]), shares, size=(_DRAWS, len(looks)))[:, :, :2].cumsum(axis=1)
    found = 0
    for path in drawn.tolist():
        for (lost, gained), prompts in zip(path, looks, strict=True):
            if is_clear(lost, gained, prompts):
                break
        found += p_value(lost, gained) <= ALPHA
    return found / _DRAWS
