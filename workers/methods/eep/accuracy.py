"""How accurate scores of experts are, by the sums over tokens that they are made of.

The scores are REAP's. Tokens of a text are alike, so the errors are those of a ratio of sums over rows of texts, each
a text or several short ones (Cochran, Sampling Techniques (1977), ch. 6): with c the number of tokens of a row that
chose an expert, s the sum of its scores over them, and m the number of rows in which it was chosen, the score is
`r = sum s / sum c`, and its standard error

    e = sqrt(m / (m - 1) * sum (s - r c)^2) / sum c.

An expert that was chosen in one row only has an error as large as its score.

What errors cost is what they may lose: of the n' experts with the largest scores, some may be kept for others that are
better. With b the boundary, halfway between the n'-th and the next score, an expert at the distance d = |r - b| is on
the wrong side with some probability, and then loses its distance. For normal errors the expectation is `e phi(d / e) -
d Phi(-d / e)`. Its sum over a layer's experts, divided by the sum of the n' largest scores, is the layer's expected
loss: about half more than the real one where errors are smaller than the gaps between scores, else nearly that.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from moevolve.evaluators.types import Floats

# Errors by which an expert is so far from the boundary that nothing is lost in float64.
_FAR = 40.0


def expected_losses(arrays: Mapping[str, NDArray[np.number]], retained: int) -> Floats:
    """Expected losses of keeping so many experts by REAP's scores: float64 [..., layers], 0 if all are kept.

    `arrays` has `importance_sums` [..., layers, n, 3, 3] and `row_squares` [..., layers, n, 4] (`calibrate_experts`).
    """
    from scipy.special import ndtr

    scores, errors = scores_with_errors(arrays)
    if retained >= scores.shape[-1]:
        return np.zeros(scores.shape[:-1])
    ordered = -np.sort(-scores, axis=-1)
    boundary = ordered[..., retained - 1 : retained + 1].mean(axis=-1, keepdims=True)
    distances = np.minimum(np.abs(scores - boundary), _FAR * errors)
    ratios = distances / np.where(errors > 0, errors, 1.0)
    density = np.exp(-(ratios**2) / 2) / np.sqrt(2 * np.pi)
    lost = (errors * density - distances * ndtr(-ratios)).sum(axis=-1)
    kept = ordered[..., :retained].sum(axis=-1)
    return lost / np.where(kept > 0, kept, 1.0)


def scores_with_errors(arrays: Mapping[str, NDArray[np.number]]) -> tuple[Floats, Floats]:
    """REAP's scores and their standard errors, both float64 [..., layers, n], 0 for experts that no token chose."""
    sums, squares = arrays["importance_sums"], arrays["row_squares"]
    counts = np.maximum(sums[..., 0, 0], 1)
    scores = sums[..., 1, 1] / counts
    rows = squares[..., 3]
    residuals = squares[..., 0] - 2 * scores * squares[..., 1] + scores**2 * squares[..., 2]
    errors = np.sqrt(np.maximum(residuals, 0) * rows / np.maximum(rows - 1, 1)) / counts
    return scores, np.where(rows > 1, errors, scores)
