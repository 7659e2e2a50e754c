"""Leading eigenvectors against whole decompositions in float64."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor

from moevolve.workers.methods.shared.input_statistics import principal_directions
from moevolve.workers.methods.shared.spectra import leading_eigenvectors

SIZE = 600
SPECTRA = {
    "slow": torch.arange(1, SIZE + 1, dtype=torch.float64) ** -0.4,
    "steep": 0.9 ** torch.arange(SIZE, dtype=torch.float64),
    # A few inputs a thousand times as large as the others, as massive activations are.
    "outliers": torch.cat([torch.full((3,), 1e6, dtype=torch.float64), 1 / torch.arange(1.0, SIZE - 2).double()]),
    "flat": torch.ones(SIZE, dtype=torch.float64),
}


def matrix(values: Tensor, seed: int = 0) -> Tensor:
    """A matrix with these eigenvalues and random eigenvectors."""
    drawn = torch.randn(len(values), len(values), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    basis = torch.linalg.qr(drawn).Q
    return basis * values @ basis.t()


@cache
def decomposed_matrix(spectrum: str) -> tuple[Tensor, Tensor]:
    """A matrix with one of the spectra, and its eigenvalues as they come out of it, largest first."""
    square = matrix(SPECTRA[spectrum])
    return square, torch.linalg.eigvalsh(square).flip(0)


@pytest.mark.parametrize(("spectrum", "count"), [("steep", 8), ("slow", 40), ("outliers", 8), ("flat", 1)])
def test_few_of_many_hold_what_the_exact_ones_hold(spectrum: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    square, every = decomposed_matrix(spectrum)
    exact, rest = every[:count], float(every[count:].norm())
    whole, decomposed = torch.linalg.eigh, list[int]()

    def small(part: Tensor) -> tuple[Tensor, Tensor]:
        decomposed.append(len(part))
        return whole(part)

    monkeypatch.setattr(torch.linalg, "eigh", small)
    values, vectors = leading_eigenvectors(square, count)
    assert decomposed == [count + 16], "the whole matrix was decomposed"
    torch.testing.assert_close(vectors.t() @ vectors, torch.eye(count, dtype=torch.float64), rtol=0, atol=1e-10)
    captured = float((vectors.t() @ square @ vectors).trace())
    assert 0.99 * float(exact.sum()) <= captured <= float(exact.sum()) * (1 + 1e-9)
    missed = float((square - vectors * values @ vectors.t()).norm())
    assert missed <= 1.01 * rest + 1e-12 * float(exact[0])
    assert (values.diff() <= 0).all() and (vectors.gather(0, vectors.abs().argmax(dim=0, keepdim=True)) > 0).all()
    if spectrum == "steep":
        torch.testing.assert_close(values, exact, rtol=1e-4, atol=0)


def test_directions_without_variance_are_zero_in_wide_layers() -> None:
    values = torch.zeros(SIZE, dtype=torch.float64)
    values[:3] = torch.tensor([4.0, 2.0, 1.0])
    square = matrix(values)
    directions = principal_directions(square, 8)
    products = directions @ square @ directions.t()
    torch.testing.assert_close(products[:3, :3], torch.eye(3, dtype=torch.float64))
    assert not directions[3:].any()
