"""How scores are shown: in %, of right answers or of agreement, or as perplexities."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

ScaleName = Literal["percent", "agreement", "perplexity"]


@dataclass(frozen=True, slots=True)
class Scale:
    """How scores in [0, 1] (larger is better) are shown.

    Attributes:
        title: Words for the heading of a table or the label of an axis, with the unit and the better direction.
        unit: Unit after a number.
        differences: Words that say how differences are shown.
        is_reciprocal: True if 1 / score is shown (smaller is better), False for 100 * score.
    """

    title: str
    unit: str
    differences: str
    is_reciprocal: bool = False

    def value(self, score: float) -> float:
        """Return the number that is shown; infinity for the reciprocal of 0 or less."""
        if not self.is_reciprocal:
            return 100 * score
        return 1 / score if score > 0 else math.inf

    def text(self, score: float | None) -> str:
        """Format a score for a table of scores in %, where only other units are named; `-` for None."""
        if score is None or not self.is_reciprocal:
            return "-" if score is None else f"{self.value(score):.1f}"
        return f"{_digits(self.value(score))} {self.unit}"

    def phrase(self, score: float | None) -> str:
        """Format a score for a sentence, with its unit; `-` for None."""
        return f"{self.text(score)} %" if score is not None and not self.is_reciprocal else self.text(score)

    def interval(self, low: float, high: float) -> str:
        """Format the ends of an interval of scores, the smaller number first."""
        ends = sorted(map(self.value, (low, high)))
        return " - ".join(map(_digits if self.is_reciprocal else "{:.1f}".format, ends))

    def spread(self, score: float, deviation: float) -> str:
        """Format a standard deviation of scores around a score; of a reciprocal, to first order."""
        if not self.is_reciprocal:
            return f"{100 * deviation:.1f}"
        return _digits(deviation / score**2 if score > 0 else math.inf)

    def additive(self, score: float) -> float:
        """Return the number whose differences `change` takes: the score, or its logarithm if `is_reciprocal`."""
        return math.log(max(score, _LEAST)) if self.is_reciprocal else score

    def change(self, difference: float | None) -> str:
        """Format a difference of `additive`: in points with its sign, or as a ratio of the numbers shown; `-` for None.

        A ratio is below 1 where the second of two perplexities is lower, and so better.
        """
        if difference is None:
            return "-"
        return f"{math.exp(-difference):.2f}x" if self.is_reciprocal else f"{100 * difference:+.1f}"

    def changes(self, low: float, high: float) -> str:
        """Format the ends of an interval of differences, the smaller number first."""
        return " to ".join(map(self.change, (high, low) if self.is_reciprocal else (low, high)))


# Smallest score whose logarithm is taken.
_LEAST = 1e-12

# All scales by name.
SCALES: dict[ScaleName, Scale] = {
    "percent": Scale("score in %", "%", "in points"),
    "agreement": Scale("agreement with the full model in %", "%", "in points"),
    "perplexity": Scale(
        "perplexity (ppl), lower is better",
        "ppl",
        "as ratios of perplexities, below 1 is better",
        is_reciprocal=True,
    ),
}


def common_scale(names: Iterable[ScaleName]) -> ScaleName:
    """Return the scale of a mean over scores: the one that they share, or else `percent`."""
    found = set(names)
    return found.pop() if len(found) == 1 else "percent"


def scales_title(names: Iterable[ScaleName]) -> str:
    """Return the words for a heading of scores that are shown on these scales."""
    found = set(names) or {"percent"}
    return "; ".join(scale.title for name, scale in SCALES.items() if name in found)


def _digits(value: float) -> str:
    """At least four digits: the perplexities of small tasks differ in the third."""
    if value >= 1000:
        return f"{value:,.0f}" if math.isfinite(value) else "infinite"
    return f"{value:.2f}" if value >= 10 else f"{value:.3f}"
