"""A strategy that learns which parts of genomes are worth having: Thompson sampling in a Bayesian linear model.

The model is of what individuals scored, on features of their genomes: which parts they have, where genomes are a choice
among parts (`SubsetSpace`); phases of other genomes are evolution's. A child is the best one
by a draw of the weights from their posterior, so that uncertain parts are tried as often as they may be the best ones.

Sources: Bayesian linear regression as in Bishop, Pattern Recognition and Machine Learning (2006), Sec. 3.3; with
Thompson sampling of binary choices it is BOCS (Baptista and Poloczek, arXiv 1806.08838), there on products of pairs,
too. Weights are drawn as in Bhattacharya, Chakraborty and Mallick (arXiv 1506.04778), which takes as many equations as
there are individuals or features, whichever are fewer. The target and the shares of bred children are from trials of
our own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moevolve.search.genomes.contract.base import GenomeSpace, Offspring, SubsetSpace
from moevolve.search.genomes.contract.rng import generator
from moevolve.search.settings.phases import PhaseConfig, SurrogateSection
from moevolve.search.strategies.base import DRAWS
from moevolve.search.strategies.evolution import Evolution
from moevolve.store.records import IndividualRecord

Floats = NDArray[np.float64]
Made = Offspring[Any] | None
_WIDER = 1.2
"""How much further from the mean every draw goes that follows a repeat."""


@dataclass(frozen=True)
class LinearPosterior:
    """Weights w of `targets = features @ w + noise`, known up to a normal distribution.

    A priori they are independent, N(0, 1 / precision).

    Attributes:
        features: float64 [individuals, features].
        targets: float64 [individuals].
        precision: of the prior.
        noise: standard deviation of the noise.
    """

    features: Floats
    targets: Floats
    precision: float
    noise: float

    @property
    def mean(self) -> Floats:
        """Expected weights: float64 [features]."""
        return self._fit(self.targets)

    def draw(self, rng: np.random.Generator) -> Floats:
        """Weights drawn from the posterior: float64 [features].

        A draw of weights and noise from the prior, moved by what the targets say otherwise, is one of the posterior.
        """
        individuals, features = self.features.shape
        weights = rng.standard_normal(features) / np.sqrt(self.precision)
        said = self.features @ weights + self.noise * rng.standard_normal(individuals)
        return weights + self._fit(self.targets - said)

    def _fit(self, targets: Floats) -> Floats:
        """Ridge regression: (X'X + r)^-1 X't = X'(XX' + r)^-1 t."""
        x = self.features
        return x.T @ (self._inverse @ targets) if self._wide else self._inverse @ (x.T @ targets)

    @property
    def _wide(self) -> bool:
        individuals, features = self.features.shape
        return individuals < features

    @cached_property
    def _inverse(self) -> Floats:
        x = self.features
        products = x @ x.T if self._wide else x.T @ x
        ridge = self.precision * self.noise**2
        return np.asarray(np.linalg.inv(products + ridge * np.eye(len(products))), dtype=np.float64)


class Surrogate:
    """The strategy `surrogate` in one phase.

    Initial individuals, a share of the children, and all children as long as nothing is known, are evolution's.

    Args:
        space: where genomes come from.
        phase: its settings.
        section: the strategy's.
        seed: the search's seed.
        first: index of the phase's first individual.
    """

    def __init__(
        self, space: GenomeSpace[Any], phase: PhaseConfig, section: SurrogateSection, seed: int, first: int = 0
    ) -> None:
        self._space = space
        self._phase = phase
        self._section = section
        self._seed = seed
        self._evolution = Evolution(space, phase, seed, first)
        self._chooses = isinstance(space, SubsetSpace) and space.selects_subset(phase)
        self._told: deque[IndividualRecord] = deque(maxlen=section.memory)
        self._features: dict[int, Floats] = {}

    def tell(self, individual: IndividualRecord) -> None:
        """A failed one says nothing: what it would have scored is unknown."""
        self._evolution.tell(individual)
        if individual.fitness is None:
            return
        if len(self._told) == self._section.memory:
            self._features.pop(self._told[0].index, None)
        self._told.append(individual)

    def tell_before(self, individual: IndividualRecord) -> None:
        """The model is of its own phase; evolution's parents may be of others."""
        self._evolution.tell_before(individual)

    def skip(self, index: int, initial: bool, start: IndividualRecord | None) -> None:
        """Nothing to do: what is made leaves no trace here."""

    def ask(self, index: int, initial: bool, start: IndividualRecord | None, taken: Container[str]) -> Offspring[Any]:
        """See `PhaseStrategy`; what would repeat an earlier individual is left to evolution."""
        rng = generator(self._seed, index, "surrogate")
        made = None
        if self._chooses and not initial and len(self._told) > 1 and rng.random() >= self._section.bred:
            made = self._learned(rng, taken)
        return made or self._evolution.ask(index, initial, start, taken)

    def _learned(self, rng: np.random.Generator, taken: Container[str]) -> Made:
        """The best genome of all by a draw of the weights. It is made from no one in particular, so has no parents.

        Draws that repeat an earlier individual are followed by ones ever further from the mean.
        """
        features = np.stack([self._features_of(one) for one in self._told])
        centred = features - features.mean(axis=0)
        precision = float(centred.var(axis=0).sum() or 1.0) / self._section.signal**2
        model = LinearPosterior(centred, targets_of(self._told), precision, self._section.noise)
        mean = model.mean
        for repeats in range(DRAWS):
            weights = mean + _WIDER**repeats * (model.draw(rng) - mean)
            genome = self._space.unflatten(weights, self._phase)
            if genome.express().phenotype_hash not in taken:
                return Offspring(genome, "surrogate", (), f"learned from {len(self._told)}")
        return None

    def _features_of(self, individual: IndividualRecord) -> Floats:
        found = self._features.get(individual.index)
        if found is None:
            found = self._space.flatten(self._space.from_bytes(individual.genome), self._phase)
            self._features[individual.index] = found
        return found


def targets_of(individuals: Sequence[IndividualRecord]) -> Floats:
    """What the model is fitted to: normal scores of fitness plus those of the tie-break; float64 [individuals].

    The normal score of a value is the normal quantile of its rank among all (ties: the mean rank): a few broken
    candidates far below the others would take most of a standard deviation for themselves. The tie-break, mostly the
    mean gold log-probability, tells apart what the fitness doesn't.
    """
    return _normal_scores([one.fitness for one in individuals]) + _normal_scores([one.tie_break for one in individuals])


def _normal_scores(values: Sequence[float | None]) -> Floats:
    _, places, counts = np.unique(np.array(values, dtype=np.float64), return_inverse=True, return_counts=True)
    middles = (np.cumsum(counts) - counts / 2) / len(values)
    return np.array([NormalDist().inv_cdf(middle) for middle in middles])[places]
