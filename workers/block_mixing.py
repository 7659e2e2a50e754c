"""The mixing matrix M of a block-mixed linear layer fitted to the layer's weight, by least squares (NanoMoE, Eq. 1).

With P = U_i^T U_i, Q = V_j V_j^T and T = U_i^T W_ij V_j^T, the squared error of block (i, j) is, up to a constant,
`tr(M_ij^T P M_ij Q) - 2 tr(M_ij^T T)`; every block is a problem of its own. Float64 on the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moevolve.workers.block_factors import damped_solve, low_rank_factors, on_host, refine_factors, split_factors


def fit_layer(weight: Tensor, rank: int, blocks: int, start: Tensor, rounds: int) -> tuple[Tensor, Tensor, Tensor]:
    """U, V and M of a layer together: alternating least squares, from the truncated singular value decomposition.

    Args:
        weight: [d2, d1].
        rank: r.
        blocks: K, dividing d1 and d2.
        start: M's parameters to start from; see `moevolve.kernels.block_mix.block_mix`.
        rounds: how often V, U and then M are solved for; 0 gives the decomposition and `start`.

    Returns:
        U [K, d2 / K, r], V [K, r, d1 / K], and M's parameters in the shape of `start`; float64 on the host.
    """
    target = on_host(weight)
    u, v = split_factors(*low_rank_factors(target, rank), blocks)
    mixing = on_host(start)
    for _ in range(rounds):
        u, v = refine_factors(target, u, v, mixing, 1)
        mixing = fit_mixing(target, u, v, mixing)
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


def fit_mixing(weight: Tensor, u: Tensor, v: Tensor, mixing: Tensor) -> Tensor:
    """M's parameters that minimise the weight's error for given factors; no step makes it larger.

    Scalars and diagonals are the minimum. With rank-one parts, whose error is not convex, c and alpha are solved for
    together given beta, then c and beta given alpha.

    Args:
        weight: float64 [d2, d1].
        u: the blocks U_i, float64 [K, d2 / K, r].
        v: the blocks V_j, float64 [K, r, d1 / K].
        mixing: M's parameters before.

    Returns:
        The same shape, float64.
    """
    blocks = len(u)
    right = v @ v.transpose(1, 2)
    rows = []
    for i, row in enumerate(weight.chunk(blocks)):
        left = (u[i].t() @ u[i]).expand(blocks, -1, -1)
        targets = (u[i].t() @ row).view(len(left[0]), blocks, -1).transpose(0, 1) @ v.transpose(1, 2)
        rows.append(_fit_row(left, right, targets, mixing[..., i, :] if mixing.dim() == 2 else mixing[..., i, :, :]))
    return torch.stack(rows, dim=-3 if mixing.dim() > 2 else 0)


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
        alpha, beta = torch.zeros_like(alpha), torch.linalg.svd(error).Vh[:, 0]
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
