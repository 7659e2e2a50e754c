"""Ridge regression of a layer's residual on its features, which gives a change of its weights.

With features `phi` [tokens, width], the present weights `W` and the residual `R = target - phi W` [tokens, hidden], the
change is `D = argmin ||phi D - R||^2 + s ||D||^2`, where `s` is a ridge lambda times the mean of `diag(phi^T phi)`. The
solution is `(phi^T phi + s I)^-1 phi^T R` (primal) or `phi^T (phi phi^T + s I)^-1 R` (dual). The dual is solved if
features outnumber tokens. Products are computed in float32, systems are solved in float64.

Some tokens are held out of the fit. Of several ridge lambdas the one with the least error on these is taken, and none
if no lambda reduces that error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from moevolve.evaluators.errors import UserError
from moevolve.workers.methods.shared.outputs import FeatureBlock, Features

_ROWS = 1024
"""Rows of a float32 product that are added to a float64 sum at once."""
_BLOCKS_SHARE = 8
"""One part in this many of the memory is reserved for blocks of features."""


PresentWeights = Callable[[slice], Tensor]
"""Returns the weights, as they are before a fit, of some columns of the features, float32 [columns, hidden]."""


@dataclass(frozen=True, slots=True)
class FitOutcome:
    """Result of a fit.

    Attributes:
        ridge_lambda: The ridge lambda taken; None for a fit of one factor.
        before, after: Squared error on held-out tokens, without and with the change.
    """

    ridge_lambda: float | None
    before: float
    after: float


@dataclass(frozen=True, slots=True, eq=False)
class Fit:
    """A fitted change of a layer's weights: first the one that ridge regression adds, if any, then a factor.

    Attributes:
        weights: Primal solution: the change, float32 [width, hidden].
        duals: Dual solution: `alpha` of the change `phi^T alpha`, float32 [tokens, hidden], zero on held-out tokens.
        blocks: The features, if there was memory to keep them.
        factor: Factor on the changed weights.
    """

    outcome: FitOutcome
    weights: Tensor | None = field(default=None, repr=False)
    duals: Tensor | None = field(default=None, repr=False)
    blocks: tuple[FeatureBlock, ...] = field(default=(), repr=False)
    factor: float = 1.0

    def change(self, block: FeatureBlock, present: PresentWeights) -> Tensor:
        """Change of the weights of a block's columns, float32 [columns, hidden]."""
        added = None
        if self.weights is not None:
            added = self.weights[block.columns]
        elif self.duals is not None:
            added = block.values.t() @ self.duals[block.tokens]
        if self.factor == 1.0 and added is not None:
            return added
        before = present(block.columns)
        return self.factor * (before if added is None else before + added) - before


@dataclass(frozen=True, slots=True, eq=False)
class LayerSystem:
    """What a fit of a layer solves: `features @ change = residual`, by squares that are summed over tokens.

    Attributes:
        features: Features of the layer.
        present: Weights of the layer before the fit.
        residual: Target minus output, float32 [tokens, hidden], on the device of the features.
        checked: Mask of held-out tokens, bool [tokens].
        token_weights: Factors of the tokens' squares, float32 [tokens]; None for 1.
    """

    features: Features
    present: PresentWeights
    residual: Tensor
    checked: Tensor
    token_weights: Tensor | None = None

    def weighted(self, values: Tensor) -> Tensor:
        """Values [tokens, hidden] times the roots of the tokens' weights."""
        return values if self.token_weights is None else values * self.token_weights.sqrt()[:, None]

    def held_out_error(self) -> float:
        """Squared error on held-out tokens without a fit."""
        return squared_norm(self.weighted(self.residual)[self.checked])


@dataclass(frozen=True, slots=True, eq=False)
class _ScaledFeatures:
    """Features times a factor per token."""

    features: Features
    scale: Tensor

    @property
    def width(self) -> int:
        return self.features.width

    def blocks(self, memory: int) -> Iterator[FeatureBlock]:
        for block in self.features.blocks(memory):
            yield replace(block, values=block.values * self.scale[block.tokens, None])


def fit_ridge(layer: LayerSystem, ridge_lambdas: Sequence[float], memory: int) -> Fit | None:
    """Fit a change of a layer's weights.

    Args:
        layer: The layer.
        ridge_lambdas: Ridge lambdas to try.
        memory: Bytes that may be allocated in addition to the residual and its weighted copy.

    Returns:
        The fit; None if no change is finite and reduces the error on held-out tokens.

    Raises:
        UserError: The fit takes more memory than allowed.
    """
    features, (tokens, hidden) = layer.features, layer.residual.shape
    needed = fit_bytes(features.width, tokens, hidden)
    if not has_room(needed, memory):
        raise UserError(
            f"repair: fitting {features.width} features on {tokens} tokens takes {needed / 2**20:,.0f} MiB beside one "
            f"part in {_BLOCKS_SHARE} for the features, and memory_mb is {memory >> 20:,}; fit fewer tokens, or allow "
            "more"
        )
    solve = _primal if features.width <= tokens else _dual
    if layer.token_weights is None:
        return solve(features, layer.residual, layer.checked, ridge_lambdas, memory - needed)
    scale = layer.token_weights.sqrt()
    scaled, residual = _ScaledFeatures(features, scale), layer.weighted(layer.residual)
    fit = solve(scaled, residual, layer.checked, ridge_lambdas, memory - needed)
    # Blocks that were kept are scaled ones, so they can't be used to compute the layer's output.
    return fit and replace(fit, blocks=(), duals=None if fit.duals is None else fit.duals * scale[:, None])


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


