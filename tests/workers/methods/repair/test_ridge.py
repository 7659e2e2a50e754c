"""Ridge fits against dense float64 solves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from moevolve.workers.methods.repair import ridge
from moevolve.workers.methods.repair.ridge import Fit, LayerSystem, fit_ridge
from moevolve.workers.methods.shared import outputs
from moevolve.workers.methods.shared.outputs import FeatureBlock, Features

Floats = NDArray[np.float64]


def to_float32(array: Floats) -> Tensor:
    return torch.from_numpy(array.astype(np.float32))


@dataclass(frozen=True)
class Problem:
    """Features in blocks and as one matrix, the residual, and the mask of held-out tokens."""

    features: Features
    phi: Floats
    residual: Floats
    checked: NDArray[np.bool_]

    def fit(self, ridge_lambdas: Sequence[float]) -> Fit | None:
        return fit_ridge(self.system(), ridge_lambdas)

    def system(self, token_weights: Floats | None = None) -> LayerSystem:
        return LayerSystem(
            self.features,
            to_float32(self.residual),
            torch.from_numpy(self.checked),
            None if token_weights is None else to_float32(token_weights),
        )

    def error(self, change: Floats) -> float:
        """Squared error on the held-out tokens."""
        return float(((self.residual - self.phi @ change)[self.checked] ** 2).sum())

    def solved(self, ridge_lambda: float) -> Floats:
        """The change of one ridge_lambda, from the normal equations."""
        phi = self.phi[~self.checked]
        gram = phi.T @ phi
        ridge = ridge_lambda * np.diag(gram).mean() * np.eye(phi.shape[1])
        return np.linalg.solve(gram + ridge, phi.T @ self.residual[~self.checked])


def problem(seed: int, tokens: int, widths: Sequence[int], hidden: int, share: float, noise: float = 0.3) -> Problem:
    """Blocks of columns that are nonzero on a share of the tokens; the residual is linear in them up to noise.

    Two rows of padding are behind the values of every block.
    """
    rng = np.random.default_rng(seed)
    phi, parts, start = np.zeros((tokens, sum(widths))), [], 0
    for width in widths:
        at = np.flatnonzero(rng.random(tokens) < share)
        values = rng.standard_normal((len(at), width)).astype(np.float32)
        columns = slice(start, start + width)
        phi[at, columns] = values
        if len(at):
            padding = np.full((2, width), 9, np.float32)
            padded = torch.from_numpy(np.concatenate((values, padding)))
            parts.append(FeatureBlock(columns, torch.from_numpy(at), padded))
        start += width
    residual = phi @ rng.standard_normal((phi.shape[1], hidden)) + noise * rng.standard_normal((tokens, hidden))
    checked = rng.permutation(np.arange(tokens) < max(1, tokens // 8))
    return Problem(Features(phi.shape[1], parts), phi, residual.astype(np.float32).astype(np.float64), checked)


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(3, 40),
    st.lists(st.integers(1, 20), min_size=1, max_size=4),
    st.integers(1, 5),
    st.sampled_from((0.0, 0.2, 0.7, 1.0)),
)
def test_a_fit_is_the_solution_of_the_normal_equations(
    seed: int, tokens: int, widths: list[int], hidden: int, share: float
) -> None:
    ridge_lambdas = (1e-2, 1e-1, 1.0)
    case = problem(seed, tokens, widths, hidden, share)
    fit = case.fit(ridge_lambdas)
    nothing = case.error(np.zeros((case.features.width, hidden)))
    by_strength = {}
    if (case.phi[~case.checked] != 0).any():
        by_strength = {ridge_lambda: case.error(case.solved(ridge_lambda)) for ridge_lambda in ridge_lambdas}
    best = min([nothing, *by_strength.values()])
    if fit is None:
        assert best >= nothing * (1 - 1e-4)
        return
    assert fit.outcome.before == pytest.approx(nothing, rel=1e-5)
    assert fit.outcome.after == pytest.approx(by_strength[fit.outcome.ridge_lambda], rel=1e-3, abs=1e-5)
    assert fit.outcome.after <= best * (1 + 1e-3) + 1e-5 and fit.outcome.after < fit.outcome.before
    expected = case.solved(fit.outcome.ridge_lambda)
    np.testing.assert_allclose(fit.change.numpy(), expected, rtol=0, atol=2e-4 * max(1.0, np.abs(expected).max()))


@pytest.mark.parametrize("tokens", [90, 30])
def test_squares_are_weighted_by_token(tokens: int) -> None:
    case = problem(8, tokens, (25, 15), 3, 0.7, noise=2.0)
    weights = np.random.default_rng(1).choice([0.5, 1.0, 6.0], tokens)
    fit = fit_ridge(case.system(weights), (0.1,))
    assert fit is not None
    # Weighted least squares by the normal equations.
    fitted = ~case.checked
    gram = case.phi[fitted].T @ (weights[fitted, None] * case.phi[fitted])
    right = case.phi[fitted].T @ (weights[fitted, None] * case.residual[fitted])
    expected = np.linalg.solve(gram + 0.1 * np.diag(gram).mean() * np.eye(40), right)
    np.testing.assert_allclose(fit.change.numpy(), expected, atol=2e-4 * np.abs(expected).max())
    left = weights[case.checked, None] * (case.residual - case.phi @ expected)[case.checked] ** 2
    assert fit.outcome.after == pytest.approx(left.sum(), rel=1e-3)
    before = (weights[case.checked, None] * case.residual[case.checked] ** 2).sum()
    assert fit.outcome.before == pytest.approx(before, rel=1e-5)
    assert case.system(weights).held_out_error() == pytest.approx(before, rel=1e-5)
    unweighted = case.fit((0.1,))
    assert unweighted is not None and np.abs(unweighted.change.numpy() - expected).max() > 0.05


@pytest.mark.parametrize("tokens", [90, 30])
def test_the_strength_that_leaves_least_on_checked_tokens_is_taken(tokens: int) -> None:
    case = problem(1, tokens, (40,), 3, 1.0, noise=3.0)
    ridge_lambdas = (1e-3, 0.1, 1.0, 10.0, 1e4)
    fit = case.fit(ridge_lambdas)
    assert fit is not None
    assert fit.outcome.ridge_lambda == min(ridge_lambdas, key=lambda each: case.error(case.solved(each)))
    assert fit.outcome.ridge_lambda not in (1e-3, 1e4)


@pytest.mark.parametrize("tokens", [90, 30])
def test_nothing_is_changed_where_that_makes_checked_tokens_worse(tokens: int) -> None:
    case = problem(2, tokens, (40,), 3, 1.0, noise=0.0)
    case.residual[case.checked] *= -1
    assert case.fit((1e-3, 1e-1, 10.0)) is None


@pytest.mark.parametrize(
    ("tokens", "value", "where"),
    [
        (90, math.nan, "features"),
        (30, math.inf, "residual"),
        (90, math.inf, "checked residual"),
        (30, math.nan, "features"),
    ],
)
def test_what_is_not_finite_is_not_fitted(tokens: int, value: float, where: str) -> None:
    case = problem(4, tokens, (40,), 3, 1.0)
    if where == "features":
        case.features.blocks[0].values[1, 2] = value
        case.checked[1] = False
    else:
        case.residual[np.flatnonzero(case.checked == where.startswith("checked"))[0], 0] = value
    assert case.fit((1e-3, 1e-1)) is None


def test_features_that_are_all_zero_are_not_fitted() -> None:
    zero = Problem(Features(6, []), np.zeros((9, 6)), np.ones((9, 2)), np.arange(9) == 8)
    assert zero.fit((0.1,)) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_iterations_over_panels_come_near_to_the_solution(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in layers of published width: several panels, outputs in parts, and products of bfloat16."""
    for name, value in (("_PANEL", 24), ("_ONE_PANEL", 24), ("_COLUMNS", 3), ("_COMBINATIONS", 4)):
        monkeypatch.setattr(ridge, name, value)
    monkeypatch.setattr(outputs, "_WIDE", 1)
    case = problem(5, 600, (20, 12, 20, 30), 8, 0.4, noise=2.0)
    parts = [FeatureBlock(each.columns, each.tokens, each.values.to(dtype)) for each in case.features.blocks]
    rounded = Features(case.features.width, parts)
    for block in parts:
        case.phi[block.tokens.numpy(), block.columns] = block.values[: len(block.tokens)].double().numpy()
    case = Problem(rounded, case.phi, case.residual, case.checked)
    fit = case.fit((1e-2, 1e-1, 10.0))
    assert fit is not None and fit.outcome.ridge_lambda is not None
    expected = case.solved(fit.outcome.ridge_lambda)
    precision = 2e-3 if dtype == torch.float32 else 2e-2
    assert case.error(fit.change.double().numpy()) < (1 + precision) * case.error(expected)
    assert np.linalg.norm(fit.change.numpy() - expected) < 10 * precision * np.linalg.norm(expected)
    assert fit.outcome.after == pytest.approx(case.error(fit.change.double().numpy()), rel=5 * precision)
