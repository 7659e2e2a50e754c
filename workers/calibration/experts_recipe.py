"""What is to be measured of a model's experts; apart from the measuring, so that reading it needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Statistic = Literal["usage", "saliency", "mean_outputs", "ratio"]
"""`usage`: how often and how strongly experts are chosen. `saliency`: REAP's. `mean_outputs`: how far the experts' mean
outputs lie apart. `ratio`: the median ratio of the second to the first routing weight."""


@dataclass(frozen=True, slots=True)
class SubsetRecipe:
    """Which subsets of the experts to compare with all of them, on a sample of tokens.

    Attributes:
        retained: experts n' of a subset.
        active: experts per token k of a subset, at most n'.
        layer_groups: group of every MoE layer; the layers of a group keep the same experts.
        logits_space: whether a subset's routing weights are a softmax of its own logits; otherwise they are taken out
            of the softmax over all n (rescaled to sum 1 if the family does).
        limit: most subsets that are all tried; beyond, experts are dropped one after the other.
        sample: most tokens that are kept.
    """

    retained: int
    active: int
    layer_groups: tuple[int, ...]
    logits_space: bool
    limit: int
    sample: int


@dataclass(frozen=True, slots=True)
class ExpertsRecipe:
    """Settings of the measuring.

    Attributes:
        statistics: what is measured, sorted.
        subsets: which subsets of experts are tried, or None.
        tokens: at most about this many tokens are run.
    """

    statistics: tuple[Statistic, ...]
    subsets: SubsetRecipe | None
    tokens: int
