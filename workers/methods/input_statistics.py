"""What dense networks get to see: statistics of their inputs, and watching them run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from moevolve.workers.families.layers import DenseLayer
from moevolve.workers.methods.base import Tokens
from moevolve.workers.methods.contract import Resident

Watch = tuple[nn.Module, bool, Callable[[Tensor], None]]
"""A module, whether its output is watched instead of its input, and who is told: values [tokens, size]."""

NetworkWatcher = Callable[[Tensor, Tensor], None]
"""Told a network's inputs [tokens, hidden] and its neurons' activations [tokens, width], sequence by sequence."""


@torch.inference_mode()
def run_watched(resident: Resident, sequences: Sequence[Tokens], watches: Sequence[Watch]) -> None:
    """Run every sequence by itself through the unedited model and tell what its modules see.

    Args:
        resident: unedited.
        sequences: token ids.
        watches: which modules, and whom to tell, sequence by sequence.
    """
    with ExitStack() as stack:
        for module, output, take in watches:
            if output:
                handle = module.register_forward_hook(lambda _m, _args, out, take=take: take(out.flatten(0, -2)))
            else:
                handle = module.register_forward_pre_hook(lambda _m, args, take=take: take(args[0].flatten(0, -2)))
            stack.callback(handle.remove)
        for tokens in sequences:
            resident.run(tokens)


def watch_networks(
    resident: Resident, sequences: Sequence[Tokens], watchers: Sequence[tuple[DenseLayer, NetworkWatcher]]
) -> None:
    """`run_watched` for whole networks.

    Args:
        resident: unedited.
        sequences: token ids.
        watchers: which networks, and whom to tell.
    """
    watches: list[Watch] = []
    for layer, watcher in watchers:
        inputs: list[Tensor] = []
        watches += [(layer.up, False, inputs.append), (layer.down, False, partial(_tell, inputs, watcher))]
    run_watched(resident, sequences, watches)


def _tell(inputs: list[Tensor], watcher: NetworkWatcher, activations: Tensor) -> None:
    watcher(inputs.pop(), activations)


_NEGLIGIBLE = 1e-6
"""A direction whose standard deviation is below this share of the largest doesn't vary."""


class InputMoments:
    """Moments of inputs, in float64; memory doesn't grow with the tokens.

    Args:
        inputs: size of an input.
        device: where the inputs are.
    """

    def __init__(self, inputs: int, device: torch.device) -> None:
        self.count = 0
        self._sum = torch.zeros(inputs, dtype=torch.float64, device=device)
        self._products = torch.zeros(inputs, inputs, dtype=torch.float64, device=device)

    def add(self, inputs: Tensor) -> None:
        """Take in tokens: inputs [tokens, inputs], any floating dtype."""
        inputs = inputs.double()
        self.count += len(inputs)
        self._sum += inputs.sum(dim=0)
        self._products += inputs.t() @ inputs

    @property
    def mean(self) -> NDArray[np.float64]:
        """Mean input, [inputs]."""
        mean: NDArray[np.float64] = (self._sum / self.count).cpu().numpy()
        return mean

    @property
    def covariance(self) -> NDArray[np.float64]:
        """Of the inputs, [inputs, inputs]."""
        return self.moment - np.outer(self.mean, self.mean)

    @property
    def moment(self) -> NDArray[np.float64]:
        """Mean product of inputs, [inputs, inputs]."""
        moment: NDArray[np.float64] = (self._products / self.count).cpu().numpy()
        return moment


class InputStatistics(InputMoments):
    """Moments of inputs and their products with targets.

    Args:
        inputs: size of an input.
        targets: size of a target.
        device: where the inputs are.
    """

    def __init__(self, inputs: int, targets: int, device: torch.device) -> None:
        super().__init__(inputs, device)
        self._target_sum = torch.zeros(targets, dtype=torch.float64, device=device)
        self._target_products = torch.zeros(inputs, targets, dtype=torch.float64, device=device)

    def add_pairs(self, inputs: Tensor, targets: Tensor) -> None:
        """Take in tokens with their targets [tokens, targets], any floating dtype."""
        inputs, targets = inputs.double(), targets.double()
        self.add(inputs)
        self._target_sum += targets.sum(dim=0)
        self._target_products += inputs.t() @ targets

    def ridge(self, share: float, intercept: bool) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Linear regression of the targets on the inputs, the intercept not regularised.

        Args:
            share: regularisation, as a share of the inputs' mean variance (mean square without intercept).
            intercept: whether there is one.

        Returns:
            Weights [targets, inputs] and intercepts [targets], zero without.
        """
        targets: NDArray[np.float64] = (self._target_sum / self.count).cpu().numpy()
        products: NDArray[np.float64] = (self._target_products / self.count).cpu().numpy()
        square = self.moment
        if intercept:
            square, products = self.covariance, products - np.outer(self.mean, targets)
        penalty = share * np.trace(square) / len(square)
        # All inputs alike: there is nothing to regress on.
        penalty = penalty if penalty > 0 else 1.0
        weights = np.linalg.solve(square + penalty * np.eye(len(square)), products).T.astype(np.float64)
        return weights, targets - weights @ self.mean if intercept else np.zeros_like(targets)


def principal_directions(square: NDArray[np.float64], count: int) -> NDArray[np.float64]:
    """Principal directions, each divided by its standard deviation.

    An input's product with such a direction varies by 1 from token to token, whatever the direction.

    Args:
        square: covariance of the inputs [inputs, inputs], or their mean products.
        count: how many, at most `inputs`.

    Returns:
        float64 [count, inputs], largest variance first, every one's largest entry positive; zero where there are fewer
        directions in which inputs vary.
    """
    variances, vectors = np.linalg.eigh(square)
    variances, directions = variances[::-1][:count], vectors.T[::-1][:count]
    largest = np.abs(directions).argmax(axis=1)
    directions = directions * np.sign(np.take_along_axis(directions, largest[:, None], axis=1))
    deviations = np.sqrt(np.maximum(variances, 0))
    varies = deviations > _NEGLIGIBLE * deviations[:1]
    return np.where(varies[:, None], directions / np.where(varies, deviations, 1.0)[:, None], 0.0)
