"""What dense networks get to see: statistics of their inputs, and watching them run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

import torch
from torch import Tensor, nn

from moevolve.workers.contract.edits import Tokens
from moevolve.workers.contract.methods import Resident
from moevolve.workers.families.layers import DenseLayer
from moevolve.workers.methods.shared.spectra import leading_eigenvectors

Watch = tuple[nn.Module, bool, Callable[[Tensor], None]]
"""A module, whether its output is watched instead of its input, and who is told: values [tokens, size]."""

NetworkWatcher = Callable[[Tensor, Tensor], None]
"""Told a network's inputs [tokens, hidden] and its neurons' activations [tokens, width], row by row."""


@torch.inference_mode()
def run_watched(resident: Resident, sequences: Sequence[Tokens], watches: Sequence[Watch]) -> None:
    """Run sequences through the unedited model and tell what its modules see.

    Args:
        resident: unedited.
        sequences: token ids.
        watches: which modules, and whom to tell, row by row.
    """
    with ExitStack() as stack:
        for module, output, take in watches:
            if output:
                handle = module.register_forward_hook(lambda _m, _args, out, take=take: take(out.flatten(0, -2)))
            else:
                handle = module.register_forward_pre_hook(lambda _m, args, take=take: take(args[0].flatten(0, -2)))
            stack.callback(handle.remove)
        for row in resident.rows(sequences):
            resident.run(row)


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


MEMORY = 1 << 30
"""Bytes of second moments held at once; layers are measured in as many passes as that takes, one a pass at least."""


def directions_bytes(inputs: int, places: int) -> int:
    """Most device memory of finding principal directions: second moments of places, and what those of one take.

    Args:
        inputs: size of an input.
        places: whose inputs are measured.
    """
    matrix = 8 * inputs**2
    return matrix * (min(places, max(1, MEMORY // matrix)) + 5)


_NEGLIGIBLE = 1e-6
"""A direction whose standard deviation is below this share of the largest doesn't vary."""


class InputMoments:
    """Moments of inputs, in float64 on their device; memory doesn't grow with the tokens.

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
    def mean(self) -> Tensor:
        """Mean input, [inputs]."""
        return self._sum / self.count

    @property
    def covariance(self) -> Tensor:
        """Of the inputs, [inputs, inputs]."""
        return self.moment - torch.outer(self.mean, self.mean)

    @property
    def moment(self) -> Tensor:
        """Mean product of inputs, [inputs, inputs]."""
        return self._products / self.count


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

    def ridge(self, share: float, intercept: bool) -> tuple[Tensor, Tensor]:
        """Linear regression of the targets on the inputs, the intercept not regularised.

        Args:
            share: regularisation, as a share of the inputs' mean variance (mean square without intercept).
            intercept: whether there is one.

        Returns:
            Weights [targets, inputs] and intercepts [targets], zero without; float64 on the device.
        """
        targets, products = self._target_sum / self.count, self._target_products / self.count
        square = self.moment
        if intercept:
            square, products = self.covariance, products - torch.outer(self.mean, targets)
        penalty = share * float(square.trace()) / len(square)
        # All inputs alike: there is nothing to regress on.
        square.diagonal().add_(penalty if penalty > 0 else 1.0)
        weights = torch.linalg.solve(square, products).t()
        return weights, targets - weights @ self.mean if intercept else torch.zeros_like(targets)


def principal_directions(square: Tensor, count: int) -> Tensor:
    """Principal directions, each divided by its standard deviation.

    An input's product with such a direction varies by 1 from token to token, whatever the direction.

    Args:
        square: covariance of the inputs, float64 [inputs, inputs], or their mean products.
        count: how many, at most `inputs`.

    Returns:
        float64 [count, inputs], largest variance first, every one's largest entry positive; zero where there are fewer
        directions in which inputs vary.
    """
    variances, vectors = leading_eigenvectors(square, count)
    deviations = variances.sqrt()
    varies = deviations > _NEGLIGIBLE * deviations[:1]
    return torch.where(varies, vectors / torch.where(varies, deviations, 1.0), 0.0).t()
