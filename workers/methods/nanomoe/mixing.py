"""The mixing matrix M of a block-mixed linear layer fitted to the layer's weight, by least squares (NanoMoE, Eq. 1).

With P = U_i^T U_i, Q = V_j V_j^T and T = U_i^T W_ij V_j^T, the squared error of block (i, j) is, up to a constant,
`tr(M_ij^T P M_ij Q) - 2 tr(M_ij^T T)`; every block is a problem of its own. Float64, which products of a matrix with
its own transpose need, on the device of the weight.

Where inputs are known (`Metric`), an error E of the weight is measured by that of the layer's outputs, `tr(E S E^T)`
with the inputs' second moments S (SVD-LLM, arXiv 2403.07378: the truncated decomposition of the weight times the
Cholesky factor of S gives the best of its rank). Blocks of columns then depend on each other; they are fitted one after
the other, each with the others as they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moevolve.workers.methods.shared.spectra import leading_eigenvectors, peak_signs

_DAMPING = 1e-10
"""Pull towards the solution before, as a share of a least-squares problem's mean curvature."""
_LEAST_DAMPING = 1e-30
"""The same where there is no curvature at all, as for a factor that M leaves no influence."""
_NO_SHARE = 1e-8
"""Singular values below this share of the largest are lost in rounding, since their squares are computed."""
_SCARCE = 1e-3
"""What is added to second moments, as a share of their mean: directions in which few tokens have anything count too."""


@dataclass(frozen=True, slots=True, eq=False)
class Metric:
    """By what a weight's error is measured: that of the layer's outputs.

    Attributes:
        moments: S, second moments of the layer's inputs, positive definite, float64 [d1, d1].
    """

    moments: Tensor

    @classmethod
    def of(cls, moments: Tensor) -> Metric:
        """From measured moments [d1, d1], on their device."""
        measured = moments.double()
        scarce = _SCARCE * float(measured.diagonal().mean()) + _LEAST_DAMPING
        return cls(measured + torch.diag(torch.full_like(measured[0], scarce)))

    def onto(self, error: Tensor, columns: slice) -> Tensor:
        """What some columns would have to add to make up for an error [n, d1] as a whole: [n, columns]."""
        found: Tensor = torch.linalg.solve(self.moments[columns, columns], error @ self.moments[:, columns], left=False)
        return found


def low_rank_factors(weight: Tensor, rank: int, metric: Metric | None = None) -> tuple[Tensor, Tensor]:
    """The best approximation `U V` of a rank, by truncated singular value decomposition.

    Singular vectors of the shorter side are eigenvectors of the weight times its own transpose; the weight projected on
    them is the approximation. The singular values are shared evenly; the entry of largest size in every column of U is
    positive.

    Args:
        weight: [d2, d1].
        rank: r, 1 to min(d1, d2).
        metric: of the error; None for the Frobenius norm.

    Returns:
        U float64 [d2, r] and V float64 [r, d1], on the weight's device.
    """
    whole = weight.detach().double()
    if whole.shape[0] <= whole.shape[1]:
        reach = whole if metric is None else whole @ metric.moments
        squares, left = leading_eigenvectors(_symmetric(reach @ whole.t()), rank)
        right = left.t() @ whole
    else:
        # W L, with L L^T = S, has right singular vectors R; W L R R^T L^-1 is the approximation.
        root = None if metric is None else torch.linalg.cholesky(metric.moments)
        reach = whole if root is None else whole @ root
        squares, inner = leading_eigenvectors(_symmetric(reach.t() @ reach), rank)
        left, right = reach @ inner, inner.t()
        if root is not None:
            right = torch.linalg.solve_triangular(root, right, upper=False, left=False)
    shares = squares.sqrt()
    # The product is the same whatever the shares; rounding must not let one be 0.
    shares = shares.clamp_min(_NO_SHARE * float(shares[0]) + _LEAST_DAMPING).sqrt()
    shares = shares if whole.shape[0] <= whole.shape[1] else 1 / shares
    signs = peak_signs(left)
    return left * (shares * signs), right * (signs / shares)[:, None]


def _symmetric(product: Tensor) -> Tensor:
    """The same without what rounding makes differ."""
    return (product + product.t()) / 2


def split_factors(u: Tensor, v: Tensor, blocks: int) -> tuple[Tensor, Tensor]:
    """Cut U [d2, r] into blocks of rows [K, d2 / K, r], and V [r, d1] into blocks of columns [K, r, d1 / K]."""
    rank = u.shape[1]
    return u.reshape(blocks, -1, rank), v.reshape(rank, blocks, -1).permute(1, 0, 2).contiguous()


