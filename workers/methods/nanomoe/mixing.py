"""Least-squares fits of a block-mixed linear layer `blockdiag(U) M blockdiag(V)` to a weight (NanoMoE, Eq. 1).

With P = U_i^T U_i, Q = V_j V_j^T and T = U_i^T W_ij V_j^T, the squared error of block (i, j) is, up to a constant,
`tr(M_ij^T P M_ij Q) - 2 tr(M_ij^T T)`. Each block M_ij is an independent problem. Everything is computed on the
weight's device in float64, which products of a matrix with its own transpose need.

If the inputs' second moments S are known (`Metric`), an error E of the weight is measured by that of the layer's
outputs, `tr(E S E^T)`. The best low-rank approximation is then the truncated decomposition of the weight times the
Cholesky factor of S (SVD-LLM, arXiv 2403.07378). Blocks of columns depend on each other, so they are fitted one after
the other, with the others fixed.

Arguments of all functions: `weight` [d2, d1], blocks U_i as `u` [K, d2 / K, r], blocks V_j as `v` [K, r, d1 / K], M's
parameters as `mixing` in the shapes of `moevolve.kernels.block_mix.block_mix`, all float64 on the weight's device, and
`metric`, the measure of the error; None stands for the Frobenius norm.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moevolve.workers.methods.shared.spectra import leading_eigenvectors, peak_signs

# Damping toward the previous solution, as a share of a least-squares problem's mean curvature.
_DAMPING = 1e-10
# Damping without any curvature, as for a factor that M gives no influence.
_LEAST_DAMPING = 1e-30
# Singular values below this share of the largest are lost in rounding, since their squares are computed.
_NEGLIGIBLE = 1e-8
# Addition to second moments as a share of their mean, so that rare directions of the inputs count too.
_MOMENT_FLOOR = 1e-3


@dataclass(frozen=True, slots=True, eq=False)
class Metric:
    """Measures a weight's error by the error of the layer's outputs.

    Attributes:
        moments: Second moments S of the layer's inputs, positive definite, float64 [d1, d1].
    """

    moments: Tensor

    @classmethod
    def of(cls, moments: Tensor) -> Metric:
        """Make a metric from measured moments [d1, d1], on their device."""
        measured = moments.double()
        floor = _MOMENT_FLOOR * float(measured.diagonal().mean()) + _LEAST_DAMPING
        return cls(measured + torch.diag(torch.full_like(measured[0], floor)))

    def compensation(self, error: Tensor, columns: slice) -> Tensor:
        """Change of some columns that compensates best for an error [n, d1] of all columns: [n, columns]."""
        found: Tensor = torch.linalg.solve(self.moments[columns, columns], error @ self.moments[:, columns], left=False)
        return found


def low_rank_factors(weight: Tensor, rank: int, metric: Metric | None = None) -> tuple[Tensor, Tensor]:
    """Return the best approximation `U V` of a given rank, by truncated singular value decomposition.

    The singular vectors of the shorter side are eigenvectors of the weight times its own transpose, and the
    approximation is the weight projected on them. U and V share the singular values evenly. In each column of U the
    entry of largest magnitude is positive. The rank is 1 to min(d1, d2), and the weight may have any dtype.

    Returns:
        U [d2, r] and V [r, d1].
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
    # The product doesn't depend on the shares, but rounding must not make one 0.
    shares = shares.clamp_min(_NEGLIGIBLE * float(shares[0]) + _LEAST_DAMPING).sqrt()
    shares = shares if whole.shape[0] <= whole.shape[1] else 1 / shares
    signs = peak_signs(left)
    return left * (shares * signs), right * (signs / shares)[:, None]


def _symmetric(product: Tensor) -> Tensor:
    """Remove the asymmetry that rounding leaves."""
    return (product + product.t()) / 2


def split_factors(u: Tensor, v: Tensor, blocks: int) -> tuple[Tensor, Tensor]:
    """Cut U [d2, r] into blocks of rows [K, d2 / K, r], and V [r, d1] into blocks of columns [K, r, d1 / K]."""
    rank = u.shape[1]
    return u.reshape(blocks, -1, rank), v.reshape(rank, blocks, -1).permute(1, 0, 2).contiguous()


