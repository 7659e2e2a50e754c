"""Fits of one factor per layer against their closed forms in float64."""

from __future__ import annotations

import numpy as np
import pytest
from ridge_samples import MEMORY, Floats, problem

from moevolve.workers.methods.repair.ridge import fit_ridge, fit_scalar, match_energy


def weights_of(width: int, hidden: int) -> Floats:
    return np.random.default_rng(9).standard_normal((width, hidden))


@pytest.mark.parametrize("weighted", [False, True])
def test_the_factor_is_the_best_one(weighted: bool) -> None:
    case, present = problem(1, 60, (8, 5), 4, 0.8), weights_of(13, 4)
    case.residual[:] = -0.4 * case.phi @ present + 0.1 * case.residual  # the output should be 0.6 of what it is
    weights = np.random.default_rng(2).uniform(0.2, 3, 60) if weighted else np.ones(60)
    layer = case.system(weights if weighted else None, present)
    fit = fit_scalar(layer, MEMORY)
    assert fit is not None and fit.outcome.ridge_lambda is None
    output, target = case.phi @ present, case.phi @ present + case.residual
    fitted, squares = ~case.checked, weights[:, None]
    best = (squares * output * target)[fitted].sum() / (squares * output * output)[fitted].sum()
    assert fit.factor == pytest.approx(best, rel=1e-4) and 0.4 < fit.factor < 0.8
    np.testing.assert_allclose(case.change(fit, present), (best - 1) * present, rtol=1e-3, atol=1e-5)
    left = (squares * (target - best * output) ** 2)[case.checked].sum()
    assert fit.outcome.after == pytest.approx(left, rel=1e-3)


def test_a_factor_that_makes_held_out_tokens_worse_is_refused() -> None:
    case, present = problem(1, 60, (8, 5), 4, 0.8), weights_of(13, 4)
    case.residual[:] = -0.4 * case.phi @ present
    case.residual[case.checked] *= -1
    assert fit_scalar(case.system(present=present), MEMORY) is None
    silent = problem(1, 60, (8, 5), 4, 0.0)
    assert fit_scalar(silent.system(present=present), MEMORY) is None, "there is no output to scale"


@pytest.mark.parametrize("tokens", [90, 30])
@pytest.mark.parametrize("weighted", [False, True])
def test_energy_is_that_of_the_target_on_held_out_tokens(tokens: int, weighted: bool) -> None:
    case, present = problem(3, tokens, (25, 15), 3, 0.8, noise=4.0), weights_of(40, 3)
    weights = np.random.default_rng(2).uniform(0.2, 3, tokens) if weighted else np.ones(tokens)
    layer = case.system(weights if weighted else None, present)
    ridge = fit_ridge(layer, (0.3,), MEMORY)
    assert ridge is not None
    fit = match_energy(ridge, layer, MEMORY)
    squares = weights[case.checked, None]
    target = (case.phi @ present + case.residual)[case.checked]
    fitted = (case.phi @ (present + case.change(ridge, present)))[case.checked]
    expected = np.sqrt((squares * target**2).sum() / (squares * fitted**2).sum())
    assert fit.factor == pytest.approx(expected, rel=1e-4)
    matched = (case.phi @ (present + case.change(fit, present)))[case.checked]
    assert (squares * matched**2).sum() == pytest.approx((squares * target**2).sum(), rel=1e-4)
    assert fit.outcome.after == pytest.approx((squares * (target - matched) ** 2).sum(), rel=1e-3)
    assert fit.outcome.before == ridge.outcome.before
