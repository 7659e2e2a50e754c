"""Moments of inputs, regressions and principal directions, against the same from all inputs at once."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moevolve.workers.methods.shared.input_statistics import InputMoments, InputStatistics, principal_directions


def test_moments_are_those_of_all_inputs_at_once() -> None:
    inputs = np.random.default_rng(0).standard_normal((30, 4)) + 2
    moments = InputMoments(4, torch.device("cpu"))
    for part in np.split(inputs, [7, 8, 20]):
        moments.add(torch.from_numpy(part))
    assert moments.mean.numpy() == pytest.approx(inputs.mean(axis=0))
    assert moments.covariance.numpy() == pytest.approx(np.cov(inputs.T, bias=True))
    assert moments.moment.numpy() == pytest.approx(inputs.T @ inputs / 30)


def test_inputs_that_do_not_vary_give_finite_numbers() -> None:
    statistics = InputStatistics(4, 2, torch.device("cpu"))
    statistics.add_pairs(torch.ones(9, 4), torch.tensor([[1.0, 0.0]]).expand(9, -1))
    weight, bias = statistics.ridge(1e-3, intercept=True)
    assert np.allclose(weight, 0) and np.allclose(bias, [1, 0])
    directions = principal_directions(torch.diag(torch.tensor([4.0, 1.0, 0.0, 0.0], dtype=torch.float64)), 3)
    assert np.allclose(directions, [[0.5, 0, 0, 0], [0, 1, 0, 0], [0, 0, 0, 0]])
    assert torch.equal(
        principal_directions(torch.zeros(3, 3, dtype=torch.float64), 2), torch.zeros(2, 3, dtype=torch.float64)
    )
