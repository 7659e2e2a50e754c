"""Factors and mixing matrices fitted to a weight, against closed forms; no step increases the error."""

from __future__ import annotations

from itertools import pairwise

import oracles
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moevolve.workers.methods.nanomoe.edit import BlockForm, Variant
from moevolve.workers.methods.nanomoe.mixing import (
    Metric,
    balance,
    fit_factors,
    fit_layer,
    fit_mixing,
    low_rank_factors,
    split_factors,
)

VARIANTS: tuple[Variant, ...] = ("I", "II", "III")


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def parameters(variant: Variant, blocks: int, rank: int, seed: int = 0) -> Tensor:
    return random(*BlockForm(variant, blocks, rank).mixing_shape, seed=seed)


def unmixed(variant: Variant, blocks: int, rank: int) -> Tensor:
    return torch.from_numpy(BlockForm(variant, blocks, rank).unmixed).double()


def error(weight: Tensor, u: Tensor, v: Tensor, mixing: Tensor) -> float:
    return float((weight - oracles.block_mix_weight(u, v, mixing)).norm() / weight.norm())


@pytest.mark.parametrize("variant", VARIANTS)
def test_refining_solves_for_each_factor(variant: Variant) -> None:
    """V, then U, against one least-squares problem over all their entries that ignores the blocks."""
    blocks, rank, height, width = 3, 2, 4, 5
    weight, mixing = random(12, 15), parameters(variant, blocks, rank, 5)
    u, v = random(blocks, height, rank, seed=1), random(blocks, rank, width, seed=2)
    fitted_u, fitted_v = fit_factors(weight, u, v, mixing)

    def brute(of: Tensor, build: str) -> Tensor:
        basis = torch.eye(of.numel(), dtype=torch.float64).view(-1, *of.shape)
        images = [
            oracles.block_mix_weight(*((u, each) if build == "v" else (each, fitted_v)), mixing).flatten()
            for each in basis
        ]
        return torch.linalg.lstsq(torch.stack(images, dim=1), weight.flatten()[:, None]).solution.view(of.shape)

    torch.testing.assert_close(fitted_v, brute(v, "v"), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(fitted_u, brute(u, "u"), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("variant", ["I", "II"])
def test_fitted_mixing_is_the_least_squares_solution(variant: Variant) -> None:
    blocks, rank = 3, 2
    weight = random(12, 15)
    u, v = random(blocks, 4, rank, seed=1), random(blocks, rank, 5, seed=2)
    before = parameters(variant, blocks, rank)
    basis = torch.eye(before.numel(), dtype=torch.float64).view(-1, *before.shape)
    images = torch.stack([oracles.block_mix_weight(u, v, each).flatten() for each in basis], dim=1)
    expected = torch.linalg.lstsq(images, weight.flatten()[:, None]).solution.view(before.shape)
    torch.testing.assert_close(fit_mixing(weight, u, v, before), expected, atol=1e-6, rtol=1e-6)


@given(
    variant=st.sampled_from(VARIANTS),
    blocks=st.sampled_from([1, 2, 4]),
    rank=st.integers(1, 8),
    dead=st.booleans(),
    seed=st.integers(0, 1000),
)
@settings(max_examples=20, deadline=None)
def test_no_step_makes_the_error_larger(variant: Variant, blocks: int, rank: int, dead: bool, seed: int) -> None:
    """Also with ranks above a block's size, and with factors that M gives no influence."""
    weight = random(8, 12, seed=seed)
    u, v = split_factors(*low_rank_factors(weight, rank), blocks)
    mixing = parameters(variant, blocks, rank, seed)
    if dead:
        mixing[..., 0, :] = 0
        mixing[..., :, 0] = 0
    errors = [error(weight, u, v, mixing)]
    for _ in range(3):
        u, v = fit_factors(weight, u, v, mixing)
        errors.append(error(weight, u, v, mixing))
        mixing = fit_mixing(weight, u, v, mixing)
        errors.append(error(weight, u, v, mixing))
    assert all(torch.isfinite(part).all() for part in (u, v, mixing))
    assert all(after <= before + 1e-7 for before, after in pairwise(errors)), errors


@pytest.mark.parametrize("variant", VARIANTS)
def test_balancing_keeps_the_product(variant: Variant) -> None:
    u, v = random(4, 3, 5, seed=1), random(4, 5, 2, seed=2)
    mixing = parameters(variant, 4, 5, 3) * 10.0 ** random(4, seed=4).view(-1, 1, *([1] * (variant != "I")))
    balanced = balance(u, v, mixing)
    torch.testing.assert_close(oracles.block_mix_weight(*balanced), oracles.block_mix_weight(u, v, mixing))
    diagonals = balanced[2][0] if variant == "III" else balanced[2]
    assert float(diagonals.square().mean(dim=0).sub(1).abs().max()) < 1e-9
    empty = torch.zeros_like(mixing)
    assert all(torch.equal(*pair) for pair in zip(balance(u, v, empty), (u, v, empty), strict=True))


def moments(inputs: int, tokens: int = 60, seed: int = 9) -> Tensor:
    """Second moments of correlated inputs with different variances."""
    seen = random(tokens, inputs, seed=seed) @ random(inputs, inputs, seed=seed + 1) * torch.linspace(0.1, 3, inputs)
    return seen.t() @ seen / tokens


def root_of(metric: Metric) -> Tensor:
    return torch.linalg.cholesky(metric.moments)


def output_error(weight: Tensor, u: Tensor, v: Tensor, mixing: Tensor, metric: Metric) -> float:
    missing = weight - oracles.block_mix_weight(u, v, mixing)
    return float((missing @ metric.moments * missing).sum())


@pytest.mark.parametrize("rank", [1, 8])
def test_low_rank_factors_are_the_best_for_outputs(rank: int) -> None:
    weight, seen = random(9, 14), moments(14)
    metric = Metric.of(seen)
    torch.testing.assert_close(metric.moments, seen, atol=2e-3 * float(seen.diagonal().mean()), rtol=0)
    u, v = low_rank_factors(weight, rank, metric)
    missing = weight - u @ v
    rest = torch.linalg.svdvals(weight @ root_of(metric))[rank:]
    assert float((missing @ metric.moments * missing).sum()) == pytest.approx(float(rest.square().sum()), rel=1e-8)
    plain = weight - torch.matmul(*low_rank_factors(weight, rank))
    assert float((missing @ seen * missing).sum()) < float((plain @ seen * plain).sum())


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_round_makes_outputs_worse(variant: Variant) -> None:
    weight, metric = random(12, 15), Metric.of(moments(15))
    start = unmixed(variant, 3, 2)
    errors = [output_error(weight, *fit_layer(weight, 2, 3, start, rounds, metric), metric) for rounds in range(6)]
    assert all(after <= before * (1 + 1e-9) for before, after in pairwise(errors))
    assert errors[-1] < errors[0]
    plain = output_error(weight, *fit_layer(weight, 2, 3, start, 5), metric)
    assert errors[-1] < plain


def decaying(outputs: int, inputs: int, power: float) -> Tensor:
    """A weight whose singular values follow a power law."""
    left, right = (torch.linalg.qr(random(size, min(outputs, inputs), seed=size)).Q for size in (outputs, inputs))
    return left * torch.arange(1, left.shape[1] + 1, dtype=torch.float64) ** -power @ right.t()


@pytest.mark.parametrize(("shape", "rank", "measured"), [((560, 640), 20, False), ((640, 560), 20, True)])
def test_wide_layers_are_approximated_as_well_as_by_a_whole_decomposition(
    shape: tuple[int, int], rank: int, measured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Float32 weights and inputs, a few of them a hundred times the others, against singular values in float64."""
    weight = decaying(*shape, 0.5).float()
    metric = None
    if measured:
        seen = random(2000, shape[1], seed=3) * torch.linspace(0.1, 3, shape[1])
        seen[:, :4] *= 100
        metric = Metric.of(seen.t() @ seen / len(seen))
    root = torch.eye(shape[1], dtype=torch.float64) if metric is None else root_of(metric)
    rest = torch.linalg.svdvals(weight.double() @ root)[rank:]

    def whole(*_: object, **__: object) -> None:
        raise AssertionError("a weight was decomposed whole")

    monkeypatch.setattr(torch.linalg, "svd", whole)
    u, v = low_rank_factors(weight, rank, metric)
    assert float(((weight - u @ v) @ root).norm()) <= 1.01 * float(rest.norm())
    again = low_rank_factors(weight, rank, metric)
    assert torch.equal(u, again[0]) and torch.equal(v, again[1])
