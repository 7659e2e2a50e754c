"""Ridge fits against dense float64 solves."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from moevolve.evaluators.errors import UserError
from moevolve.workers.methods.repair import ridge
from moevolve.workers.methods.repair.ridge import Fit, fit_bytes, fit_ridge
from moevolve.workers.methods.shared.outputs import FeatureBlock

MEMORY = 1 << 30
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Blocks:
    """Features stored in memory."""

    parts: tuple[FeatureBlock, ...]
    width: int

    def blocks(self, memory: int) -> Iterator[FeatureBlock]:
        yield from self.parts


@dataclass(frozen=True)
class Problem:
    """Features in blocks and as one matrix, the residual, and the mask of held-out tokens."""

    features: Blocks
    phi: Floats
    residual: Floats
    checked: NDArray[np.bool_]

    def fit(self, ridge_lambdas: Sequence[float], memory: int = MEMORY) -> Fit | None:
        residual = torch.from_numpy(self.residual.astype(np.float32))
        return fit_ridge(self.features, residual, torch.from_numpy(self.checked), ridge_lambdas, memory)

    def error(self, change: Floats) -> float:
        """Squared error on the held-out tokens."""
        return float(((self.residual - self.phi @ change)[self.checked] ** 2).sum())

    def solved(self, ridge_lambda: float) -> Floats:
        """The change of one ridge_lambda, from the normal equations."""
        phi = self.phi[~self.checked]
        gram = phi.T @ phi
        ridge = ridge_lambda * np.diag(gram).mean() * np.eye(phi.shape[1])
        return np.linalg.solve(gram + ridge, phi.T @ self.residual[~self.checked])

    def change(self, fit: Fit) -> Floats:
        """All columns' change."""
        whole = np.zeros((self.features.width, self.residual.shape[1]))
        for block in self.features.parts:
            whole[block.columns] = fit.change(block).numpy()
        return whole