def refine_factors(
    weight: Tensor, u: Tensor, v: Tensor, mixing: Tensor, rounds: int, metric: Metric | None = None
) -> tuple[Tensor, Tensor]:
    """Alternating least squares on U and V for a given M.

    Given U and M every V_j is a least-squares problem of its own, over the weight's columns of block j; given V and M
    so is every U_i, over its rows of block i. No step makes the error larger, and factors that are best already stay.

    Args:
        weight: [d2, d1].
        u: the blocks U_i, float64 [K, d2 / K, r].
        v: the blocks V_j, float64 [K, r, d1 / K].
        mixing: M's parameters, not None.
        rounds: how often both are solved for, V first.
        metric: of the error; None for the Frobenius norm.

    Returns:
        U and V in the shapes given, float64 on the weight's device.
    """
    if not rounds:
        return u, v
    target, mixing = weight.detach().double(), _wide(mixing.double())
    blocks = len(u)
    for _ in range(rounds):
        v = _fit_columns(target, u, v, mixing, metric)
        rows, found = target.chunk(blocks, dim=0), []
        for i, before in enumerate(u):
            design = _mixed_v(v, mixing, i)
            weighed = design if metric is None else metric.moments @ design
            found.append(damped_solve(weighed.t() @ design, weighed.t() @ rows[i].t(), before.t()).t())
        u = torch.stack(found)
    return u.contiguous(), v.contiguous()


def _fit_columns(target: Tensor, u: Tensor, v: Tensor, mixing: Tensor, metric: Metric | None) -> Tensor:
    """Every V_j given U and M, [K, r, d1 / K]."""
    blocks, size = len(u), v.shape[2]
    columns, designs = target.chunk(blocks, dim=1), [_mixed_u(u, mixing, j) for j in range(blocks)]
    if metric is None:
        return torch.stack([_fit(designs[j], columns[j], v[j]) for j in range(blocks)])
    found = list(v)
    error = target - torch.cat([designs[j] @ v[j] for j in range(blocks)], dim=1)
    for j, design in enumerate(designs):
        here = slice(j * size, (j + 1) * size)
        found[j] = _fit(design, design @ v[j] + metric.onto(error, here), v[j])
        error[:, here] -= design @ (found[j] - v[j])
    return torch.stack(found)


def damped_solve(curvature: Tensor, moment: Tensor, before: Tensor) -> Tensor:
    """Solve normal equations, or many at once; where they decide nothing the solution stays near the one before.

    Args:
        curvature: positive semi-definite, float64 [..., n, n].
        moment: right-hand sides, [..., n, m].
        before: a solution to stay near, [..., n, m].
    """
    sizes = curvature.diagonal(dim1=-2, dim2=-1)
    damping = _DAMPING * sizes.mean(dim=-1, keepdim=True) + _LEAST_DAMPING
    factors = torch.linalg.cholesky(curvature + torch.diag_embed(damping.expand_as(sizes)))
    return torch.cholesky_solve(moment + damping[..., None] * before, factors)


def _wide(mixing: Tensor) -> Tensor:
    """M's parameters with scalars as diagonals of one entry: [K, K, 1 or r], or [3, K, K, r]."""
    return mixing[:, :, None] if mixing.dim() == 2 else mixing


def _mixed_u(u: Tensor, mixing: Tensor, j: int) -> Tensor:
    """`U_i M_ij` for every i, one below the other: [d2, r]. Times V_j it is the weight's block column j."""
    return _times(u, mixing[..., :, j, :]).flatten(0, 1)


def _mixed_v(v: Tensor, mixing: Tensor, i: int) -> Tensor:
    """`V_j^T M_ij^T` for every j, one below the other: [d1, r]. Times U_i^T it is the weight's block row i, turned."""
    row = mixing[..., i, :, :]
    # The transpose of diag(c) + alpha beta^T swaps alpha and beta.
    return _times(v.transpose(1, 2), row[[0, 2, 1]] if row.dim() == 3 else row).flatten(0, 1)


def _times(factors: Tensor, row: Tensor) -> Tensor:
    """Each of K matrices [K, n, r] times its block of M, given as [K, 1 or r] or [3, K, r]."""
    if row.dim() == 2:
        return factors * row[:, None, :]
    diagonal, alpha, beta = row
    return factors * diagonal[:, None, :] + (factors @ alpha[:, :, None]) * beta[:, None, :]


