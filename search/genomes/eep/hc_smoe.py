"""Merge experts whose mean outputs are alike.

Source: HC-SMoE (https://arxiv.org/abs/2410.08589), Sec. 3: hierarchical clustering of the experts by their outputs,
averaged over the calibration's tokens, with average linkage on Euclidean distances, down to n' clusters; a cluster's
experts are averaged, weighted by how often each is chosen (uniformly if none ever is).

The router, which the paper leaves whole: it sends a token to its top-k of the n original experts, and all members of a
cluster are the same merged expert. Here the top-k is taken of the n' new experts. On probabilities a cluster's routing
weight is the sum of its members' (a row of ones), so that the mass of a cluster is kept; on logits, where sums mean
nothing, it is the mean of its members' logits with the same weights as their parameters.

In a group of layers, squared distances are added after each layer's distances are divided by their sum, and counts are
added: the layers' mean outputs side by side, each layer weighing the same.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moevolve.search.genomes.contract.base import Offspring
from moevolve.search.genomes.eep.baseline_scores import group_shares
from moevolve.search.genomes.eep.genome import EepGenome
from moevolve.search.genomes.eep.space import EepSpace


def hc_smoe(space: EepSpace) -> Offspring[EepGenome]:
    """The merging genome of n' clusters per group, from `output_distances` and `counts`."""
    distances = space.measured["output_distances"].astype(np.float64)
    owners = np.array(space.layer_groups)
    totals = distances.sum(axis=(1, 2), keepdims=True)
    squares = (distances / np.where(totals > 0, totals, 1.0)) ** 2
    weights = group_shares(space.measured["counts"], space.layer_groups)
    mapping = np.zeros((space.groups, space.retained, space.experts), dtype=np.float32)
    merging = np.zeros_like(mapping)
    for group in range(space.groups):
        clusters = average_linkage(np.sqrt(squares[owners == group].sum(axis=0)), space.retained)
        for row, members in enumerate(clusters):
            shares = weights[group, members]
            shares = shares / shares.sum() if shares.sum() > 0 else np.full(len(members), 1 / len(members))
            merging[group, row, members] = shares
            mapping[group, row, members] = 1.0 if space.router_space == "probs" else shares
    return Offspring(EepGenome(space, mapping, merging), "hc_smoe", ())


def average_linkage(distances: NDArray[np.float64], clusters: int) -> list[list[int]]:
    """Agglomerative clustering with average linkage (UPGMA).

    Args:
        distances: symmetric [points, points].
        clusters: how many are left, at most the points.

    Returns:
        The points of every cluster, sorted, in order of their first ones. Of equal distances the pair of the lowest
        first points is merged.
    """
    members = [[point] for point in range(len(distances))]
    between = distances.astype(np.float64).copy()
    np.fill_diagonal(between, np.inf)
    while len(members) > clusters:
        one, two = sorted(divmod(int(np.argmin(between)), len(members)))
        sizes = len(members[one]), len(members[two])
        # The mean over all pairs is the means of both, weighted by their sizes (Lance and Williams).
        joined = (sizes[0] * between[one] + sizes[1] * between[two]) / sum(sizes)
        between[one], between[:, one] = joined, joined
        between[one, one] = np.inf
        between = np.delete(np.delete(between, two, axis=0), two, axis=1)
        members[one] = sorted(members[one] + members[two])
        del members[two]
    return members
