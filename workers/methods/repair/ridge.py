"""Closed-form fits of a layer's weights: ridge regression of its residual on its features.

With features `phi` [tokens, width], the present weights `W` and the residual `R = target - phi W` [tokens, hidden], the
change is `D = argmin ||phi D - R||^2 + s ||D||^2`, where `s` is a ridge lambda times the mean of `diag(phi^T phi)`. The
solution is `(phi^T phi + s I)^-1 phi^T R` (primal) or `phi^T (phi phi^T + s I)^-1 R` (dual). The dual is solved if
features outnumber tokens. Products are computed in float32, systems are solved in float64.

Some tokens are held out of the fit. Of several ridge lambdas the one with the least error on these is taken, and none
if no lambda reduces that error.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from moevolve.evaluators.errors import UserError
from moevolve.workers.methods.shared.outputs import FeatureBlock, Features, HeldFeatures

# Rows of a float32 product that are added to a float64 sum at once.
_ROWS = 1024
# Columns of a symmetric product that are computed at once.
_PANEL = 512
# One part in this many of the memory is reserved for blocks of features.
_BLOCKS_SHARE = 8


@dataclass(frozen=True, slots=True)
class FitOutcome:
    """Result of a fit.

    Attributes:
        ridge_lambda: The ridge lambda taken; None if the last of several fits changed nothing.
        before, after: Squared error on held-out tokens, without and with the change.
    """

    ridge_lambda: float | None
    before: float
    after: float


@dataclass(frozen=True, slots=True, eq=False)
class Fit:
    """A fitted change of a layer's weights, in one of two forms.

    Attributes:
        weights: Primal solution: the change, float32 [width, hidden].
        duals: Dual solution: `alpha` of the change `phi^T alpha`, float32 [tokens, hidden], zero on held-out tokens.
    """

    outcome: FitOutcome
    weights: Tensor | None = field(default=None, repr=False)
    duals: Tensor | None = field(default=None, repr=False)

    def change(self, block: FeatureBlock) -> Tensor:
        """Change of the weights of a block's columns, float32 [columns, hidden]."""
        if self.weights is not None:
            return self.weights[block.columns]
        assert self.duals is not None
        return block.values.t() @ self.duals[block.tokens]


@dataclass(frozen=True, slots=True, eq=False)
class LayerSystem:
    """What a fit of a layer solves: `features @ change = residual`, by squares that are summed over tokens.

    Attributes:
        features: Features of the layer.
        residual: Target minus output, float32 [tokens, hidden], on the device of the features.
        checked: Mask of held-out tokens, bool [tokens].
        token_weights: Factors of the tokens' squares, float32 [tokens]; None for 1.
    """

    features: Features
    residual: Tensor
    checked: Tensor
    token_weights: Tensor | None = None

    def weighted(self, values: Tensor) -> Tensor:
        """Values [tokens, hidden] times the roots of the tokens' weights."""
        return values if self.token_weights is None else values * self.token_weights.sqrt()[:, None]

    def weighted_blocks(self, memory: int) -> Iterator[FeatureBlock]:
        """Return the features times the roots of the tokens' weights."""
        scale = None if self.token_weights is None else self.token_weights.sqrt()
        for block in self.features.blocks(memory):
            yield block if scale is None else replace(block, values=block.values * scale[block.tokens, None])

    def held_out_error(self) -> float:
        """Squared error on held-out tokens without a fit."""
        return squared_norm(self.weighted(self.residual)[self.checked])


def fit_ridge(layer: LayerSystem, ridge_lambdas: Sequence[float], memory: int) -> Fit | None:
    """Fit a change of a layer's weights; return None if none is finite and reduces the error on held-out tokens.

    Raises:
        UserError: The fit takes more than `memory` bytes in addition to the residual and its weighted copy.
    """
    width, (tokens, hidden) = layer.features.width, layer.residual.shape
    needed = fit_bytes(width, tokens, hidden)
    if not has_room(needed, memory):
        raise UserError(
            f"repair: fitting {width} features on {tokens} tokens takes {needed / 2**20:,.0f} MiB beside one "
            f"part in {_BLOCKS_SHARE} for the features, and memory_mb is {memory >> 20:,}; fit fewer tokens, or allow "
            "more"
        )
    solve = _primal if width <= tokens else _dual
    fit = solve(layer, layer.weighted(layer.residual), ridge_lambdas, memory - needed)
    return fit and replace(fit, duals=None if fit.duals is None else layer.weighted(fit.duals))


def has_room(needed: int, memory: int) -> bool:
    """Whether a fit that needs `fit_bytes`, and blocks of features in addition, may be made in `memory` bytes."""
    return needed <= memory - memory // _BLOCKS_SHARE