def _primal(
    features: Features, residual: Tensor, checked: Tensor, ridge_lambdas: Sequence[float], memory: int
) -> Fit | None:
    blocks = tuple(features.blocks(memory))
    gram = residual.new_zeros(features.width, features.width, dtype=torch.float64)
    right = residual.new_zeros(features.width, residual.shape[1], dtype=torch.float64)
    held_out = residual.new_zeros(int(checked.sum()), features.width)
    place, order = torch.empty_like(checked, dtype=torch.int64), checked.int().cumsum(0) - 1
    for number, block in enumerate(blocks):
        at = checked[block.tokens]
        held_out[order[block.tokens[at]], block.columns] = block.values[at]
        place.fill_(-1)
        place[block.tokens[~at]] = (~at).nonzero()[:, 0]
        for part in (~at).nonzero()[:, 0].split(_ROWS):
            right[block.columns] += block.values[part].t() @ residual[block.tokens[part]]
        # Only the lower triangle is read. Tokens in only one of two blocks contribute nothing to their product.
        for other in blocks[: number + 1]:
            both = (place[other.tokens] >= 0).nonzero()[:, 0]
            for part in both.split(_ROWS):
                rows = block.values[place[other.tokens[part]]]
                gram[block.columns, other.columns] += rows.t() @ other.values[part]
    held_out_residual = residual[checked]
    before, best = squared_norm(held_out_residual), None
    for ridge_lambda, solved in _solutions(gram, right, float(gram.diagonal().mean()), ridge_lambdas):
        weights = solved.float()
        outcome = FitOutcome(ridge_lambda, before, squared_norm(held_out_residual - held_out @ weights))
        if outcome.after < (before if best is None else best.outcome.after):
            best = Fit(outcome, weights=weights, blocks=blocks)
    return best


def _dual(
    features: Features, residual: Tensor, checked: Tensor, ridge_lambdas: Sequence[float], memory: int
) -> Fit | None:
    # Fitted tokens come first, so that their products are a corner of the matrix.
    order = checked.int().argsort(stable=True)
    place, fitted = order.argsort(), int((~checked).sum())
    gram = residual.new_zeros(len(residual), len(residual), dtype=torch.float64)
    kept: list[FeatureBlock] = []
    size, kept_memory = 0, memory // 2
    for block in features.blocks(memory - kept_memory):
        size += block.values.nbytes
        if size <= kept_memory:
            kept.append(block)
        places, by_place = place[block.tokens].sort()
        values = block.values[by_place]
        # Only the lower triangle is read.
        for end in range(_ROWS, len(values) + _ROWS, _ROWS):
            rows = slice(end - _ROWS, end)
            gram[places[rows, None], places[:end]] += values[rows] @ values[:end].t()
    blocks = tuple(kept) if size <= kept_memory else ()
    kept.clear()
    across, gram = gram[fitted:, :fitted], gram[:fitted, :fitted]
    held_out_residual = residual[checked]
    before, best = squared_norm(held_out_residual), None
    scale = float(gram.diagonal().sum()) / features.width
    for ridge_lambda, solved in _solutions(gram, residual[~checked].double(), scale, ridge_lambdas):
        outcome = FitOutcome(ridge_lambda, before, squared_norm(held_out_residual - (across @ solved).float()))
        if outcome.after < (before if best is None else best.outcome.after):
            duals = torch.zeros_like(residual).index_copy_(0, order[:fitted], solved.float())
            best = Fit(outcome, duals=duals, blocks=blocks)
    return best


def squared_norm(values: Tensor) -> float:
    """Sum of squares, computed in float64."""
    return float(values.double().square().sum())


def _solutions(
    gram: Tensor, right: Tensor, scale: float, ridge_lambdas: Sequence[float]
) -> Iterator[tuple[float, Tensor]]:
    """Solve `(gram + ridge_lambda * scale * I) x = right` for every ridge lambda.

    Systems that aren't positive definite are left out.

    Args:
        gram: Float64 matrix, of which the lower triangle is read. Its diagonal is overwritten.
        right: Float64 right-hand sides.
        scale: Mean square of the features, summed over tokens.
        ridge_lambdas: Ridge lambdas to try.

    Yields:
        Ridge lambda and solution.
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