def _fit(design: Tensor, target: Tensor, before: Tensor) -> Tensor:
    """The X that minimises `|design X - target|`, from [n, r] and [n, m] to [r, m]."""
    return damped_solve(design.t() @ design, design.t() @ target, before)


def fit_layer(
    weight: Tensor,
    rank: int,
    blocks: int,
    start: Tensor,
    rounds: int,
    metric: Metric | None = None,
    rng: np.random.Generator | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """U, V and M of a layer together: alternating least squares.

    From the truncated singular value decomposition and an M of identities no least squares of U and V leads away, and
    in variant I that of M by very little: near plain low rank there is a local minimum of its error. Gaussian factors
    and mixing (`rng`) begin elsewhere, as a training does.

    Args:
        weight: [d2, d1].
        rank: r.
        blocks: K, dividing d1 and d2.
        start: M's parameters to start from; see `moevolve.kernels.block_mix.block_mix`.
        rounds: how often V, U and then M are solved for; 0 gives the decomposition and `start`.
        metric: of the error; None for the Frobenius norm.
        rng: draws the factors and what is added to `start`, standard normal; None begins at the decomposition.

    Returns:
        U [K, d2 / K, r], V [K, r, d1 / K], and M's parameters in the shape of `start`; float64 on the weight's device.
    """
    target = weight.detach().double()
    mixing = start.to(target)
    if rng is None:
        u, v = split_factors(*low_rank_factors(target, rank, metric), blocks)
    else:
        shapes = (blocks, len(target) // blocks, rank), (blocks, rank, target.shape[1] // blocks)
        u, v = (torch.from_numpy(rng.standard_normal(shape)).to(target) for shape in shapes)
        mixing = mixing + torch.from_numpy(rng.standard_normal(mixing.shape)).to(target)
    for _ in range(rounds):
        u, v = refine_factors(target, u, v, mixing, 1, metric)
        mixing = fit_mixing(target, u, v, mixing, metric)
    return balance(u, v, mixing) if rounds else (u, v, mixing)


def balance(u: Tensor, v: Tensor, mixing: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same layer with M's scalars or diagonals of size about 1; scales move to columns of U_i and rows of V_j.

    Args:
        u: the blocks U_i, [K, d2 / K, r].
        v: the blocks V_j, [K, r, d1 / K].
        mixing: M's parameters.

    Returns:
        U, V and M's parameters with the same product.
    """
    diagonals = {2: mixing[..., None], 3: mixing, 4: mixing[0]}[mixing.dim()]
    left = _size(diagonals, 1)
    right = _size(diagonals / left[:, None], 0)
    u, v = u * left[:, None, :], v * right[:, :, None]
    if mixing.dim() == 2:
        return u, v, mixing / left / right.t()
    if mixing.dim() == 3:
        return u, v, mixing / left[:, None] / right
    diagonal, alpha, beta = mixing
    return u, v, torch.stack([diagonal / left[:, None] / right, *_even(alpha / left[:, None], beta / right)])


def _size(diagonals: Tensor, dim: int) -> Tensor:
    """Root mean square over one index of [K, K, r]; 1 where there is nothing."""
    size = diagonals.square().mean(dim=dim).sqrt()
    return torch.where(size > 0, size, 1.0)


def fit_mixing(weight: Tensor, u: Tensor, v: Tensor, mixing: Tensor, metric: Metric | None = None) -> Tensor:
    """M's parameters that minimise the weight's error for given factors; no step makes it larger.

    Scalars and diagonals are the minimum. With rank-one parts, whose error is not convex, c and alpha are solved for
    together given beta, then c and beta given alpha.

    Args:
        weight: float64 [d2, d1].
        u: the blocks U_i, float64 [K, d2 / K, r].
        v: the blocks V_j, float64 [K, r, d1 / K].
        mixing: M's parameters before.
        metric: of the error; None for the Frobenius norm.

    Returns:
        The same shape, float64.
    """
    blocks = len(u)
    if metric is not None:
        return _fit_mixing_by(metric, weight, u, v, mixing)
    right = v @ v.transpose(1, 2)
    rows = []
    for i, row in enumerate(weight.chunk(blocks)):
        left = (u[i].t() @ u[i]).expand(blocks, -1, -1)
        targets = (u[i].t() @ row).view(len(left[0]), blocks, -1).transpose(0, 1) @ v.transpose(1, 2)
        rows.append(_fit_row(left, right, targets, mixing[..., i, :] if mixing.dim() == 2 else mixing[..., i, :, :]))
    return torch.stack(rows, dim=-3 if mixing.dim() > 2 else 0)


def _fit_mixing_by(metric: Metric, weight: Tensor, u: Tensor, v: Tensor, mixing: Tensor) -> Tensor:
    """See `fit_mixing`; block after block, each with the others as they are."""
    found, size = mixing.clone(), v.shape[2]
    for i, row in enumerate(weight.chunk(len(u))):
        left = (u[i].t() @ u[i])[None]
        error = row - torch.cat([_block(u, v, found, i, j) for j in range(len(v))], dim=1)
        for j, factor in enumerate(v):
            here = slice(j * size, (j + 1) * size)
            before, moments = _block(u, v, found, i, j), metric.moments[here, here]
            targets = u[i].t() @ (before @ moments + error @ metric.moments[:, here]) @ factor.t()
            right = (factor @ moments @ factor.t())[None]
            place = (i, slice(j, j + 1)) if mixing.dim() < 4 else (slice(None), i, slice(j, j + 1))
            found[place] = _fit_row(left, right, targets[None], found[place])
            error[:, here] += before - _block(u, v, found, i, j)
    return found


def _block(u: Tensor, v: Tensor, mixing: Tensor, i: int, j: int) -> Tensor:
    """`U_i M_ij V_j`, [d2 / K, d1 / K]."""
    return _times(u[i : i + 1], _wide(mixing)[..., i, j : j + 1, :])[0] @ v[j]


def _fit_row(left: Tensor, right: Tensor, targets: Tensor, before: Tensor) -> Tensor:
    """One row of blocks: P, Q and T, all [K, r, r], and their parameters [K], [K, r] or [3, K, r]."""
    wanted = targets.diagonal(dim1=1, dim2=2)
    if before.dim() == 1:
        curvature = (left * right).sum(dim=(1, 2))
        return _solve(curvature[:, None, None], wanted.sum(dim=1, keepdim=True), before[:, None])[:, 0]
    if before.dim() == 2:
        return _solve(left * right, wanted, before)
    diagonal, alpha, beta = before
    if not (alpha.any() and beta.any()):
        diagonal = _solve(left * right, wanted, diagonal)
        error = targets - left @ (diagonal[:, :, None] * right)
        beta = torch.stack([leading_eigenvectors(each.t() @ each, 1)[1][:, 0] for each in error])
        alpha = torch.zeros_like(alpha)
    diagonal, alpha = _fit_rank_one(left, right, targets, diagonal, alpha, beta)
    diagonal, beta = _fit_rank_one(right, left, targets.transpose(1, 2), diagonal, beta, alpha)
    return torch.stack([diagonal, alpha, beta])


def _fit_rank_one(
    left: Tensor, right: Tensor, targets: Tensor, diagonal: Tensor, alpha: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """Best c and alpha, both [K, r], for a given beta: the normal equations of `diag(c) + alpha beta^T`."""
    turned = (right @ beta[:, :, None])[:, :, 0]
    weights = (beta * turned).sum(dim=1)[:, None, None]
    upper = torch.cat([left * right, turned[:, :, None] * left], dim=2)
    lower = torch.cat([left * turned[:, None, :], weights * left], dim=2)
    wanted = torch.cat([targets.diagonal(dim1=1, dim2=2), (targets @ beta[:, :, None])[:, :, 0]], dim=1)
    found = _solve(torch.cat([upper, lower], dim=1), wanted, torch.cat([diagonal, alpha], dim=1))
    first, second = found.chunk(2, dim=1)
    return first, second


def _even(alpha: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """The same rank-one parts with both vectors [..., r] of one length; nothing changes where one of them is zero."""
    first, second = alpha.norm(dim=-1, keepdim=True), beta.norm(dim=-1, keepdim=True)
    scale = torch.where(first * second > 0, (second / first.clamp_min(1e-300)).sqrt(), 1.0)
    return alpha * scale, beta / scale


def _solve(curvature: Tensor, wanted: Tensor, before: Tensor) -> Tensor:
    """Solutions [K, n] of K systems of normal equations, [K, n, n] and [K, n]."""
    return damped_solve(curvature, wanted[:, :, None], before[:, :, None])[:, :, 0]
