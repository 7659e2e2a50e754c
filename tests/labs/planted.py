"""A planted landscape of pruning: models of any size without weights, in which what experts are worth is known.

Every expert has a value for each domain. Values have heavy tails; experts of a layer stand in for each other within
clusters; what a layer loses is what no kept expert stands in for, as a share of all (a facility-location function,
so that values don't add up); and layers' losses compound to the gap `log(perplexity / full)`. Fitness reads values as
`ROWS` rows of text show them, which is what a search overfits to, and calibration statistics see values through
routing weights and norms that don't tell all. The constants are fitted to pruning by REAP, by frequency and at random,
all layers and single ones, of a language model on real text (six layers, 8, 16 and 24 of 32 experts).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from moevolve.workers.contract.edits import Calibration, Edit
from moevolve.workers.methods.eep.edit import EepEdit

Floats = NDArray[np.float64]

# Standard deviations, over a layer's experts, of the logarithms of how often an expert is chosen, of the norm of its
# weighted output, of what neither tells about its value, and of how much a few rows of text misjudge that.
_USAGE, _NORM, _HIDDEN, _ROWS = 1.2, 0.5, 0.9, 0.3
# Correlation of the first two, and the powers with which they enter the value. With these, frequency and REAP choose
# equally well, and their product a little better.
_USAGE_AND_NORM, _POWERS = 0.6, (0.6, 1.3)
# Correlation of two domains' logarithms: rankings of experts by code and by prose hardly correlate.
_BETWEEN_DOMAINS = 0.1
# How much of what an expert does another one of its cluster, and any other, does in its place; experts in a cluster.
_WITHIN_CLUSTER, _ANYWHERE, _CLUSTER = (0.0, 0.4), 0.05, 3
# Gap if no layer keeps an expert, and the power to which the mean of the layers' losses is raised.
_WHOLE, _COMPOUND = 2.9, 1.1
# Standard deviation of the logarithms of the layers' weights.
_LAYERS = 0.6


@dataclass(frozen=True)
class PlantedModel:
    """One model.

    Attributes:
        layers, experts: Sizes of the model.
        domains: Number of domains of text; fitness is the mean over them.
        seed: Seed of all that is drawn.
    """

    layers: int
    experts: int
    domains: int = 1
    seed: int = 0

    def gaps(self, edit: Edit, split: str = "test") -> Floats:
        """Return `log(perplexity / full)` of every domain on `search` or on `test`: float64 [domains]."""
        assert isinstance(edit, EepEdit)
        kept = edit.expert_merging.argmax(axis=2)
        stand_in = np.take_along_axis(self._similarity, kept[:, None, :], axis=2).max(axis=2)
        values = self.values if split == "test" else self._seen
        lost = (values * (1 - stand_in)).sum(axis=2) / values.sum(axis=2)
        return _WHOLE * (lost @ self._layer_weights) ** _COMPOUND

    @cached_property
    def values(self) -> Floats:
        """What experts are worth: float64 [domains, layers, n]."""
        usage, norm = self._logs["usage"], self._logs["norm"]
        return np.exp(_POWERS[0] * usage + _POWERS[1] * norm + self._logs["hidden"])

    @cached_property
    def calibration(self) -> Calibration:
        """What is measured on calibration rows: `counts`, `importance_sums` and `pair_norms`."""
        usage, root = np.exp(self._logs["usage"]), np.exp(self._logs["norm"] / 2)[..., None, None]
        counts = np.round(usage / usage.sum(axis=2, keepdims=True) * 8 * 8192)
        powers = np.arange(3)
        # Half of the logarithm of the weighted norm is the routing weight's, half the output norm's.
        sums = counts[..., None, None] * root ** (powers[:, None] + powers)
        together = sums.sum(axis=0)
        strength = together[:, :, 1, 1] / np.sqrt(np.maximum(together[:, :, 0, 0], 1))
        return Calibration(
            {
                "counts": counts.sum(axis=0).astype(np.int64),
                "importance_sums": together,
                "pair_norms": strength[:, :, None] * strength[:, None, :],
            }
        )

    @cached_property
    def _logs(self) -> dict[str, Floats]:
        rng, shape = np.random.default_rng([self.seed, 0]), (self.domains, self.layers, self.experts)

        def drawn() -> Floats:
            shared, own = rng.standard_normal(shape[1:]), rng.standard_normal(shape)
            return np.sqrt(_BETWEEN_DOMAINS) * shared + np.sqrt(1 - _BETWEEN_DOMAINS) * own

        usage, other = drawn(), drawn()
        norm = _USAGE_AND_NORM * usage + np.sqrt(1 - _USAGE_AND_NORM**2) * other
        hidden, rows = drawn(), rng.standard_normal(shape)
        return {"usage": _USAGE * usage, "norm": _NORM * norm, "hidden": _HIDDEN * hidden, "rows": _ROWS * rows}

    @cached_property
    def _seen(self) -> Floats:
        return self.values * np.exp(self._logs["rows"])

    @cached_property
    def _similarity(self) -> Floats:
        """How well an expert (last axis) stands in for another: float64 [layers, n, n]."""
        rng = np.random.default_rng([self.seed, 1])
        clusters = rng.integers(-(-self.experts // _CLUSTER), size=(self.layers, self.experts))
        drawn = rng.uniform(*_WITHIN_CLUSTER, size=(self.layers, self.experts, self.experts))
        similarity = np.where(clusters[:, :, None] == clusters[:, None, :], drawn, _ANYWHERE)
        similarity[:, np.arange(self.experts), np.arange(self.experts)] = 1
        return similarity

    @cached_property
    def _layer_weights(self) -> Floats:
        drawn = np.exp(np.random.default_rng([self.seed, 2]).normal(0, _LAYERS, self.layers))
        weights: Floats = drawn / drawn.sum()
        return weights
