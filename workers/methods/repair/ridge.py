"""Fits of a layer's weights: ridge regression of its residual on its features, by conjugate gradients.

With features `phi` [tokens, width], the present weights `W` and the residual `R = target - phi W` [tokens, hidden], the
change is `D = argmin ||phi D - R||^2 + s ||D||^2`, where `s` is a ridge lambda times the mean of `diag(phi^T phi)`, so
`(phi^T phi + s I) D = phi^T R`. A token's features are zero outside of its experts, so `phi` is kept in blocks, each on
its tokens, and neither `phi` nor `phi^T phi` is ever one matrix: an iteration takes two products with the blocks.
All columns of `D` are solved at once (Saad, Iterative Methods for Sparse Linear Systems, 2003, Alg. 9.1),
preconditioned by the inverses of panels on the diagonal of `phi^T phi + s I`. Where one panel has all columns, the
first iteration solves the system.

Some tokens are held out of the fit. The ridge lambda and the number of iterations are those with the least error on
these, measured on random combinations of the columns of `R`. Nothing is changed if none reduces that error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import torch
from torch import Tensor

from moevolve.workers.contract.capacity import release_freed_memory
from moevolve.workers.methods.shared.outputs import FeatureBlock, Features

# Most columns of a panel of the preconditioner, whose inverse takes the cube of this in operations; and most columns
# that are one panel, so that the first iteration solves the system.
_PANEL = 1024
_ONE_PANEL = 1536
# Most iterations. A third of the neurons of 32 experts come within 0.1 % of the solution in six.
_ITERATIONS = 8
# An iteration that reduces the held-out error by a smaller share than this is the last.
_LEAST_GAIN = 1e-3
# Number of random combinations of columns by which the lambda and the number of iterations are chosen. Errors are
# compared on the same combinations, so that few suffice.
_COMBINATIONS = 32
# Columns of the change that are solved at once, because every vector of the iteration has width x columns numbers.
_COLUMNS = 512


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
    """A fitted change of a layer's weights.

    Attributes:
        change: The change, float32 [width, hidden].
    """

    outcome: FitOutcome
    change: Tensor = field(repr=False)


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

    def held_out_error(self, residual: Tensor | None = None) -> float:
        """Squared error on held-out tokens without a fit, or with what a fit leaves of the residual."""
        left = (self.residual if residual is None else residual)[self.checked]
        return squared_norm(
            left if self.token_weights is None else left * self.token_weights[self.checked, None].sqrt()
        )


def fit_ridge(layer: LayerSystem, ridge_lambdas: Sequence[float]) -> Fit | None:
    """Fit a change of a layer's weights; return None if none is finite and reduces the error on held-out tokens."""
    normal = _NormalEquations(layer)
    if not 0 < normal.mean_square < float("inf"):
        return None
    systems = _Shifted(normal, [ridge_lambda * normal.mean_square for ridge_lambda in ridge_lambdas])
    best = _best(layer, systems, len(ridge_lambdas))
    if best is None:
        return None
    place, iterations = best
    systems.keep_only(place)
    release_freed_memory()  # so that all columns can use what choosing the lambda took
    hidden, after = layer.residual.shape[1], 0.0
    change = layer.residual.new_empty(layer.features.width, hidden)
    for start in range(0, hidden, _COLUMNS):
        columns = slice(start, start + _COLUMNS)
        solved, left = systems.solution(layer.residual[:, columns], iterations)
        change[:, columns] = solved
        after += layer.held_out_error(left)
        del solved, left  # before those of other columns are made
    outcome = FitOutcome(ridge_lambdas[place], layer.held_out_error(), after)
    return Fit(outcome, change) if outcome.after < outcome.before else None


def _best(layer: LayerSystem, systems: _Shifted, count: int) -> tuple[int, int] | None:
    """Return the place of the system and the number of iterations with the least held-out error; None for no fit.

    All `count` systems are solved at once, for the same random combinations of columns.
    """
    combined = _combined(layer.residual)
    least, best = layer.held_out_error(combined), None
    before = [math.inf] * count
    for iteration, (_, left) in enumerate(systems.solutions(combined.repeat(1, count)), start=1):
        errors = [layer.held_out_error(part) for part in left.chunk(count, dim=1)]
        for place, error in enumerate(errors):
            if error < least:
                least, best = error, (place, iteration)
        gains = any(now < error * (1 - _LEAST_GAIN) for now, error in zip(errors, before, strict=True))
        if iteration == systems.iterations or not gains:
            break
        before = errors
    return best


