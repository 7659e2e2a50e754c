"""Ridge regression of a layer's residual on its features, toward a change of zero.

With features `phi` [tokens, width], the present weights `W` and what is missing `R = target - phi W` [tokens, hidden],
the change is `D = argmin ||phi D - R||^2 + s ||D||^2`, `s` a strength times the mean of `diag(phi^T phi)`. It is
`(phi^T phi + s I)^-1 phi^T R` (primal), or `phi^T (phi phi^T + s I)^-1 R` (dual), which is solved where features
outnumber tokens. Products are float32, systems are solved in float64.

Some tokens are not fitted but checked: of several strengths the one is taken that leaves the least error on them, and
none at all where that is no less than without a change.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from moevolve.evaluators.errors import UserError
from moevolve.workers.methods.outputs import FeatureBlock, Features

_ROWS = 1024
"""Rows of a product that is turned to float64 at once."""


@dataclass(frozen=True, slots=True, eq=False)
class Fit:
    """A fitted change.

    Attributes:
        strength: the one that was taken.
        before, after: squared error on the checked tokens, without the change and with it.
        weights: primal: the change, float64 [width, hidden].
        duals: dual: `alpha` of the change `phi^T alpha`, float32 [tokens, hidden], zero on checked tokens.
    """

    strength: float
    before: float
    after: float
    weights: Tensor | None = field(default=None, repr=False)
    duals: Tensor | None = field(default=None, repr=False)

    def change(self, block: FeatureBlock) -> Tensor:
        """Of the weights of a block's columns, float32 [columns, hidden]."""
        if self.weights is not None:
            return self.weights[block.columns].float()
        assert self.duals is not None
        return block.values.t() @ self.duals[block.tokens]


def fit_ridge(
    features: Features, residual: Tensor, checked: Tensor, strengths: Sequence[float], memory: int
) -> Fit | None:
    """Fit a change of a layer's weights.

    Args:
        features: of the layer.
        residual: what is missing, float32 [tokens, hidden], on the device that features are made on.
        checked: bool [tokens], those that are not fitted.
        strengths: to try.
        memory: bytes that may be taken beside the features' blocks.

    Returns:
        None where no change is finite and leaves less error on the checked tokens than there was.

    Raises:
        UserError: the system takes more memory than it may.
    """
    tokens, hidden = residual.shape
    needed = fit_bytes(features.width, tokens, hidden)
    if needed > memory:
        raise UserError(
            f"repair: fitting {features.width} features on {tokens} tokens takes {needed / 2**20:,.0f} MiB, and "
            f"memory_mb allows {memory / 2**20:,.0f}; use fewer tokens, or allow more"
        )
    before = float(residual[checked].double().square().sum())
    solve = _primal if features.width <= tokens else _dual
    found = solve(features, residual, checked, strengths)
    best = min(found, key=lambda fit: fit.after, default=None)
    if best is None or not best.after < before:
        return None
    return replace(best, before=before)


def fit_bytes(width: int, tokens: int, hidden: int) -> int:
    """What `fit_ridge` takes at most beside the features' blocks: the system, its factor, and both sides."""
    if width <= tokens:
        return 4 * tokens * width + 2 * 8 * width * width + 3 * 8 * width * hidden
    return 2 * 8 * tokens * tokens + 3 * 8 * tokens * hidden


def fit_flops(width: int, tokens: int, hidden: int, strengths: int, density: float = 1.0) -> int:
    """Operations of `fit_ridge`, a multiply and an add counting two, features themselves left out.

    Args:
        width, tokens, hidden: sizes.
        strengths: how many are tried.
        density: share of the tokens on which a column isn't zero; the dual form leaves zeros out.
    """
    if width <= tokens:
        form = 2 * tokens * width * (width + hidden)
        return form + strengths * (width**3 // 3 + 2 * width * width * hidden + tokens * width * hidden // 4)
    form = int(2 * (density * tokens) ** 2 * width)
    solved = strengths * (tokens**3 // 3 + 2 * tokens * tokens * hidden)
    return form + solved + int(2 * density * tokens * width * hidden)


def _primal(features: Features, residual: Tensor, checked: Tensor, strengths: Sequence[float]) -> list[Fit]:
    phi = residual.new_zeros(len(residual), features.width)
    for block in features.blocks():
        phi[block.tokens, block.columns] = block.values
    fitted, held = ~checked, phi[checked]
    gram = residual.new_zeros(features.width, features.width, dtype=torch.float64)
    right = residual.new_zeros(features.width, residual.shape[1], dtype=torch.float64)
    for part in fitted.nonzero()[:, 0].split(_ROWS):
        rows = phi[part]
        gram += rows.t() @ rows
        right += rows.t() @ residual[part]
    scale = float(gram.diagonal().mean())
    missing, fits = residual[checked], []
    for strength, weights in _solutions(gram, right, scale, strengths):
        after = float((missing - held @ weights.float()).double().square().sum())
        fits.append(Fit(strength, 0.0, after, weights=weights))
    return [fit for fit in fits if fit.after < float("inf")]


def _dual(features: Features, residual: Tensor, checked: Tensor, strengths: Sequence[float]) -> list[Fit]:
    gram = residual.new_zeros(len(residual), len(residual), dtype=torch.float64)
    for block in features.blocks():
        for values, tokens in zip(block.values.split(_ROWS), block.tokens.split(_ROWS), strict=True):
            gram[tokens[:, None], block.tokens] += (values @ block.values.t()).double()
    rows, held = (~checked).nonzero()[:, 0], checked.nonzero()[:, 0]
    across = gram[held][:, rows].float()
    gram = gram[rows][:, rows]
    scale = float(gram.diagonal().sum()) / features.width
    missing, fits = residual[held], []
    for strength, solved in _solutions(gram, residual[rows].double(), scale, strengths):
        after = float((missing - across @ solved.float()).double().square().sum())
        duals = torch.zeros_like(residual)
        duals[rows] = solved.float()
        fits.append(Fit(strength, 0.0, after, duals=duals))
    return [fit for fit in fits if fit.after < float("inf")]


def _solutions(gram: Tensor, right: Tensor, scale: float, strengths: Sequence[float]) -> Iterator[tuple[float, Tensor]]:
    """Of `(gram + strength * scale * I) x = right`; a system that is not positive definite has none."""
    if not 0 < scale < float("inf"):
        return
    present = gram.diagonal().clone()
    for strength in strengths:
        gram.diagonal().copy_(present + strength * scale)
        factor, failed = torch.linalg.cholesky_ex(gram)
        if not int(failed):
            yield strength, torch.cholesky_solve(right, factor)
