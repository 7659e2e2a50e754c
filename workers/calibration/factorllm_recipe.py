"""How the start of FactorLLM genomes is measured; apart from the measuring, so that reading it needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Partition = Literal["contiguous", "shuffled", "kmeans", "coactivation"]


@dataclass(frozen=True, slots=True)
class FactorLlmRecipe:
    """Settings of the start.

    Attributes:
        experts: experts N.
        active: experts K per token.
        routers: routers R per network: 1, or one for each of its linear layers.
        partition: how neurons are divided: in order, at random, by balanced k-means on their input weights, or by
            balanced k-means on which neurons they fire with.
        output_scale: factor on the sum of experts.
        router_bias: whether routers have a bias.
        components: principal directions of every network's inputs to find.
        ridge: regularisation of the routers, as a share of the inputs' mean variance.
        tokens: at most about this many tokens are run.
    """

    experts: int
    active: int
    routers: int
    partition: Partition
    output_scale: float
    router_bias: bool
    components: int
    ridge: float
    tokens: int
