"""Expert usage: how often a model's experts are chosen, layer by layer.

EEP (arXiv 2407.00945, Sec. 5.6 and App. D.6; Fig. 4, 6 and 7) reports how often each expert is activated, its summed
routing weights, and which experts are activated together, before and after pruning.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import PlainSerializer, PlainValidator, computed_field

# Arrays are lists in JSON.
from moevolve.evaluators.records import short_repr

_AS_LISTS = PlainSerializer(lambda array: array.tolist())
WholeNumbers = Annotated[NDArray[np.int64], PlainValidator(partial(np.asarray, dtype=np.int64)), _AS_LISTS]
RealNumbers = Annotated[NDArray[np.float64], PlainValidator(partial(np.asarray, dtype=np.float64)), _AS_LISTS]

# Number of most frequent tokens whose experts are counted separately (ToMoE, arXiv 2501.15316, Tab. 4, 8 and 9).
WORDS = 24


@dataclass(frozen=True, slots=True)
class RoutedLayer:
    """How tokens were routed among the E experts of one layer.

    Attributes:
        layer: Index of the decoder layer.
        counts: Number of tokens that chose each expert and, with dynamic skipping, didn't skip it, int64 [E].
        weights: Sum of the factors on each expert's outputs over the tokens that chose it, float64 [E]: the routing
            weight in MoE layers, the output scale in FactorLLM's networks. ToMoE's masked networks don't scale outputs;
            theirs is the router's softmax, summed over all tokens.
        together: Number of tokens that chose both of two experts, int64 [E, E], with `counts` on the diagonal.
        by_word: Number of tokens that chose each expert, for each of `Usage.words`, int64 [words, E].
        origins: Original expert with the largest coefficient in each of EEP's new experts; empty for other edits.
        effective: Effective number of experts: exp of the entropy of the experts' shares in `counts`.
    """

    layer: int
    counts: WholeNumbers = field(repr=False)
    weights: RealNumbers = field(repr=False)
    together: WholeNumbers = field(repr=False)
    by_word: WholeNumbers = field(repr=False)
    origins: tuple[int, ...] = ()

    @property
    def experts(self) -> int:
        return len(self.counts)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def effective(self) -> float:
        total = self.counts.sum()
        if not total:
            return 0.0
        shares = self.counts[self.counts > 0] / total
        return float(np.exp(-(shares * np.log(shares)).sum()))


@dataclass(frozen=True, slots=True)
class Usage:
    """Expert usage of one model on one split.

    Attributes:
        tokens: Number of tokens that were run, the same in every layer.
        routed: Layers with experts, in order of depth; empty for a dense model.
        words: Text of the most frequent tokens, at most `WORDS`, in descending order of frequency.
        active: Mean number of experts per token and layer; below k where dynamic skipping applies.
    """

    __repr__ = short_repr

    tokens: int
    routed: tuple[RoutedLayer, ...] = field(default=(), repr=False)
    words: tuple[str, ...] = ()

    @computed_field  # type: ignore[prop-decorator]
    @property
    def active(self) -> float:
        if not self.routed:
            return 0.0
        return sum(int(layer.counts.sum()) for layer in self.routed) / (len(self.routed) * self.tokens)
