"""Factors U and V of a block-mixed linear layer (NanoMoE, Eq. 1 and 2) from the weight that it stands in for.

All in float64 on the host, whatever the model's dtype and device: factors are a function of the weight, the rank and M.
M's parameters are as `moevolve.kernels.block_mix.block_mix` takes them.
"""

from __future__ import annotations

import torch
from torch import Tensor

_DAMPING = 1e-10
"""Pull towards the solution before, as a share of a least-squares problem's mean curvature."""
_LEAST_DAMPING = 1e-30
"""The same where there is no curvature at all, as for a factor that M leaves no influence."""


def low_rank_factors(weight: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The best approximation `U V` of a rank, by truncated singular value decomposition.

    The singular values are shared evenly; the entry of largest size in every column of U is positive.

    Args:
        weight: [d2, d1].
        rank: r, 1 to min(d1, d2).

    Returns:
        U float64 [d2, r] and V float64 [r, d1], on the host.
    """
    left, values, right = torch.linalg.svd(on_host(weight), full_matrices=False)
    left, right = left[:, :rank], right[:rank]
    peaks = left.gather(0, left.abs().argmax(dim=0, keepdim=True)).flatten()
    shares = values[:rank].sqrt() * torch.where(peaks < 0, -1.0, 1.0)
    return left * shares, shares[:, None] * right


def split_factors(u: Tensor, v: Tensor, blocks: int) -> tuple[Tensor, Tensor]:
    """Cut U [d2, r] into blocks of rows [K, d2 / K, r], and V [r, d1] into blocks of columns [K, r, d1 / K]."""
    rank = u.shape[1]
    return u.reshape(blocks, -1, rank), v.reshape(rank, blocks, -1).permute(1, 0, 2).contiguous()


def refine_factors(weight: Tensor, u: Tensor, v: Tensor, mixing: Tensor, rounds: int) -> tuple[Tensor, Tensor]:
    """Alternating least squares on U and V for a given M, in the Frobenius norm of the weight's error.

    Given U and M every V_j is a least-squares problem of its own, over the weight's columns of block j; given V and M
    so is every U_i, over its rows of block i. No step makes the error larger, and factors that are best already stay.

    Args:
        weight: [d2, d1].
        u: the blocks U_i, float64 [K, d2 / K, r].
        v: the blocks V_j, float64 [K, r, d1 / K].
        mixing: M's parameters, not None.
        rounds: how often both are solved for, V first.

    Returns:
        U and V in the shapes given, float64 on the host.
    """
    target, mixing = on_host(weight), _wide(on_host(mixing))
    blocks = len(u)
    columns, rows = target.chunk(blocks, dim=1), target.chunk(blocks, dim=0)
    for _ in range(rounds):
        v = torch.stack([_fit(_mixed_u(u, mixing, j), columns[j], v[j]) for j in range(blocks)])
        u = torch.stack([_fit(_mixed_v(v, mixing, i), rows[i].t(), u[i].t()).t() for i in range(blocks)])
    return u.contiguous(), v.contiguous()


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


def on_host(tensor: Tensor) -> Tensor:
    """As float64 on the host."""
    return tensor.detach().to("cpu", torch.float64)


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
