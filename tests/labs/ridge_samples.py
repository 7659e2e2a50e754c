"""Layers to fit: features in blocks and as one matrix, and what is solved for in float64."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moevolve.workers.methods.repair.ridge import Fit, LayerSystem, fit_ridge
from moevolve.workers.methods.shared.outputs import FeatureBlock

MEMORY = 1 << 30
Floats = NDArray[np.float64]


def to_float32(array: Floats) -> Tensor:
    return torch.from_numpy(array.astype(np.float32))


@dataclass(frozen=True)
class Blocks:
    """Features stored in memory."""

    parts: tuple[FeatureBlock, ...]
    width: int

    def blocks(self, memory: int) -> Iterator[FeatureBlock]:
        yield from self.parts


@dataclass(frozen=True)
class Problem:
    """Features in blocks and as one matrix, the residual, and the mask of held-out tokens."""

    features: Blocks
    phi: Floats
    residual: Floats
    checked: NDArray[np.bool_]

    def fit(self, ridge_lambdas: Sequence[float], memory: int = MEMORY) -> Fit | None:
        return fit_ridge(self.system(), ridge_lambdas, memory)

    def system(self, token_weights: Floats | None = None) -> LayerSystem:
        return LayerSystem(
            self.features,
            to_float32(self.residual),
            torch.from_numpy(self.checked),
            None if token_weights is None else to_float32(token_weights),
        )

    def error(self, change: Floats) -> float:
        """Squared error on the held-out tokens."""
        return float(((self.residual - self.phi @ change)[self.checked] ** 2).sum())

    def solved(self, ridge_lambda: float) -> Floats:
        """The change of one ridge_lambda, from the normal equations."""
        phi = self.phi[~self.checked]
        gram = phi.T @ phi
        ridge = ridge_lambda * np.diag(gram).mean() * np.eye(phi.shape[1])
        return np.linalg.solve(gram + ridge, phi.T @ self.residual[~self.checked])

    def change(self, fit: Fit) -> Floats:
        """All columns' change."""
        whole = np.zeros((self.features.width, self.residual.shape[1]))
        for block in self.features.parts:
            whole[block.columns] = fit.change(block).numpy()
        return whole


def problem(seed: int, tokens: int, widths: Sequence[int], hidden: int, share: float, noise: float = 0.3) -> Problem:
    """Blocks of columns that are nonzero on a share of the tokens; the residual is linear in them up to noise."""
    rng = np.random.default_rng(seed)
    phi, parts, start = np.zeros((tokens, sum(widths))), [], 0
    for width in widths:
        at = np.flatnonzero(rng.random(tokens) < share)
        values = rng.standard_normal((len(at), width)).astype(np.float32)
        columns = slice(start, start + width)
        phi[at, columns] = values
        if len(at):
            parts.append(FeatureBlock(columns, torch.from_numpy(at), torch.from_numpy(values)))
        start += width
    residual = phi @ rng.standard_normal((phi.shape[1], hidden)) + noise * rng.standard_normal((tokens, hidden))
    checked = rng.permutation(np.arange(tokens) < max(1, tokens // 8))
    return Problem(Blocks(tuple(parts), phi.shape[1]), phi, residual.astype(np.float32).astype(np.float64), checked)
