"""Ridge regression of a layer's residual on its features, toward a change of zero.

With features `phi` [tokens, width], the present weights `W` and what is missing `R = target - phi W` [tokens, hidden],
the change is `D = argmin ||phi D - R||^2 + s ||D||^2`, `s` a ridge_lambda times the mean of `diag(phi^T phi)`. It is
`(phi^T phi + s I)^-1 phi^T R` (primal), or `phi^T (phi phi^T + s I)^-1 R` (dual), which is solved where features
outnumber tokens. Products are float32, systems are solved in float64.

Some tokens are not fitted but checked: of several lambdas the one is taken that leaves the least error on them, and
none at all where that is no less than without a change.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moevolve.evaluators.errors import UserError
from moevolve.workers.methods.shared.outputs import FeatureBlock, Features

_ROWS = 1024
"""Rows of a product that are added to float64 at once."""
_BLOCKS_SHARE = 8
"""One part in so many of the memory stays for the features' blocks."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a fit went.

    Attributes:
        ridge_lambda: the one that was taken.
        before, after: squared error on the checked tokens, without the change and with it.
    """

    ridge_lambda: float
    before: float
    after: float


@dataclass(frozen=True, slots=True, eq=False)
class Fit:
    """A fitted change.

    Attributes:
        outcome: how it went.
        weights: primal: the change, float32 [width, hidden].
        duals: dual: `alpha` of the change `phi^T alpha`, float32 [tokens, hidden], zero on checked tokens.
        blocks: the features, where there was room to keep them.
    """

    outcome: Outcome
    weights: Tensor | None = field(default=None, repr=False)
    duals: Tensor | None = field(default=None, repr=False)
    blocks: tuple[FeatureBlock, ...] = field(default=(), repr=False)

    def change(self, block: FeatureBlock) -> Tensor:
        """Of the weights of a block's columns, float32 [columns, hidden]."""
        if self.weights is not None:
            return self.weights[block.columns]
        assert self.duals is not None
        return block.values.t() @ self.duals[block.tokens]


def fit_ridge(
    features: Features, residual: Tensor, checked: Tensor, ridge_lambdas: Sequence[float], memory: int
) -> Fit | None:
    """Fit a change of a layer's weights.

    Args:
        features: of the layer.
        residual: what is missing, float32 [tokens, hidden], on the device that features are made on.
        checked: bool [tokens], those that are not fitted.
        ridge_lambdas: to try.
        memory: bytes that may be taken beside `residual`.

    Returns:
        None where no change is finite and leaves less error on the checked tokens than there was.

    Raises:
        UserError: it takes more memory than it may.
    """
    tokens, hidden = residual.shape
    needed = fit_bytes(features.width, tokens, hidden)
    if not has_room(needed, memory):
        raise UserError(
            f"repair: fitting {features.width} features on {tokens} tokens takes {needed / 2**20:,.0f} MiB beside one "
            f"part in {_BLOCKS_SHARE} for the features, and memory_mb is {memory >> 20:,}; fit fewer tokens, or allow "
            "more"
        )
    solve = _primal if features.width <= tokens else _dual
    return solve(features, residual, checked, ridge_lambdas, memory - needed)


def has_room(needed: int, memory: int) -> bool:
    """Whether a fit that takes `fit_bytes` may be made in so many bytes, blocks of its features beside it."""
    return needed <= memory - memory // _BLOCKS_SHARE