def fit_bytes(width: int, block_tokens: int, block: int, tokens: int, hidden: int, lambdas: int) -> int:
    """Peak bytes of `fit_ridge` and of applying what it returns, without the features and the residual.

    Args:
        width: Number of features.
        block_tokens: Number of tokens on which the features of a block aren't zero.
        block: Number of features that are zero on the same tokens.
        tokens, hidden: Shape of the residual.
        lambdas: Number of ridge lambdas.
    """
    panel = width if width <= _ONE_PANEL else _PANEL
    inverses = 4 * panel * width
    # Rows of a panel in float32, twice, or their products, with a factor and its inverse in float64.
    making = max(8 * min(tokens, block_tokens * max(1, panel // block)) * panel, (4 + 2 * 8) * panel * panel)

    def solving(columns: int) -> int:
        # The change so far, the rest, a direction, a preconditioned rest, and a product of two; and what is left of
        # the residual, what a direction gives, and one of them times weights.
        return (5 * 4 * width + 3 * 4 * tokens) * columns

    choosing = inverses * lambdas + max(making, solving(min(hidden, _COMBINATIONS) * lambdas))
    return max(choosing, inverses + 4 * width * hidden + solving(min(hidden, _COLUMNS)))


def squared_norm(values: Tensor) -> float:
    """Sum of squares, computed in float64."""
    return float(values.double().square().sum())


def conjugate_gradients(
    rest: Callable[[], Tensor],
    curvature: Callable[[Tensor], Tensor],
    precondition: Callable[[Tensor], Tensor],
    dot: Callable[[Tensor, Tensor], Tensor],
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield directions and the lengths to go in them, without an end; the caller takes each step before the next.

    Args:
        rest: Returns the right side minus the matrix times the present solution.
        curvature: Returns the scalar product of a direction and the matrix times the direction.
        precondition: Returns roughly the inverse of the matrix times a tensor.
        dot: Scalar product: of whole tensors, or of every column, which are systems of their own then.
    """
    # `rest` isn't derived from the step, so that rounded products of one iteration are made up for in the next.
    left = rest()
    direction = precondition(left)
    square = dot(left, direction)
    while True:
        yield direction, _ratio(square, curvature(direction))
        left = rest()
        shaped = precondition(left)
        before, square = square, dot(left, shaped)
        direction.mul_(_ratio(square, before)).add_(shaped)


def _ratio(above: Tensor, below: Tensor) -> Tensor:
    """Divide, and give 0 where nothing is left to solve."""
    return torch.where(below > 0, above / below, torch.zeros_like(above))


def _by_column(first: Tensor, second: Tensor) -> Tensor:
    return (first * second).sum(dim=0)


def _combined(residual: Tensor) -> Tensor:
    """Return random combinations of the columns with signs as coefficients, [tokens, at most `_COMBINATIONS`].

    The expected sum of squares is that of all columns.
    """
    hidden = residual.shape[1]
    if hidden <= _COMBINATIONS:
        return residual
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(2, (hidden, _COMBINATIONS), generator=generator).float() * 2 - 1
    return residual @ (signs / _COMBINATIONS**0.5).to(residual.device)


class _NormalEquations:
    """The normal equations of one layer for any ridge lambda.

    Attributes:
        width: Number of features.
        panels: Blocks of every panel.
        mean_square: Mean of `diag(phi^T phi)`.
    """

    def __init__(self, layer: LayerSystem) -> None:
        self.width, blocks = layer.features.width, layer.features.blocks
        fitted = (~layer.checked).float()
        self._blocks = blocks
        self._weights = fitted if layer.token_weights is None else fitted * layer.token_weights
        self.panels = _panels(blocks, self.width)
        squares = ((block.tokens, block.values[: len(block.tokens)].float().square()) for block in blocks)
        self.mean_square = sum(float((self._weights[tokens] @ each).sum()) for tokens, each in squares) / self.width

    def give(self, change: Tensor, stream: Tensor) -> None:
        """Add `phi` times a change [width, columns] to a stream [tokens, columns]."""
        for block in self._blocks:
            block.add_to(stream, change[block.columns])

    def back(self, values: Tensor) -> Tensor:
        """Return `phi^T` times values [tokens, columns] on the tokens to fit, [width, columns]."""
        weighted = values * self._weights[:, None]
        found = values.new_zeros(self.width, values.shape[1])
        for block in self._blocks:
            found[block.columns] = block.back(weighted)
        return found

    def weighted_squares(self, values: Tensor) -> Tensor:
        """Sums of the squares of values [tokens, columns] over the tokens to fit, [columns]."""
        return self._weights @ values.square()

    def products(self, panel: Sequence[FeatureBlock]) -> Tensor:
        """Return the products of a panel's features over the tokens to fit, float32 [columns, columns]."""
        columns = _columns(panel)
        tokens = panel[0].tokens if len(panel) == 1 else torch.cat([block.tokens for block in panel]).unique()
        roots = self._weights.sqrt()[:, None]
        found = self._weights.new_zeros(columns.stop - columns.start, columns.stop - columns.start)
        rows = self._weights.new_zeros(len(tokens), len(found))
        places = []
        for block in panel:
            own = slice(block.columns.start - columns.start, block.columns.stop - columns.start)
            at = torch.searchsorted(tokens, block.tokens)
            rows[at, own] = block.values[: len(at)] * roots[block.tokens]
            places.append((own, at))
        for own, at in places:
            some = rows if len(at) == len(rows) else rows[at]
            found[own, : own.stop] = some[:, own].t() @ some[:, : own.stop]
        return found.tril() + found.tril(-1).t()


class _Shifted:
    """The normal equations with shifts of their diagonal, which the columns of a right side take in turn.

    Attributes:
        iterations: Number of iterations after which nothing is gained.
    """

    def __init__(self, normal: _NormalEquations, shifts: Sequence[float]) -> None:
        self._normal, self._shifts = normal, shifts
        columns = [_columns(panel) for panel in normal.panels]
        sizes = [(each.stop - each.start) ** 2 for each in columns]
        # One tensor for each shift, which goes back to the system by itself and leaves no gaps between small ones.
        device = normal.panels[0][0].values.device
        whole = [torch.empty(sum(sizes), device=device).split(sizes) for _ in shifts]
        self._inverses = [*zip(columns, zip(*whole, strict=True), strict=True)]
        for panel, (_, inverses) in zip(normal.panels, self._inverses, strict=True):
            products = normal.products(panel)
            for inverse, shift in zip(inverses, shifts, strict=True):
                inverse.view_as(products).copy_(_inverse(products, shift))
        self.iterations = 1 if len(normal.panels) == 1 else _ITERATIONS

    def keep_only(self, place: int) -> None:
        """Keep the system of one of the shifts."""
        self._shifts = self._shifts[place : place + 1]
        self._inverses = [(columns, inverses[place : place + 1]) for columns, inverses in self._inverses]

    def solutions(self, residual: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the change, [width, columns], and what it leaves of a residual [tokens, columns], by iteration.

        The first columns are for the first shift, as many are for the next, and so on.
        """
        normal, count = self._normal, residual.shape[1]
        change = residual.new_zeros(normal.width, count)
        left, given = residual.clone(), torch.empty_like(residual)
        shifts = torch.tensor(self._shifts, device=residual.device).repeat_interleave(count // len(self._shifts))

        def rest() -> Tensor:
            return normal.back(left).addcmul_(change, shifts, value=-1)

        def curvature(direction: Tensor) -> Tensor:
            given.zero_()
            normal.give(direction, given)
            return normal.weighted_squares(given) + shifts * _by_column(direction, direction)

        for direction, length in conjugate_gradients(rest, curvature, self._precondition, _by_column):
            change.addcmul_(direction, length)
            left.addcmul_(given, length, value=-1)
            yield change, left

    def solution(self, residual: Tensor, iterations: int) -> tuple[Tensor, Tensor]:
        """Return what `solutions` yields in an iteration, counted from 1."""
        *_, last = islice(self.solutions(residual), iterations)
        return last

    def _precondition(self, rest: Tensor) -> Tensor:
        shaped = torch.zeros_like(rest)
        for columns, inverses in self._inverses:
            for part, whole, inverse in zip(
                *(each[columns].chunk(len(inverses), dim=1) for each in (rest, shaped)), inverses, strict=True
            ):
                whole.copy_(inverse.view(len(part), -1) @ part)
        return shaped


def _inverse(products: Tensor, shift: float) -> Tensor:
    """Inverse of a matrix with a shift of its diagonal, in float64; the identity if it isn't positive definite."""
    shifted = products.double()
    shifted.diagonal().add_(shift)
    factor, failed = torch.linalg.cholesky_ex(shifted)
    del shifted
    return torch.eye(len(factor), device=factor.device) if int(failed) else torch.cholesky_inverse(factor)


def _columns(panel: Sequence[FeatureBlock]) -> slice:
    return slice(panel[0].columns.start, panel[-1].columns.stop)


def _panels(blocks: Sequence[FeatureBlock], width: int) -> list[list[FeatureBlock]]:
    """Group consecutive blocks of so many columns in all into panels."""
    most = width if width <= _ONE_PANEL else _PANEL
    panels: list[list[FeatureBlock]] = []
    for block in blocks:
        if panels and block.columns.stop - panels[-1][0].columns.start <= most:
            panels[-1].append(block)
        else:
            panels.append([block])
    return panels
