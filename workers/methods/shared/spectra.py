"""The leading eigenvectors of a large matrix, on its device, without decomposing the whole of it."""

from __future__ import annotations

import torch
from torch import Tensor

_WHOLE = 512
"""Matrices up to this size are decomposed whole, which takes a tenth of a second."""
_SHARE = 8
"""So are those of whose eigenvectors more than one in so many is wanted: products with a block of vectors, repeated,
would take as long."""
_OVERSAMPLING = 16
"""Vectors that are iterated beside those that are wanted."""
_ITERATIONS = 8


def leading_eigenvectors(square: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The largest eigenvalues of a matrix with their eigenvectors.

    Where few are wanted of a large matrix, by randomised subspace iteration with a Rayleigh-Ritz step behind it (Halko,
    Martinsson and Tropp, SIAM Review 53, 2011, Alg. 4.4 and 5.3): `4 n^2 b` operations for each of 8 iterations and
    `b = count + 16` vectors, orthonormalisation included, instead of about `9 n^3`. It starts from the same random
    vectors every time, so that one machine gives the same bits again.

    Args:
        square: symmetric and positive semi-definite, float64 [n, n]. Where it is a matrix times its own transpose,
            float64 is needed: the product squares the ratio of the largest to the smallest singular value.
        count: how many, 0 to n.

    Returns:
        Eigenvalues [count], largest first and at least 0, and eigenvectors [n, count], the entry of largest size in
        each positive; float64 on the matrix's device.
    """
    size, block = len(square), count + _OVERSAMPLING
    if size <= _WHOLE or _SHARE * block > size:
        values, vectors = torch.linalg.eigh(square)
    else:
        basis = torch.randn(size, block, generator=torch.Generator().manual_seed(0), dtype=square.dtype)
        basis = torch.linalg.qr(basis.to(square.device)).Q
        for _ in range(_ITERATIONS):
            basis = torch.linalg.qr(square @ basis).Q
        values, inner = torch.linalg.eigh(basis.t() @ (square @ basis))
        vectors = basis @ inner
    values, vectors = values.flip(0)[:count].clamp_min(0), vectors.flip(1)[:, :count]
    return values, vectors * peak_signs(vectors)


def peak_signs(columns: Tensor) -> Tensor:
    """Per column 1 or -1, which makes its entry of largest size positive: [columns] of [n, columns]."""
    if not columns.numel():
        return columns.new_ones(columns.shape[1])
    peaks = columns.gather(0, columns.abs().argmax(dim=0, keepdim=True)).flatten()
    return torch.where(peaks < 0, -1.0, 1.0).to(columns.dtype)