def fit_bytes(width: int, tokens: int, hidden: int) -> int:
    """What `fit_ridge` takes at most beside the features' blocks: the system, its factor, both sides, and products."""
    rows = min(_ROWS, tokens)
    if width <= tokens:
        features = 4 * (tokens + tokens // 8 + 2 * rows) * width
        return features + 2 * 8 * width * width + 4 * 8 * width * hidden + 3 * 4 * (tokens // 8 + rows) * hidden
    return 2 * 8 * tokens * tokens + 4 * 8 * tokens * hidden + 3 * 8 * rows * tokens


def _primal(
    features: Features, residual: Tensor, checked: Tensor, ridge_lambdas: Sequence[float], memory: int
) -> Fit | None:
    blocks = tuple(features.blocks(memory))
    gram = residual.new_zeros(features.width, features.width, dtype=torch.float64)
    right = residual.new_zeros(features.width, residual.shape[1], dtype=torch.float64)
    held = residual.new_zeros(int(checked.sum()), features.width)
    place, order = torch.empty_like(checked, dtype=torch.int64), checked.int().cumsum(0) - 1
    for number, block in enumerate(blocks):
        at = checked[block.tokens]
        held[order[block.tokens[at]], block.columns] = block.values[at]
        place.fill_(-1)
        place[block.tokens[~at]] = (~at).nonzero()[:, 0]
        for part in (~at).nonzero()[:, 0].split(_ROWS):
            right[block.columns] += block.values[part].t() @ residual[block.tokens[part]]
        # The lower triangle is all that is read, and tokens that only one of two blocks has give nothing.
        for other in blocks[: number + 1]:
            both = (place[other.tokens] >= 0).nonzero()[:, 0]
            for part in both.split(_ROWS):
                rows = block.values[place[other.tokens[part]]]
                gram[block.columns, other.columns] += rows.t() @ other.values[part]
    missing = residual[checked]
    before, best = _squares(missing), None
    for ridge_lambda, solved in _solutions(gram, right, float(gram.diagonal().mean()), ridge_lambdas):
        weights = solved.float()
        outcome = Outcome(ridge_lambda, before, _squares(missing - held @ weights))
        if outcome.after < (before if best is None else best.outcome.after):
            best = Fit(outcome, weights=weights, blocks=blocks)
    return best


def _dual(
    features: Features, residual: Tensor, checked: Tensor, ridge_lambdas: Sequence[float], memory: int
) -> Fit | None:
    # Fitted tokens first, so that their part of the products is a corner.
    order = checked.int().argsort(stable=True)
    place, fitted = order.argsort(), int((~checked).sum())
    gram = residual.new_zeros(len(residual), len(residual), dtype=torch.float64)
    kept: list[FeatureBlock] = []
    size, room = 0, memory // 2
    for block in features.blocks(memory - room):
        size += block.values.nbytes
        if size <= room:
            kept.append(block)
        places, by_place = place[block.tokens].sort()
        values = block.values[by_place]
        # The lower triangle is all that is read.
        for end in range(_ROWS, len(values) + _ROWS, _ROWS):
            rows = slice(end - _ROWS, end)
            gram[places[rows, None], places[:end]] += values[rows] @ values[:end].t()
    blocks = tuple(kept) if size <= room else ()
    kept.clear()
    across, gram = gram[fitted:, :fitted], gram[:fitted, :fitted]
    missing = residual[checked]
    before, best = _squares(missing), None
    scale = float(gram.diagonal().sum()) / features.width
    for ridge_lambda, solved in _solutions(gram, residual[~checked].double(), scale, ridge_lambdas):
        outcome = Outcome(ridge_lambda, before, _squares(missing - (across @ solved).float()))
        if outcome.after < (before if best is None else best.outcome.after):
            duals = torch.zeros_like(residual).index_copy_(0, order[:fitted], solved.float())
            best = Fit(outcome, duals=duals, blocks=blocks)
    return best


def _squares(error: Tensor) -> float:
    return float(error.double().square().sum())


def _solutions(
    gram: Tensor, right: Tensor, scale: float, ridge_lambdas: Sequence[float]
) -> Iterator[tuple[float, Tensor]]:
    """Of `(gram + ridge_lambda * scale * I) x = right`; a system that is not positive definite has none.

    Args:
        gram: float64, of which the lower triangle is read; its diagonal is changed.
        right: float64.
        scale: mean square of the features, summed over tokens.
        ridge_lambdas: to try.
    """
    if not 0 < scale < float("inf"):
        return
    present = gram.diagonal().clone()
    for ridge_lambda in ridge_lambdas:
        gram.diagonal().copy_(present + ridge_lambda * scale)
        factor, failed = torch.linalg.cholesky_ex(gram)
        if not int(failed):
            half = torch.linalg.solve_triangular(factor, right, upper=False)
            yield ridge_lambda, torch.linalg.solve_triangular(factor.mT, half, upper=True)