def fit_bytes(width: int, tokens: int, hidden: int) -> int:
    """Peak bytes of `fit_ridge` without blocks of features: the system, its factor, both sides, and products."""
    rows = min(_ROWS, tokens)
    if width <= tokens:
        features = 4 * (tokens + tokens // 8 + 2 * rows) * width
        return features + 2 * 8 * width * width + 4 * 8 * width * hidden + 3 * 4 * (tokens // 8 + rows) * hidden
    return 2 * 8 * tokens * tokens + 4 * 8 * tokens * hidden + 3 * 8 * rows * tokens


def _primal(layer: LayerSystem, residual: Tensor, ridge_lambdas: Sequence[float], memory: int) -> Fit | None:
    features, checked, weights = layer.features, layer.checked, layer.token_weights
    if not isinstance(features, HeldFeatures):
        features = HeldFeatures.of(features, len(residual), memory)
    if not features.parts:
        return None
    gram = residual.new_zeros(features.width, features.width, dtype=torch.float64)
    right = residual.new_zeros(features.width, residual.shape[1], dtype=torch.float64)
    for start in range(0, len(residual), _ROWS):
        chunk = slice(start, start + _ROWS)
        fitted = (~checked[chunk]).nonzero()[:, 0]
        rows, target = features.values[chunk].index_select(0, fitted), residual[chunk].index_select(0, fitted)
        if weights is not None:
            rows *= weights[chunk, None][fitted].sqrt()
        for block, used in features.parts:
            at = used[chunk][fitted].nonzero()[:, 0]
            # Other tokens contribute nothing, but leaving them out takes copies.
            some, wanted = (rows, target) if 4 * len(at) > len(rows) else (rows[at], target[at])
            for first in range(block.start, block.stop, _PANEL):
                columns = slice(first, min(first + _PANEL, block.stop))
                # Only the lower triangle is read.
                gram[columns, : columns.stop] += some[:, columns].t() @ some[:, : columns.stop]
            right[block] += some[:, block].t() @ wanted
    held_out = features.values[checked]
    if weights is not None:
        held_out *= weights[checked, None].sqrt()
    expected = residual[checked]
    best, before = None, squared_norm(expected)
    for ridge_lambda, solved in _solutions(gram, right, float(gram.diagonal().mean()), ridge_lambdas):
        change = solved.float()
        outcome = FitOutcome(ridge_lambda, before, squared_norm(expected - held_out @ change))
        if outcome.after < (before if best is None else best.outcome.after):
            best = Fit(outcome, weights=change)
    return best


def _dual(layer: LayerSystem, residual: Tensor, ridge_lambdas: Sequence[float], memory: int) -> Fit | None:
    # Fitted tokens come first, so that their products are a corner of the matrix.
    checked = layer.checked
    order = checked.int().argsort(stable=True)
    place, fitted = order.argsort(), int((~checked).sum())
    gram = residual.new_zeros(len(residual), len(residual), dtype=torch.float64)
    for block in layer.weighted_blocks(memory):
        places, by_place = place[block.tokens].sort()
        values = block.values[by_place]
        # Only the lower triangle is read.
        for end in range(_ROWS, len(values) + _ROWS, _ROWS):
            rows = slice(end - _ROWS, end)
            gram[places[rows, None], places[:end]] += values[rows] @ values[:end].t()
    across, gram = gram[fitted:, :fitted], gram[:fitted, :fitted]
    expected = residual[checked]
    best, before = None, squared_norm(expected)
    scale = float(gram.diagonal().sum()) / layer.features.width
    for ridge_lambda, solved in _solutions(gram, residual[~checked].double(), scale, ridge_lambdas):
        outcome = FitOutcome(ridge_lambda, before, squared_norm(expected - (across @ solved).float()))
        if outcome.after < (before if best is None else best.outcome.after):
            best = Fit(outcome, duals=torch.zeros_like(residual).index_copy_(0, order[:fitted], solved.float()))
    return best


def squared_norm(values: Tensor) -> float:
    """Sum of squares, computed in float64."""
    return float(values.double().square().sum())


def _solutions(
    gram: Tensor, right: Tensor, scale: float, ridge_lambdas: Sequence[float]
) -> Iterator[tuple[float, Tensor]]:
    """Solve `(gram + ridge_lambda * scale * I) x = right` for every ridge lambda, and yield both.

    Systems that aren't positive definite are skipped. Of `gram` the lower triangle is read, and its diagonal is
    overwritten. `scale` is the mean square of the features, summed over tokens.
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