def problem(seed: int, tokens: int, widths: Sequence[int], hidden: int, share: float, noise: float = 0.3) -> Problem:
    """Blocks of columns that are nonzero on a share of the tokens; the residual is linear in them up to noise."""
    rng = np.random.default_rng(seed)
    phi, parts, start = np.zeros((tokens, sum(widths))), [], 0
    for width in widths:
        at = np.flatnonzero(rng.random(tokens) < share)
        values = rng.standard_normal((len(at), width)).astype(np.float32)
        columns = slice(start, start + width)
        phi[at, columns] = values
        if len(at):
            parts.append(FeatureBlock(columns, torch.from_numpy(at), torch.from_numpy(values)))
        start += width
    residual = phi @ rng.standard_normal((phi.shape[1], hidden)) + noise * rng.standard_normal((tokens, hidden))
    checked = rng.permutation(np.arange(tokens) < max(1, tokens // 8))
    return Problem(Blocks(tuple(parts), phi.shape[1]), phi, residual.astype(np.float32).astype(np.float64), checked)


@settings(max_examples=60, deadline=None)
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


def test_both_forms_give_the_same_change() -> None:
    case = problem(3, 40, (12, 9, 14), 4, 0.6)
    primal = case.fit((0.05,))
    # Columns of zeros change nothing but the mean of the squares, by which the ridge_lambda is scaled.
    wide = Problem(Blocks(case.features.parts, 50), np.pad(case.phi, ((0, 0), (0, 15))), case.residual, case.checked)
    dual = wide.fit((0.05 * 50 / 35,))
    assert primal is not None and primal.weights is not None and primal.duals is None
    assert dual is not None and dual.duals is not None and dual.weights is None
    np.testing.assert_allclose(wide.change(dual)[:35], case.change(primal), atol=1e-5)
    assert dual.outcome.after == pytest.approx(primal.outcome.after, rel=1e-5)
    assert not dual.duals[torch.from_numpy(case.checked)].any(), "checked tokens aren't fitted"


@pytest.mark.parametrize("tokens", [90, 30])
def test_products_in_pieces_are_whole_ones(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = problem(5, tokens, (20, 20), 3, 0.8)
    whole = case.fit((0.1,))
    monkeypatch.setattr(ridge, "_ROWS", 7)
    pieces = case.fit((0.1,))
    assert whole is not None and pieces is not None
    np.testing.assert_allclose(case.change(pieces), case.change(whole), atol=1e-5)


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


@pytest.mark.parametrize("tokens", [90, 30])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["features", "residual", "checked residual"])
def test_what_is_not_finite_is_not_fitted(tokens: int, value: float, where: str) -> None:
    case = problem(4, tokens, (40,), 3, 1.0)
    if where == "features":
        case.features.parts[0].values[1, 2] = value
        case.checked[1] = False
    else:
        case.residual[np.flatnonzero(case.checked == where.startswith("checked"))[0], 0] = value
    assert case.fit((1e-3, 1e-1)) is None


def test_features_that_are_all_zero_are_not_fitted() -> None:
    zero = Blocks((), 6)
    assert fit_ridge(zero, torch.ones(9, 2), torch.arange(9) == 8, (0.1,), MEMORY) is None


@pytest.mark.parametrize("tokens", [90, 30])
def test_too_little_memory_is_the_users_to_allow(tokens: int) -> None:
    case = problem(6, tokens, (40,), 3, 1.0)
    enough = math.ceil(fit_bytes(40, tokens, 3) * 8 / 7) + 8
    assert case.fit((0.1,), enough) is not None
    with pytest.raises(UserError, match=rf"fitting 40 features on {tokens} tokens takes .* memory_mb is 0"):
        case.fit((0.1,), enough - 16)


def test_blocks_get_what_is_left_of_the_memory() -> None:
    given: list[int] = []

    class Watched(Blocks):
        def blocks(self, memory: int) -> Iterator[FeatureBlock]:
            given.append(memory)
            return super().blocks(memory)

    case = problem(7, 30, (40,), 3, 1.0)
    residual: Tensor = torch.from_numpy(case.residual).float()
    fit_ridge(Watched(case.features.parts, 40), residual, torch.from_numpy(case.checked), (0.1,), MEMORY)
    room = MEMORY - fit_bytes(40, 30, 3)
    assert given == [room - room // 2]


def peak_of(case: Problem, ridge_lambdas: Sequence[float]) -> int:
    """Peak bytes of a fit, without blocks of features unless all are kept."""
    residual, checked = torch.from_numpy(case.residual).float(), torch.from_numpy(case.checked)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        fit_ridge(case.features, residual, checked, ridge_lambdas, MEMORY)
    assert watched.profiler is not None and watched.profiler.kineto_results is not None
    events = [each for each in watched.profiler.kineto_results.events() if each.name() == "[memory]"]
    kept = 4 * case.phi.size if case.phi.shape[1] <= len(case.phi) else 0
    return kept + int(np.cumsum([each.nbytes() for each in sorted(events, key=lambda each: each.start_ns())]).max())


SHAPES = pytest.mark.parametrize(
    ("tokens", "widths", "hidden"),
    [(2000, (100, 100, 100), 20), (2000, (100, 100, 100), 400), (500, (400, 400), 20), (500, (400, 400), 600)],
)


@SHAPES
def test_a_fit_takes_no_more_memory_than_it_says(tokens: int, widths: tuple[int, ...], hidden: int) -> None:
    case = problem(8, tokens, widths, hidden, 0.6)
    stated = fit_bytes(sum(widths), tokens, hidden)
    assert 0.4 * stated < peak_of(case, (0.01, 0.1, 1.0)) <= stated


def test_features_are_kept_where_there_is_room() -> None:
    for tokens, memory in ((90, MEMORY), (30, MEMORY), (30, math.ceil(fit_bytes(40, 30, 3) * 8 / 7) + 8)):
        fit = problem(6, tokens, (40,), 3, 1.0).fit((0.1,), memory)
        assert fit is not None and len(fit.blocks) == (memory == MEMORY)
