"""Ridge fits against dense float64 solves."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ridge_samples import MEMORY, Blocks, Problem, problem
from torch.profiler import ProfilerActivity, profile

from moevolve.evaluators.errors import UserError
from moevolve.workers.methods.repair.ridge import fit_bytes, fit_ridge


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
    np.testing.assert_allclose(case.change(fit), expected, rtol=0, atol=2e-4 * max(1.0, np.abs(expected).max()))


@pytest.mark.parametrize("tokens", [90, 30])
def test_squares_are_weighted_by_token(tokens: int) -> None:
    case = problem(8, tokens, (25, 15), 3, 0.7, noise=2.0)
    weights = np.random.default_rng(1).choice([0.5, 1.0, 6.0], tokens)
    fit = fit_ridge(case.system(weights), (0.1,), MEMORY)
    assert fit is not None
    # Weighted least squares by the normal equations.
    fitted = ~case.checked
    gram = case.phi[fitted].T @ (weights[fitted, None] * case.phi[fitted])
    right = case.phi[fitted].T @ (weights[fitted, None] * case.residual[fitted])
    expected = np.linalg.solve(gram + 0.1 * np.diag(gram).mean() * np.eye(40), right)
    np.testing.assert_allclose(case.change(fit), expected, atol=2e-4 * np.abs(expected).max())
    left = weights[case.checked, None] * (case.residual - case.phi @ expected)[case.checked] ** 2
    assert fit.outcome.after == pytest.approx(left.sum(), rel=1e-3)
    before = (weights[case.checked, None] * case.residual[case.checked] ** 2).sum()
    assert fit.outcome.before == pytest.approx(before, rel=1e-5)
    assert case.system(weights).held_out_error() == pytest.approx(before, rel=1e-5)
    unweighted = case.fit((0.1,))
    assert unweighted is not None and np.abs(case.change(unweighted) - expected).max() > 0.05


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
        case.features.parts[0].values[1, 2] = value
        case.checked[1] = False
    else:
        case.residual[np.flatnonzero(case.checked == where.startswith("checked"))[0], 0] = value
    assert case.fit((1e-3, 1e-1)) is None


def test_features_that_are_all_zero_are_not_fitted() -> None:
    zero = Problem(Blocks((), 6), np.zeros((9, 6)), np.ones((9, 2)), np.arange(9) == 8)
    assert zero.fit((0.1,)) is None


@pytest.mark.parametrize("tokens", [90, 30])
def test_too_little_memory_is_the_users_to_allow(tokens: int) -> None:
    case = problem(6, tokens, (40,), 3, 1.0)
    enough = math.ceil(fit_bytes(40, tokens, 3) * 8 / 7) + 8
    assert case.fit((0.1,), enough) is not None
    with pytest.raises(UserError, match=rf"fitting 40 features on {tokens} tokens takes .* memory_mb is 0"):
        case.fit((0.1,), enough - 16)


def peak_of(case: Problem, ridge_lambdas: Sequence[float]) -> int:
    """Peak bytes of a fit, without blocks of features unless all are kept."""
    system = case.system()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        fit_ridge(system, ridge_lambdas, MEMORY)
    assert watched.profiler is not None and watched.profiler.kineto_results is not None
    events = [each for each in watched.profiler.kineto_results.events() if each.name() == "[memory]"]
    kept = 4 * case.phi.size if case.phi.shape[1] <= len(case.phi) else 0
    return kept + int(np.cumsum([each.nbytes() for each in sorted(events, key=lambda each: each.start_ns())]).max())


SHAPES = pytest.mark.parametrize(
    ("tokens", "widths", "hidden"),
    [(2000, (100, 100, 100), 400), (500, (400, 400), 20)],
)


@SHAPES
def test_a_fit_takes_no_more_memory_than_it_says(tokens: int, widths: tuple[int, ...], hidden: int) -> None:
    case = problem(8, tokens, widths, hidden, 0.6)
    stated = fit_bytes(sum(widths), tokens, hidden)
    assert 0.4 * stated < peak_of(case, (0.01, 0.1, 1.0)) <= stated
