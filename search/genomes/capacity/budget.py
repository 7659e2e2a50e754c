"""How wide kept experts are, and how layers share a total of active experts."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moevolve.search.genomes.contract.operators import divided, rounded
from moevolve.workers.contract.facts import ModelFacts

# Fewest steps in a width, since rounding down loses up to one of them.
_STEPS = 32
# Shares and means may fall short of a whole number by a rounding error.
_EPS = 1e-9


@dataclass(frozen=True, slots=True)
class Budget:
    """The numbers of active experts that layers may have.

    Attributes:
        layers: Number of layers.
        total: Sum of the layers' numbers.
        most: Largest number of a layer; the smallest is 1.
    """

    layers: int
    total: int
    most: int

    @property
    def mean(self) -> float:
        return self.total / self.layers

    def sizes(self, logs: NDArray[np.floating]) -> tuple[int, ...]:
        """Divide the total among the layers in proportion to exp(logs), float [layers], within the bounds."""
        weights, ones = np.exp(np.clip(logs.astype(np.float64), -10, 10)), np.ones(len(logs))
        ideal = divided(weights, ones, self.most * ones, ones, self.total)
        return tuple(rounded(ideal, self.total, 1, self.most).tolist())


def active_budget(mean: float, retained: int, facts: ModelFacts) -> Budget:
    """Return the numbers of active experts of so many kept ones: the largest total whose mean is at most the given one.

    No layer has more than a token can choose from, nor more than in the unedited model, or than the mean rounded up if
    that is more.
    """
    reach, layers = facts.rule.groups.reach(retained), len(facts.moe_layers)
    total = min(int(layers * mean + _EPS), layers * reach)
    return Budget(layers, total, min(reach, max(facts.active, math.ceil(total / layers))))


def width_step(neurons: int, mean: float) -> int:
    """Return the step of widths for original experts of so many neurons, of which a mean width has at least 32.

    It is a power of 2 that divides an original expert's width, at most 64, and at least 8 where possible, even if the
    mean width has fewer steps then.
    """
    most = max(8, mean / _STEPS)
    return max(step for step in (1, 2, 4, 8, 16, 32, 64) if neurons % step == 0 and step <= most)


def even_width(share: float, neurons: int) -> int:
    """Return the largest number of whole steps within a share of `neurons`; 0 if it is less than one step."""
    width = share * neurons + _EPS
    step = width_step(neurons, width)
    return int(width / step) * step
