"""Widths of masked layers under one budget of active parameters, met whatever a genome asks for.

Every layer has one or three *widths*: neurons per expert, and with masked heads the kept pairs of query and key
dimensions and the kept value dimensions. The budget is a whole number of parameters, floor(p * all of the masked
parts), routers not counted. Widths never exceed it, and what they leave of it is less than one neuron's parameters:
heads are rounded down first, then neurons take what is left.

The count is the paper's (ToMoE, arXiv 2501.15316, Eq. 8): a value dimension that a token's mask drops is inactive. The
code that runs masks finished values, which saves nothing, unless all tokens keep the same ones: see
`ToMoeSpace.describe` for what a token runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from moevolve.evaluators.errors import UserError
from moevolve.workers.contract.facts import ModelFacts

_LIMIT = 8.0
"""Shares beyond this are cut: exp(8) is more than any two widths differ by."""
_STEPS = 200
_EPS = 1e-9


@dataclass(frozen=True)
class WidthBudget:
    """What widths cost and what they may.

    Attributes:
        layers: decoder layers.
        whole: unmasked widths per layer: neurons, and with masked heads pairs and value dimensions: [1 or 3].
        costs: parameters per unit of each.
        total: most active parameters of all masked parts.
    """

    layers: int
    whole: tuple[int, ...]
    costs: tuple[int, ...]
    total: int

    @classmethod
    def of(cls, facts: ModelFacts, attention: bool, share: float) -> WidthBudget:
        """The budget of a model with dense networks.

        Args:
            facts: the model.
            attention: whether heads are masked too.
            share: p, the active share of the masked parts' parameters.

        Raises:
            UserError: `share` leaves no room for one neuron (and one pair and value) in every layer.
        """
        dense = facts.dense
        assert dense is not None
        matrices = 3 if dense.gated else 2
        whole, costs = [dense.width], [matrices * dense.hidden + (matrices - 1) * dense.bias]
        if attention:
            biased = {linear.name.split(".")[-1] for linear in facts.linears if linear.bias}
            rows = {name: dense.hidden + (f"{name}_proj" in biased) for name in "qkv"}
            pair = 2 * (dense.heads * rows["q"] + dense.key_value_heads * rows["k"])
            value = dense.key_value_heads * rows["v"] + dense.heads * dense.hidden
            whole += [dense.head_dim // 2, dense.head_dim]
            costs += [pair, value]
        everything = dense.layers * sum(w * c for w, c in zip(whole, costs, strict=True))
        # A decimal share is meant as written: 0.1 of 30 is 3.
        total = int(Fraction(str(share)) * everything)
        least = dense.layers * sum(costs)
        if total < least:
            raise UserError(
                f"genome.budget: {share} of {everything:,} parameters is less than the {least:,} of one neuron"
                f"{', pair and value dimension' if attention else ''} per layer"
            )
        return cls(dense.layers, tuple(whole), tuple(costs), total)

    def spent(self, widths: NDArray[np.int64]) -> int:
        """Active parameters of widths [layers, kinds]."""
        return int((widths * np.array(self.costs)).sum())

    def widths(self, shares: NDArray[np.float32]) -> NDArray[np.int64]:
        """Widths by shares: all zero keep the same share of everything, a higher one takes from the others.

        A width is in proportion to exp(share) times the whole, where that lies between one and the whole.

        Args:
            shares: [layers, kinds]; anything finite.

        Returns:
            int64 [layers, kinds], each at least 1.
        """
        strength = np.exp(np.clip(shares.astype(np.float64), -_LIMIT, _LIMIT))
        whole = np.broadcast_to(np.array(self.whole, dtype=np.float64), strength.shape)
        costs = np.broadcast_to(np.array(self.costs, dtype=np.float64), strength.shape)
        wanted = _fill(strength, whole, costs, self.total)
        widths = np.floor(wanted + _EPS).astype(np.int64)
        neurons = self._neurons_left(widths)
        # Neurons can't use up all that the heads' rounding leaves: some heads are rounded up.
        for unit in np.argsort(widths[:, 1:].ravel() - wanted[:, 1:].ravel(), kind="stable").tolist():
            layer, kind = divmod(unit, len(self.whole) - 1)
            if neurons > self.layers * self.whole[0] and widths[layer, kind + 1] < self.whole[kind + 1]:
                widths[layer, kind + 1] += 1
                neurons = self._neurons_left(widths)
        widths[:, 0] = _round(_fill(strength[:, 0], whole[:, 0], np.ones(self.layers), neurons), neurons, self.whole[0])
        return widths

    def _neurons_left(self, widths: NDArray[np.int64]) -> int:
        """Neurons that the budget has room for beside the heads' widths."""
        heads = int((widths[:, 1:] * np.array(self.costs[1:], dtype=np.int64)).sum())
        return (self.total - heads) // self.costs[0]


def _fill(
    strength: NDArray[np.float64], whole: NDArray[np.float64], costs: NDArray[np.float64], total: int
) -> NDArray[np.float64]:
    """Real widths `clip(level * strength * whole, 1, whole)` whose cost is `total`, found by halving."""
    low, high = 0.0, float(1 / strength.min())
    for _ in range(_STEPS):
        level = (low + high) / 2
        spent = float((np.clip(level * strength * whole, 1, whole) * costs).sum())
        low, high = (level, high) if spent <= total else (low, level)
    return np.clip(high * strength * whole, 1, whole)


def _round(wanted: NDArray[np.float64], total: int, whole: int) -> NDArray[np.int64]:
    """Whole widths that sum to `total`, by largest remainder (ties: the lower layer)."""
    widths = np.floor(wanted + _EPS).astype(np.int64)
    while (missing := total - int(widths.sum())) != 0:
        step = 1 if missing > 0 else -1
        room = widths < whole if step > 0 else widths > 1
        urgency = np.where(room, step * (wanted - widths), -np.inf)
        widths[np.argsort(-urgency, kind="stable")[: min(abs(missing), int(room.sum()))]] += step
    return widths
