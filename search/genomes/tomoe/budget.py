"""Widths of masked layers under one budget of active parameters, which is met exactly by construction.

Every layer has one or three *widths*: the number of neurons per expert, and with masked heads the number of kept pairs
of query and key dimensions and of kept value dimensions. The budget is floor(p * parameters of all masked parts),
without routers. Widths use all of it but less than one neuron's parameters: heads are rounded down first, then neurons
use the rest.

The count is the paper's (ToMoE, arXiv 2501.15316, Eq. 8): a value dimension that a token's mask drops is inactive. Our
code computes these values and then masks them, which saves nothing unless all tokens keep the same ones;
`ToMoeSpace.describe` counts the parameters that a token really uses.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from moevolve.evaluators.errors import UserError
from moevolve.search.genomes.contract.operators import divided, rounded
from moevolve.workers.contract.facts import ModelFacts

# Limit on absolute shares: exp(8) exceeds the ratio of any two widths.
_LIMIT = 8.0
# Bisection leaves widths that should be whole a rounding error below.
_EPS = 1e-9


@dataclass(frozen=True)
class WidthBudget:
    """A budget of active parameters for the widths of all layers.

    Attributes:
        layers: Number of decoder layers.
        full_widths: Unmasked widths of a layer: neurons, and with masked heads pairs and value dimensions; 1 or 3.
        unit_costs: Parameters per unit of each width.
        total: Largest number of active parameters of all masked parts.
    """

    layers: int
    full_widths: tuple[int, ...]
    unit_costs: tuple[int, ...]
    total: int

    @classmethod
    def of(cls, facts: ModelFacts, attention: bool, share: float) -> WidthBudget:
        """Make the budget of a model with dense networks, whose heads are masked too with `attention`.

        Raises:
            UserError: `share` is too small for one neuron (and one pair and value dimension) in every layer.
        """
        dense = facts.dense
        assert dense is not None
        full, costs = [dense.width], [dense.neuron_parameters]
        if attention:
            biased = {linear.name.split(".")[-1] for linear in facts.linears if linear.bias}
            rows = {name: dense.hidden + (f"{name}_proj" in biased) for name in "qkv"}
            pair = 2 * (dense.heads * rows["q"] + dense.key_value_heads * rows["k"])
            value = dense.key_value_heads * rows["v"] + dense.heads * dense.hidden
            full += [dense.head_dim // 2, dense.head_dim]
            costs += [pair, value]
        everything = dense.layers * sum(w * c for w, c in zip(full, costs, strict=True))
        # The share is exact as a decimal: 0.1 of 30 is 3.
        total = int(Fraction(str(share)) * everything)
        least = dense.layers * sum(costs)
        if total < least:
            raise UserError(
                f"genome.budget: {share} of {everything:,} parameters is less than the {least:,} of one neuron"
                f"{', pair and value dimension' if attention else ''} per layer"
            )
        return cls(dense.layers, tuple(full), tuple(costs), total)

    def parameters(self, widths: NDArray[np.int64]) -> int:
        """Count the active parameters of widths [layers, 1 or 3]."""
        return int((widths * np.array(self.unit_costs)).sum())

    def widths(self, shares: NDArray[np.float32]) -> NDArray[np.int64]:
        """Convert shares to widths that use up the budget.

        A width is proportional to exp(share) times the full width, clipped to at least 1 and at most the full width.
        With all shares 0, every layer keeps the same proportion.

        Args:
            shares: Finite logarithms of relative widths, [layers, 1 or 3], in the shape of the result.
        """
        strength = np.exp(np.clip(shares.astype(np.float64), -_LIMIT, _LIMIT))
        full = np.broadcast_to(np.array(self.full_widths, dtype=np.float64), strength.shape)
        costs = np.broadcast_to(np.array(self.unit_costs, dtype=np.float64), strength.shape)
        ideal = divided(strength * full, np.ones_like(full), full, costs, self.total)
        widths = np.floor(ideal + _EPS).astype(np.int64)
        neurons = self._neurons_left(widths)
        # If neurons at full width can't use up what rounding the heads down leaves, some heads are rounded up.
        for unit in np.argsort(widths[:, 1:].ravel() - ideal[:, 1:].ravel(), kind="stable").tolist():
            layer, kind = divmod(unit, len(self.full_widths) - 1)
            if neurons > self.layers * self.full_widths[0] and widths[layer, kind + 1] < self.full_widths[kind + 1]:
                widths[layer, kind + 1] += 1
                neurons = self._neurons_left(widths)
        ones = np.ones(self.layers)
        ideal_neurons = divided(strength[:, 0] * full[:, 0], ones, full[:, 0], ones, neurons)
        widths[:, 0] = rounded(ideal_neurons, neurons, 1, self.full_widths[0])
        return widths

    def _neurons_left(self, widths: NDArray[np.int64]) -> int:
        """Return the number of neurons that fit into the budget with the heads' widths."""
        heads = int((widths[:, 1:] * np.array(self.unit_costs[1:], dtype=np.int64)).sum())
        return (self.total - heads) // self.unit_costs[0]