def fit_factors(
    weight: Tensor, u: Tensor, v: Tensor, mixing: Tensor, metric: Metric | None = None
) -> tuple[Tensor, Tensor]:
    """Solve for V, then for U, given M.

    Given U and M, every V_j is an independent least-squares problem over the weight's columns of block j. Given V and
    M, so is every U_i over the rows of block i. No step increases the error, and optimal factors stay as they are.
    """
    mixing = _as_diagonals(mixing)
    v = _fit_columns(weight, u, v, mixing, metric)
    found = []
    for i, (row, before) in enumerate(zip(weight.chunk(len(u)), u, strict=True)):
        # `V_j^T M_ij^T` for every j, stacked to [d1, r]. Times U_i^T it gives the weight's block row i transposed. The
        # transpose of diag(c) + alpha beta^T swaps alpha and beta.
        blocks = mixing[..., i, :, :]
        design = _multiply(v.transpose(1, 2), blocks[[0, 2, 1]] if blocks.dim() == 3 else blocks).flatten(0, 1)
        weighed = design if metric is None else metric.moments @ design
        found.append(damped_solve(weighed.t() @ design, weighed.t() @ row.t(), before.t()).t())
    return torch.stack(found).contiguous(), v.contiguous()


def _fit_columns(target: Tensor, u: Tensor, v: Tensor, mixing: Tensor, metric: Metric | None) -> Tensor:
    """Solve for every V_j given U and M: [K, r, d1 / K]."""
    blocks, size = len(u), v.shape[2]
    columns = target.chunk(blocks, dim=1)
    # `U_i M_ij` for every i, stacked to [d2, r]. Times V_j it gives the weight's block column j.
    designs = [_multiply(u, mixing[..., :, j, :]).flatten(0, 1) for j in range(blocks)]
    if metric is None:
        return torch.stack([_fit(designs[j], columns[j], v[j]) for j in range(blocks)])
    found = list(v)
    error = target - torch.cat([designs[j] @ v[j] for j in range(blocks)], dim=1)
    for j, design in enumerate(designs):
        here = slice(j * size, (j + 1) * size)
        found[j] = _fit(design, design @ v[j] + metric.compensation(error, here), v[j])
        error[:, here] -= design @ (found[j] - v[j])
    return torch.stack(found)


def damped_solve(curvature: Tensor, moment: Tensor, before: Tensor) -> Tensor:
    """Solve a batch of normal equations with slight damping, so that undetermined directions stay as they were.

    Args:
        curvature: Positive semi-definite matrices, float64 [..., n, n].
        moment: Right-hand sides, [..., n, m].
        before: Previous solutions, [..., n, m].
    """
    sizes = curvature.diagonal(dim1=-2, dim2=-1)
    damping = _DAMPING * sizes.mean(dim=-1, keepdim=True) + _LEAST_DAMPING
    factors = torch.linalg.cholesky(curvature + torch.diag_embed(damping.expand_as(sizes)))
    return torch.cholesky_solve(moment + damping[..., None] * before, factors)


def _as_diagonals(mixing: Tensor) -> Tensor:
    # Scalars become diagonals of one entry: [K, K, 1 or r], or [3, K, K, r].
    return mixing[:, :, None] if mixing.dim() == 2 else mixing


def _multiply(factors: Tensor, row: Tensor) -> Tensor:
    """Multiply K matrices [K, n, r] by K blocks of M, given as [K, 1 or r] or [3, K, r]."""
    if row.dim() == 2:
        return factors * row[:, None, :]
    diagonal, alpha, beta = row
    return factors * diagonal[:, None, :] + (factors @ alpha[:, :, None]) * beta[:, None, :]


def _fit(design: Tensor, target: Tensor, before: Tensor) -> Tensor:
    """Return the X [r, m] that minimises `|design X - target|` for matrices [n, r] and [n, m]."""
    return damped_solve(design.t() @ design, design.t() @ target, before)


