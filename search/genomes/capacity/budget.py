"""What layers share under a total that is the same for all candidates: neurons of kept experts, and active experts."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moevolve.search.genomes.contract.operators import divided, rounded
from moevolve.workers.contract.facts import ModelFacts

# Bounds of a layer's width, as multiples of the mean width. They limit the memory of the largest fit.
_NARROWEST, _WIDEST = 0.25, 2.5
# Fewest steps in a mean width. Rounding all layers down loses up to one step of each, so that it takes finer ones.
_STEPS, _EVEN_STEPS = 8, 32
# Shares and means may fall short of a whole number by a rounding error.
_EPS = 1e-9


@dataclass(frozen=True, slots=True)
class Budget:
    """The sizes that layers may have.

    Attributes:
        layers: Number of layers.
        total: Sum of the layers' sizes, in steps.
        least, most: Smallest and largest size of a layer, in steps.
        step: Number in which sizes change.
    """

    layers: int
    total: int
    least: int
    most: int
    step: int = 1

    @property
    def mean(self) -> float:
        return self.step * self.total / self.layers

    @property
    def largest(self) -> int:
        return self.step * self.most

    def sizes(self, logs: NDArray[np.floating]) -> tuple[int, ...]:
        """Divide the total among the layers in proportion to exp(logs), float [layers], within the bounds."""
        weights, ones = np.exp(np.clip(logs.astype(np.float64), -10, 10)), np.ones(len(logs))
        ideal = divided(weights, self.least * ones, self.most * ones, ones, self.total)
        return tuple(self.step * each for each in rounded(ideal, self.total, self.least, self.most).tolist())


def width_budget(share: float, retained: int, facts: ModelFacts, equal: bool = False) -> Budget:
    """Return the widths with which so many kept experts have a share of the neurons of all experts of a model.

    With a share of n' / n the mean width is exactly that of an original expert. Otherwise the total is the largest
    number of steps within the share, or if layers are to be `equal`, the largest that they divide evenly.
    """
    neurons, layers = facts.expert_neurons, len(facts.moe_layers)
    mean = share * facts.experts * neurons / retained + _EPS
    step = width_step(neurons, mean, _EVEN_STEPS if equal else _STEPS)
    widest = facts.experts * neurons // (retained * step)
    total = min(layers * int(mean / step) if equal else int(layers * mean) // step, layers * widest)
    even = total / layers
    most = max(min(widest, int(_WIDEST * even)), math.ceil(even))
    return Budget(layers, total, max(1, int(_NARROWEST * even)), most, step)


def active_budget(mean: float, retained: int, facts: ModelFacts) -> Budget:
    """Return the numbers of active experts of so many kept ones: the largest total whose mean is at most the given one.

    No layer has more than a token can choose from, nor more than in the unedited model, or than the mean rounded up if
    that is more.
    """
    reach, layers = facts.rule.groups.reach(retained), len(facts.moe_layers)
    total = min(int(layers * mean + _EPS), layers * reach)
    return Budget(layers, total, 1, min(reach, max(facts.active, math.ceil(total / layers))))


def width_step(neurons: int, mean: float, steps: int) -> int:
    """Return the step of widths for original experts of so many neurons, and a mean width of at least so many steps.

    It is a power of 2 that divides an original expert's width, at most 64, and at least 8 where possible, even if the
    mean width has fewer steps then.
    """
    return max(step for step in (1, 2, 4, 8, 16, 32, 64) if neurons % step == 0 and (step <= 8 or steps * step <= mean))


def even_width(share: float, neurons: int) -> int:
    """Return the largest number of steps within a share of `neurons`; 0 if it is less than one step."""
    width = share * neurons + _EPS
    step = width_step(neurons, width, _EVEN_STEPS)
    return int(width / step) * step
