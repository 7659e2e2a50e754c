"""Errors of scores, and what they cost, against repeated draws of the same rows and of the same scores."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from moevolve.workers.methods.eep.accuracy import expected_losses, scores_with_errors

Arrays = dict[str, NDArray[np.float64]]


def arrays_of(counts: NDArray[np.float64], scores: NDArray[np.float64]) -> Arrays:
    """A calibration's arrays, from tokens that chose each expert and the sums of their scores, both [..., rows, n]."""
    sums = np.zeros((*counts.shape[:-2], counts.shape[-1], 3, 3))
    sums[..., 0, 0], sums[..., 1, 1] = counts.sum(axis=-2), scores.sum(axis=-2)
    parts = (scores**2, scores * counts, counts**2, counts > 0)
    return {"importance_sums": sums, "row_squares": np.stack([part.sum(axis=-2) for part in parts], axis=-1)}


@pytest.mark.parametrize("alike", [0.0, 0.3])
def test_errors_are_the_spread_of_repeated_draws(alike: float) -> None:
    """Of rows whose tokens are independent, and of rows that have something in common; one expert is rare."""
    rng, draws, rows, usual = np.random.default_rng(0), 400, 40, np.array([60.0, 20.0, 5.0])
    busy = rng.gamma(4.0, 0.25, (draws, rows, 1))
    counts = rng.poisson(usual * busy).astype(np.float64)
    common = rng.normal(0, alike, (draws, rows, 3))
    scores = counts * (1 + common) + rng.normal(0, 0.5, counts.shape) * np.sqrt(counts)
    found, errors = scores_with_errors(arrays_of(counts, scores))
    spread = found.std(axis=0)
    np.testing.assert_allclose(np.sqrt((errors**2).mean(axis=0)), spread, rtol=0.12)
    # As if tokens were independent, errors of rows with something in common would be a fraction of that.
    apart = 0.5 / np.sqrt(counts.sum(axis=1).mean(axis=0))
    assert alike == 0 or apart[0] < 0.4 * spread[0]


def test_expected_losses_are_those_of_repeated_choices_and_not_less() -> None:
    """They are more where few experts are near the boundary: one on the wrong side needs another to change with."""
    rng, draws, retained = np.random.default_rng(1), 1500, 8
    true = rng.gamma(20.0, 0.05, (draws, 32))
    for error in (0.02, 0.1):
        rows = true[:, None] + error * np.sqrt(40) * rng.standard_normal((draws, 40, 32))
        found = arrays_of(np.ones_like(rows), rows)
        chosen = np.argsort(-scores_with_errors(found)[0], axis=1)[:, :retained]
        best, taken = -np.sort(-true, axis=1)[:, :retained], np.take_along_axis(true, chosen, axis=1)
        lost = 1 - taken.sum(axis=1) / best.sum(axis=1)
        assert 0.9 < expected_losses(found, retained).mean() / lost.mean() < 1.8


def test_what_is_known_too_little_has_an_error_as_large_as_its_score() -> None:
    counts = np.array([[4.0, 4.0, 0.0], [4.0, 0.0, 0.0], [4.0, 0.0, 0.0]])
    scores, errors = scores_with_errors(arrays_of(counts, 2 * counts))
    assert scores.tolist() == [2, 2, 0] and errors.tolist() == [0, 2, 0]
    assert expected_losses(arrays_of(counts, 2 * counts), 3) == 0, "all are kept"
    assert expected_losses(arrays_of(counts, 2 * counts), 1) > 0.1