def fit_layer(
    weight: Tensor, rank: int, blocks: int, start: Tensor, rounds: int, metric: Metric | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Fit U, V and M of a layer together by alternating least squares.

    The truncated singular value decomposition with identity blocks of M is a fixed point of solving for U and V. In
    variant I, solving for M moves little from there either, since plain low rank is near a local minimum. Gaussian
    factors and mixing end with larger errors.

    Args:
        weight: Weight of any dtype.
        rank: Rank r.
        blocks: Number of blocks K, a divisor of d1 and d2.
        start: M's parameters to start from.
        rounds: Number of rounds; each solves for V, U and then M. With 0 the result is the decomposition and `start`.
        metric: Measure of the error.

    Returns:
        U, V and M's parameters.
    """
    target = weight.detach().double()
    mixing = start.to(target)
    u, v = split_factors(*low_rank_factors(target, rank, metric), blocks)
    for _ in range(rounds):
        u, v = fit_factors(target, u, v, mixing, metric)
        mixing = fit_mixing(target, u, v, mixing, metric)
    return balance(u, v, mixing) if rounds else (u, v, mixing)


def balance(u: Tensor, v: Tensor, mixing: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Scale M's scalars or diagonals to about 1, moving the scales to columns of U_i and rows of V_j."""
    diagonals = {2: mixing[..., None], 3: mixing, 4: mixing[0]}[mixing.dim()]
    left = _rms(diagonals, 1)
    right = _rms(diagonals / left[:, None], 0)
    u, v = u * left[:, None, :], v * right[:, :, None]
    if mixing.dim() == 2:
        return u, v, mixing / left / right.t()
    if mixing.dim() == 3:
        return u, v, mixing / left[:, None] / right
    diagonal, alpha, beta = mixing
    alpha, beta = alpha / left[:, None], beta / right
    # Both get equal norms, which doesn't change their outer product; they stay as they are if one is zero.
    first, second = alpha.norm(dim=-1, keepdim=True), beta.norm(dim=-1, keepdim=True)
    scale = torch.where(first * second > 0, (second / first.clamp_min(1e-300)).sqrt(), 1.0)
    return u, v, torch.stack([diagonal / left[:, None] / right, alpha * scale, beta / scale])


def _rms(diagonals: Tensor, dim: int) -> Tensor:
    """Root mean square of [K, K, r] over one index; 1 instead of 0."""
    size = diagonals.square().mean(dim=dim).sqrt()
    return torch.where(size > 0, size, 1.0)


def fit_mixing(weight: Tensor, u: Tensor, v: Tensor, mixing: Tensor, metric: Metric | None = None) -> Tensor:
    """Solve for M's parameters given the factors. No step increases the error.

    Variants I and II are solved exactly. In variant III the error isn't convex: c and alpha are solved for given beta,
    then c and beta given alpha.
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
    """Fit block after block, with the others fixed."""
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
    return _multiply(u[i : i + 1], _as_diagonals(mixing)[..., i, j : j + 1, :])[0] @ v[j]


def _fit_row(left: Tensor, right: Tensor, targets: Tensor, before: Tensor) -> Tensor:
    """Solve for a row of M's blocks, [K], [K, r] or [3, K, r], from P, Q and T, all [K, r, r]."""
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
    """Solve for c and alpha of `diag(c) + alpha beta^T`, both [K, r], given beta."""
    turned = (right @ beta[:, :, None])[:, :, 0]
    weights = (beta * turned).sum(dim=1)[:, None, None]
    upper = torch.cat([left * right, turned[:, :, None] * left], dim=2)
    lower = torch.cat([left * turned[:, None, :], weights * left], dim=2)
    wanted = torch.cat([targets.diagonal(dim1=1, dim2=2), (targets @ beta[:, :, None])[:, :, 0]], dim=1)
    found = _solve(torch.cat([upper, lower], dim=1), wanted, torch.cat([diagonal, alpha], dim=1))
    first, second = found.chunk(2, dim=1)
    return first, second


def _solve(curvature: Tensor, wanted: Tensor, before: Tensor) -> Tensor:
    """Solve K systems of normal equations [K, n, n] and [K, n]: [K, n]."""
    return damped_solve(curvature, wanted[:, :, None], before[:, :, None])[:, :, 0]
