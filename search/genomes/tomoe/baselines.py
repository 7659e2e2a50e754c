"""Static masks as ToMoE genomes: all experts of a layer have the same mask, and so have all tokens.

Both methods mask neurons only; with `genome.attention`, heads get the start's masks.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moevolve.search.genomes.contract.base import Baseline, Offspring
from moevolve.search.genomes.tomoe.genome import FLUCTUATION, ToMoeGenome
from moevolve.search.genomes.tomoe.space import ToMoeSpace


def saliency(space: ToMoeSpace) -> Offspring[ToMoeGenome]:
    """Keep the neurons with the largest mean squared contribution, E[h^2] |column of the output matrix|^2.

    Every layer keeps the same share. This is the criterion of Wanda (arXiv 2306.11695) for whole neurons.
    """
    return Offspring(space.genome(), "saliency", ())


def flap(space: ToMoeSpace) -> Offspring[ToMoeGenome]:
    """Keep the neurons with the largest fluctuations, ranked across layers.

    Source: FLAP (arXiv 2312.11983), Sec. 3.2 and 3.3: the metric (WIFV) is the sample variance of an activation times
    the squared norm of its output weights, standardised within each layer.

    Departures: in FLAP, whole attention heads compete with neurons; here heads keep their share at the start. FLAP adds
    the mean contribution of removed neurons to the output bias, which a ToMoE edit doesn't have; `repair` compensates
    it in the remaining output weights instead.
    """
    even = space.even_widths[:, 0]
    widths = competing_widths(space.statistics["neuron_fluctuation"], int(even.sum()))
    # Widths are proportional to exp(share). The heads' shares are slightly above 0, since shares are float32 and widths
    # of heads are rounded down.
    shares = np.full(space.shapes["shares"], 1e-6)
    shares[:, 0] = np.log(widths / even.mean())
    seeds = np.full(space.shapes["seeds"], FLUCTUATION)
    return Offspring(space.genome(shares=shares, seeds=seeds), "flap", ())


def competing_widths(metric: NDArray[np.floating], total: int) -> NDArray[np.int64]:
    """Count each layer's neurons among the `total` largest metrics, standardised per layer: int64 [layers].

    Args:
        metric: Importance of every neuron, [layers, width].
        total: Number of neurons to keep, at least the number of layers; every layer keeps at least one.
    """
    values = metric.astype(np.float64)
    deviations = values.std(axis=1, ddof=1 if values.shape[1] > 1 else 0, keepdims=True)
    scores = (values - values.mean(axis=1, keepdims=True)) / np.where(deviations > 0, deviations, 1.0)
    # Widths must not depend on the last digits, which differ between machines.
    scores = np.round(scores, 12)
    np.put_along_axis(scores, scores.argmax(axis=1)[:, None], np.inf, axis=1)
    kept = np.argsort(-scores.ravel(), kind="stable")[:total]
    return np.bincount(kept // values.shape[1], minlength=len(values)).astype(np.int64)


BASELINES = {
    "saliency": Baseline(saliency, ("tune",)),
    "flap": Baseline(flap, ("tune",)),
}
