"""Second moments of layers' inputs in float64, ridge regression on them, and their principal directions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch
from torch import Tensor

from moevolve.workers.methods.shared.spectra import leading_eigenvectors

T = TypeVar("T")

# Bytes of statistics held at once. Calibrations measure layers in as many passes as that takes.
STATISTICS_MEMORY = 1 << 30
# Inputs don't vary along a direction whose standard deviation is below this share of the largest.
_NEGLIGIBLE = 1e-6


def memory_batches(layers: Iterable[T], size: Callable[[T], int]) -> Iterator[list[T]]:
    """Divide layers into consecutive batches whose statistics, `size(layer)` bytes each, fit into `STATISTICS_MEMORY`.

    A layer with larger statistics is a batch of its own.
    """
    batch: list[T] = []
    free = STATISTICS_MEMORY
    for layer in layers:
        if batch and size(layer) > free:
            yield batch
            batch, free = [], STATISTICS_MEMORY
        batch.append(layer)
        free -= size(layer)
    if batch:
        yield batch


def directions_bytes(inputs: int, modules: int) -> int:
    """Peak device memory of finding principal directions: second moments of several modules, and work on one of them.

    An input of each of the `modules` has size `inputs`.
    """
    matrix = 8 * inputs**2
    return matrix * (min(modules, max(1, STATISTICS_MEMORY // matrix)) + 5)


class InputMoments:
    """First and second moments of inputs of one size, float64 on their device."""

    def __init__(self, inputs: int, device: torch.device) -> None:
        self.count = 0
        self._sum = torch.zeros(inputs, dtype=torch.float64, device=device)
        self._products = torch.zeros(inputs, inputs, dtype=torch.float64, device=device)

    def add(self, inputs: Tensor) -> None:
        """Add inputs [tokens, inputs] of any floating dtype."""
        inputs = inputs.double()
        self.count += len(inputs)
        self._sum += inputs.sum(dim=0)
        self._products += inputs.t() @ inputs

    @property
    def mean(self) -> Tensor:
        """Mean input, [inputs]."""
        return self._sum / self.count

    @property
    def covariance(self) -> Tensor:
        """Covariance of the inputs, [inputs, inputs]."""
        return self.moment - torch.outer(self.mean, self.mean)

    @property
    def moment(self) -> Tensor:
        """Second moment (uncentred) of the inputs, [inputs, inputs]."""
        return self._products / self.count


class InputStatistics(InputMoments):
    """Moments of inputs, and of their products with targets."""

    def __init__(self, inputs: int, targets: int, device: torch.device) -> None:
        super().__init__(inputs, device)
        self._target_sum = torch.zeros(targets, dtype=torch.float64, device=device)
        self._target_products = torch.zeros(inputs, targets, dtype=torch.float64, device=device)

    def add_pairs(self, inputs: Tensor, targets: Tensor) -> None:
        """Add inputs [tokens, inputs] and targets [tokens, targets] of any floating dtype."""
        inputs, targets = inputs.double(), targets.double()
        self.add(inputs)
        self._target_sum += targets.sum(dim=0)
        self._target_products += inputs.t() @ targets

    def ridge(self, ridge_lambda: float, intercept: bool) -> tuple[Tensor, Tensor]:
        """Return the ridge regression of the targets on the inputs, with an unpenalised intercept or without.

        The ridge lambda is a share of the inputs' mean variance (mean square without intercept). Returns weights
        [targets, inputs] and intercepts [targets] (zeros if none are fitted), float64 on the device.
        """
        targets, products = self._target_sum / self.count, self._target_products / self.count
        square = self.moment
        if intercept:
            square, products = self.covariance, products - torch.outer(self.mean, targets)
        penalty = ridge_lambda * float(square.trace()) / len(square)
        # If all inputs are equal, the targets can't depend on them, and any penalty gives weights of zero.
        square.diagonal().add_(penalty if penalty > 0 else 1.0)
        weights = torch.linalg.solve(square, products).t()
        return weights, targets - weights @ self.mean if intercept else torch.zeros_like(targets)


def principal_directions(square: Tensor, count: int) -> Tensor:
    """Principal directions, each divided by its standard deviation so that coordinates along it have variance 1.

    Directions [count, inputs] of a covariance or second moment, float64 [inputs, inputs], begin with that of largest
    variance. The largest entry of each is positive. Rows are zero if inputs vary in fewer directions.
    """
    variances, vectors = leading_eigenvectors(square, count)
    deviations = variances.sqrt()
    varies = deviations > _NEGLIGIBLE * deviations[:1]
    return torch.where(varies, vectors / torch.where(varies, deviations, 1.0), 0.0).t()
