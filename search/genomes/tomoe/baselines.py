"""Static masks as ToMoE genomes: all experts of a layer, hence all tokens, have the same mask.

Neither knows of attention: where heads are masked (`genome.attention`), their masks are those of the start.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moevolve.search.genomes.contract.base import Baseline, Offspring
from moevolve.search.genomes.tomoe.genome import FLUCTUATION, ToMoeGenome
from moevolve.search.genomes.tomoe.space import ToMoeSpace


def saliency(space: ToMoeSpace) -> Offspring[ToMoeGenome]:
    """The neurons of the largest mean squared contributions, E[h^2] |column of the output matrix|^2.

    Every layer keeps the same share. This is the criterion of Wanda (arXiv 2306.11695) for whole neurons.
    """
    return Offspring(space.genome(), "saliency", ())


def flap(space: ToMoeSpace) -> Offspring[ToMoeGenome]:
    """The neurons of the largest fluctuations, layers competing for the budget.

    Source: FLAP (arXiv 2312.11983), Sec. 3.2 and 3.3: the metric (WIFV) is the sample variance of an activation times
    the squared norm of its output weights; standardised in every layer, it decides how wide each is.

    What FLAP has beside it: whole attention heads compete with the neurons; here heads keep the share that they have
    at the start. And FLAP makes up for removed neurons' mean contributions in the output bias. A ToMoE edit has none;
    `repair` fits the remaining output weights instead, which have to do for the mean as well.
    """
    even = space.even_widths[:, 0]
    widths = competing_widths(space.measured["neuron_fluctuation"], int(even.sum()))
    # A width is in proportion to exp(share). Heads keep theirs; a little more, since shares are float32 and widths of
    # heads are rounded down.
    shares = np.full(space.shapes["shares"], 1e-6)
    shares[:, 0] = np.log(widths / even.mean())
    seeds = np.full(space.shapes["seeds"], FLUCTUATION)
    return Offspring(space.genome(shares=shares, seeds=seeds), "flap", ())


def competing_widths(metric: NDArray[np.floating], total: int) -> NDArray[np.int64]:
    """How many neurons every layer keeps where the largest metrics of all layers are kept, standardised in each.

    Args:
        metric: [layers, width].
        total: neurons kept in all, as many as there are layers at least; every layer keeps one at least.

    Returns:
        int64 [layers].
    """
    values = metric.astype(np.float64)
    deviations = values.std(axis=1, ddof=1 if values.shape[1] > 1 else 0, keepdims=True)
    scores = (values - values.mean(axis=1, keepdims=True)) / np.where(deviations > 0, deviations, 1.0)
    # Last digits depend on the machine, and widths must not.
    scores = np.round(scores, 12)
    np.put_along_axis(scores, scores.argmax(axis=1)[:, None], np.inf, axis=1)
    kept = np.argsort(-scores.ravel(), kind="stable")[:total]
    return np.bincount(kept // values.shape[1], minlength=len(values)).astype(np.int64)


BASELINES = {
    "saliency": Baseline(saliency, ("tune",)),
    "flap": Baseline(flap, ("tune",)),
}
