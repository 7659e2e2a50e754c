"""The block-mixed linear layer `y = blockdiag(U_1..U_K) M blockdiag(V_1..V_K) x + b` of NanoMoE, Eq. 1 and 2.

The blocks of M are `a_ij I` (variant I), `diag(b_ij)` (II) or `diag(c_ij) + alpha_ij beta_ij^T` (III); without M the
layer is plain low rank, `U V x`. Neither the layer's dense weight nor M is ever built.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moevolve.kernels.products import batched, linear


def block_mix(x: Tensor, u: Tensor, v: Tensor, mixing: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """Apply a block-mixed linear layer. All tensors have the same dtype and device.

    Args:
        x: Inputs [..., d1].
        u: Blocks U_i, [K, d2 / K, r].
        v: Blocks V_j, [K, r, d1 / K].
        mixing: Parameters of M, where [i, j] belong to block M_ij: `a` [K, K] (variant I), `b` [K, K, r] (II), or `c`,
            `alpha` and `beta` [3, K, K, r] (III); None for plain low rank, which has K = 1.
        bias: Bias [d2], or None.

    Returns:
        [..., d2].
    """
    blocks, height, _ = u.shape
    tokens = x.reshape(-1, blocks, v.shape[2])
    latent = batched(tokens.transpose(0, 1), v)
    if mixing is not None:
        latent = _mix(mixing, latent)
    out = batched(latent, u).transpose(0, 1).reshape(len(tokens), blocks * height)
    if bias is not None:
        out += bias
    return out.view(*x.shape[:-1], blocks * height)


def _mix(mixing: Tensor, latent: Tensor) -> Tensor:
    """Multiply the stacked V_j x_j, [K, tokens, r], by M; returns the same shape."""
    if mixing.dim() == 2:
        return linear(latent.flatten(1).t(), mixing).t().reshape(latent.shape)
    if mixing.dim() == 3:
        return _mix_diagonals(mixing, latent)
    diagonals, alpha, beta = mixing.unbind(0)
    # [j, tokens, i]: beta_ij . (V_j x_j)
    weights = batched(latent, beta.transpose(0, 1))
    return _mix_diagonals(diagonals, latent) + batched(weights.permute(2, 1, 0), alpha.transpose(1, 2))


def _mix_diagonals(diagonals: Tensor, latent: Tensor) -> Tensor:
    """Compute `out_i = sum_j diagonals_ij * latent_j` for [K, K, r] and [K, tokens, r]."""
    if latent.device.type != "cpu":
        return torch.einsum("ijk,jtk->itk", diagonals, latent)
    # For few blocks this loop is also faster than r small matrix products.
    mixed = diagonals[:, :1] * latent[0]
    for block in range(1, len(latent)):
        mixed += diagonals[:, block : block + 1] * latent[block]
    return mixed
