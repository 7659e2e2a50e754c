"""A strategy that learns the value of each part of a genome: Thompson sampling in a Bayesian linear model.

The model predicts scores from the parts that a genome has, in phases whose genomes choose parts, such
as kept experts. A child is the best genome under weights drawn from their posterior, so each part is tried as often as
it may be among the best. How far a draw is from the mean is scaled by a number between 0 and 1, drawn for each child:
with many more parts than scores, whole draws would choose almost at random.

Sources: Bayesian linear regression as in Bishop, Pattern Recognition and Machine Learning (2006), Sec. 3.3; with
Thompson sampling of binary choices it is BOCS (Baptista and Poloczek, arXiv 1806.08838), which also has products of
pairs. Weights are drawn as in Bhattacharya, Chakraborty and Mallick (arXiv 1506.04778), by solving as many equations as
there are individuals or features, whichever are fewer. The target and the share of evolution were chosen by trials.

What the calibration says of the parts (`GenomeSpace.importance`) enters as further features: the sum of each statistic
over a genome's parts. So a few scores tell which statistics to trust, where there are many more parts than scores.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist

import numpy as np

from moevolve.evaluators.types import Floats
from moevolve.search.genomes.contract.base import Child, Genome, GenomeSpace, Offspring
from moevolve.search.genomes.contract.operators import generator
from moevolve.search.genomes.contract.phases import PhaseConfig
from moevolve.search.strategies.base import DRAWS, PhaseStrategy
from moevolve.search.strategies.evolution import Evolution
from moevolve.store.records import IndividualRecord

# Share of the children that evolution makes: the best of those that were tried.
_EVOLUTION_SHARE = 0.3
# Number of newest individuals that the model is fitted to, which bounds the time to make a child.
_MEMORY = 1000
# Prior standard deviation of the model's prediction, for any number of features. Both this and `_NOISE` are near the
# maximum of the marginal likelihood of pruning a small MoE (6 layers, 2 of 8 experts, 31 to 190 individuals), where
# the targets' own standard deviation is between 1.4 and 2.
_SIGNAL = 1.0
# Standard deviation of the targets around the model; mostly interactions, which a sum over parts lacks.
_NOISE = 0.7
# Prior standard deviation of a calibration statistic's contribution to the prediction. Pruning a small MoE
# (5 layers, 8 of 32 experts), the marginal likelihood hardly depends on it between 0.3 and 1.
_TRUST = 0.7
# Spread of a statistic's sums below which all individuals have the same sum, but for rounding.
_LEVEL = 1e-9
# Least share of a draw's deviation from the mean that a child has.
_LEAST_EXPLORED = 0.2
# Factor by which each draw after a repeated individual deviates further from the mean.
_WIDER = 1.2


@dataclass(frozen=True)
class LinearPosterior:
    """The normal posterior of the weights w in `targets = features @ w + noise`, with the prior N(0, 1 / precision).

    Attributes:
        features: Float64 [individuals, features].
        targets: Float64 [individuals].
        precision: Prior precision of each weight.
        noise: Standard deviation of the noise.
    """

    features: Floats
    targets: Floats
    precision: float
    noise: float

    @property
    def mean(self) -> Floats:
        """The expected weights: float64 [features]."""
        return self._fit(self.targets)

    def draw(self, rng: np.random.Generator) -> Floats:
        """Weights drawn from the posterior: float64 [features].

        A draw of weights and noise from the prior, corrected by the fit of its residual to the targets, is a draw from
        the posterior (arXiv 1506.04778).
        """
        individuals, features = self.features.shape
        weights = rng.standard_normal(features) / np.sqrt(self.precision)
        predicted = self.features @ weights + self.noise * rng.standard_normal(individuals)
        return weights + self._fit(self.targets - predicted)

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


class Surrogate(PhaseStrategy):
    """The strategy `surrogate` in one phase.

    Evolution makes the initial individuals, a share of the children, and all children before two scores are known.
    """

    def __init__(self, space: GenomeSpace[Genome], phase: PhaseConfig, seed: int, first: int = 0) -> None:
        super().__init__(space, phase, seed, first)
        self._evolution = Evolution(space, phase, seed, first)
        self._chooses = space.selects_subset(phase)
        self._history: deque[tuple[IndividualRecord, Floats]] = deque(maxlen=_MEMORY)

    def tell(self, individual: IndividualRecord) -> None:
        """Add one evaluated individual to the history; failed ones have no score to learn from."""
        self._evolution.tell(individual)
        if self._chooses and individual.fitness is not None:
            genome = self._space.from_bytes(individual.genome)
            self._history.append((individual, self._space.flatten(genome, self._phase)))

    def tell_before(self, individual: IndividualRecord) -> None:
        """Pass individuals of earlier phases to evolution; the model is fitted to its own phase only."""
        self._evolution.tell_before(individual)

    def ask(self, index: int, initial: bool, start: IndividualRecord | None, taken: Container[str]) -> Child:
        """Make a child by the model, or by evolution if the model only repeats earlier individuals."""
        rng = generator(self._seed, index, "surrogate")
        made = None
        if self._chooses and not initial and len(self._history) > 1 and rng.random() >= _EVOLUTION_SHARE:
            made = self._learned(rng, taken)
        return made or self._evolution.ask(index, initial, start, taken)

    def _learned(self, rng: np.random.Generator, taken: Container[str]) -> Child | None:
        """Return the best genome under drawn weights, without parents; None if all draws repeat earlier individuals."""
        features = np.stack([each for _, each in self._history])
        targets = targets_of([individual for individual, _ in self._history])
        centred = features - features.mean(axis=0)
        precision = float(centred.var(axis=0).sum() or 1.0) / _SIGNAL**2
        spread = (centred @ self._importance.T).std(axis=0)
        varied = spread > _LEVEL
        directions = self._importance[varied] * (_TRUST * np.sqrt(precision) / spread[varied])[:, None]
        # Weights of parts, then of statistics, all with the same prior: a statistic is scaled to that.
        model = LinearPosterior(np.hstack([centred, centred @ directions.T]), targets, precision, _NOISE)
        mean, parts = model.mean, features.shape[1]
        # From no exploration to Thompson sampling, whose draws are nearly random where there are many parts.
        explored = rng.uniform(_LEAST_EXPLORED, 1)
        for repeats in range(DRAWS):
            weights = mean + explored * _WIDER**repeats * (model.draw(rng) - mean)
            genome = self._space.unflatten(weights[:parts] + weights[parts:] @ directions, self._phase)
            if genome.express().phenotype_hash not in taken:
                return Offspring(genome, "surrogate", (), f"learned from {len(self._history)}")
        return None

    @cached_property
    def _importance(self) -> Floats:
        """What the calibration says of the parts, as normal scores: float64 [statistics, parts]."""
        known = self._space.importance(self._phase)
        return np.array([_normal_scores(row) for row in known], dtype=np.float64).reshape(known.shape)


def targets_of(individuals: Sequence[IndividualRecord]) -> Floats:
    """Return the model's targets: normal scores of fitness plus those of the tie-break, float64 [individuals].

    The normal score of a value is the normal quantile of its rank among all (ties: the mean rank). Unlike standardised
    values, it keeps a few broken candidates from dominating the scale. The tie-break, usually the mean gold
    log-probability, separates equal fitnesses.
    """
    return _normal_scores([one.fitness for one in individuals]) + _normal_scores([one.tie_break for one in individuals])


def _normal_scores(values: Sequence[float | None] | Floats) -> Floats:
    _, places, counts = np.unique(np.array(values, dtype=np.float64), return_inverse=True, return_counts=True)
    middles = (np.cumsum(counts) - counts / 2) / len(values)
    return np.array([NormalDist().inv_cdf(middle) for middle in middles])[places]
