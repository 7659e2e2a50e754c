"""The share of the full model's score that a search's winner keeps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.metrics import METRICS
from moevolve.search.config.files import parse_stored_config
from moevolve.search.loop.scores import SearchScores, task_outcomes
from moevolve.search.loop.significance import TaskOutcomes
from moevolve.store.reader import StoreReader
from moevolve.store.records import FULL_MODEL, SearchRecord

# Probability that the true share is below the lower bound.
_ALPHA = 0.05


@dataclass(frozen=True, slots=True)
class Kept:
    """The share of the full model's score that a candidate keeps on `dev`.

    Attributes:
        share: Ratio of the scores, or the full model's log perplexity divided by the candidate's; 1 for equal ones.
        low, high: One-sided bounds of the share, each with a confidence of 95 %.
    """

    share: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{100 * self.share:.1f} % ({100 * self.low:.1f} - {100 * self.high:.1f})"


def kept_share(one: Sequence[TaskOutcomes], full: Sequence[TaskOutcomes], worst: bool = False) -> Kept:
    """Estimate the share of the full model's score that a candidate keeps, from outcomes on the same examples.

    The share on a task is a ratio of two means over the same examples, whose standard error is that of a ratio
    estimator (Cochran, Sampling Techniques, 1977, Sec. 6.4); the bounds are of Student's t. Of right-or-wrong outcomes,
    one example more that only either model answers is assumed (Bonett and Price, J. Educ. Behav. Stat. 37, 2012):
    otherwise a few examples without a difference would prove that none exists.

    Args:
        one, full: Outcomes of the candidate and the full model by task, each with one seed.
        worst: Take the task that keeps least, instead of the weighted mean over tasks.

    Raises:
        UserError: The full model scores 0 on a task, or a task has a single example.
    """
    from scipy.special import stdtrit  # imports in a tenth of scipy.stats' time

    found = [_task_share(a, b) for a, b in zip(one, full, strict=True)]
    shares, centres, errors, degrees = (np.array(each, dtype=np.float64) for each in zip(*found, strict=True))
    if worst:
        halves = errors * -stdtrit(degrees, _ALPHA)
        return Kept(float(shares.min()), float((centres - halves).min()), float((centres + halves).min()))
    weights = np.array([each.weight for each in one])
    weights /= weights.sum()
    half = math.sqrt(float(((weights * errors) ** 2).sum())) * -float(stdtrit(degrees.min(), _ALPHA))
    centre = float(weights @ centres)
    return Kept(float(weights @ shares), centre - half, centre + half)


def _task_share(one: TaskOutcomes, full: TaskOutcomes) -> tuple[float, float, float, int]:
    """Return the share on one task, the centre of its bounds, its standard error and its degrees of freedom."""
    metric, (above,), (below,) = METRICS[one.metric], one.values, full.values
    if not below.any() or below.size < 2:
        raise UserError("a share of a score needs several rows of `dev`, and a full model that scores more than 0")
    if metric.is_geometric:
        above, below = (np.log(np.maximum(each, np.finfo(np.float32).tiny)) for each in (above, below))
        if metric.scale != "perplexity":
            ratios = above - below
            share = math.exp(ratios.mean())
            return share, share, share * _standard_error(ratios), ratios.size - 1
        above, below = below, above  # logarithms of likelihoods are negative, and the better model's is nearer to 0
    share = _ratio(above, below)
    if np.isin((above, below), (0.0, 1.0)).all():
        above, below = np.append(above, (0.0, 1.0)), np.append(below, (1.0, 0.0))
    centre = _ratio(above, below)
    return share, centre, _standard_error((above - centre * below) / below.mean()), above.size - 1


def _ratio(above: NDArray[np.float64], below: NDArray[np.float64]) -> float:
    return float(above.mean() / below.mean())


def _standard_error(values: NDArray[np.float64]) -> float:
    return float(values.std(ddof=1)) / math.sqrt(values.size)


def winner_kept(store: StoreReader, search: SearchRecord) -> Kept | None:
    """Compare a search's winner with its full model on `dev`; None without a winner, or if either has no scores there.

    For errors see `kept_share`.
    """
    if search.winner is None:
        return None
    winner = store.individual(f"{search.name}:{search.winner}").individual
    one, full = _on_dev(store, search, winner.phenotype_hash, FULL_MODEL)
    if not one or not full:
        return None
    worst = parse_stored_config(search.config, search.name).task_aggregation == "worst"
    return kept_share(one, full, worst)


def full_kept(store: StoreReader, search: SearchRecord) -> Kept | None:
    """What a search's full model keeps of itself, whose bounds only depend on the number of rows; None if unscored."""
    (full,) = _on_dev(store, search, FULL_MODEL)
    return kept_share(full, full) if full else None


def _on_dev(store: StoreReader, search: SearchRecord, *phenotypes: str) -> list[list[TaskOutcomes]]:
    return [task_outcomes([model], "dev") for model in SearchScores(store, search).of(phenotypes)]
