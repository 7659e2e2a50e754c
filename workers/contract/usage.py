"""What an analysis of a model's experts is: counts per layer, as frozen values that cross process borders.

EEP (arXiv 2407.00945, Sec. 5.6 and App. D.6; Fig. 4, 6 and 7) looks at how often each expert is activated, at the
routing weights that it accumulates, and at which experts are activated together, before and after pruning.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import PlainSerializer, PlainValidator, computed_field

from moevolve.workers.contract.edits import Edit


def _whole_numbers(given: Any) -> NDArray[np.int64]:
    return np.asarray(given, np.int64)


def _real_numbers(given: Any) -> NDArray[np.float64]:
    return np.asarray(given, np.float64)


# JSON has arrays as lists.
_AS_LISTS = PlainSerializer(lambda array: array.tolist())
WholeNumbers = Annotated[NDArray[np.int64], PlainValidator(_whole_numbers), _AS_LISTS]
RealNumbers = Annotated[NDArray[np.float64], PlainValidator(_real_numbers), _AS_LISTS]
WORDS = 24
"""Kinds of tokens of which it is counted which experts they choose (ToMoE, arXiv 2501.15316, Tab. 4, 8 and 9)."""


@dataclass(frozen=True, slots=True)
class UsageRequest:
    """Watch one edit's experts on a prepared split.

    Attributes:
        edit: what to do to the resident model.
        tokens: stop after the prompt that reaches this many tokens; None runs them all.
    """

    edit: Edit
    tokens: int | None = None


@dataclass(frozen=True, slots=True)
class RoutedLayer:
    """How the tokens of one layer were routed among its E experts.

    Attributes:
        layer: index of the decoder layer.
        counts: tokens that chose each expert and, with dynamic skipping, didn't skip it, int64 [E].
        weights: what each expert's outputs were scaled by, summed over the tokens that chose it, float64 [E]: routing
            weights in MoE layers, the output scale in divided networks. Masked networks scale nothing; theirs are the
            router's softmax, summed over all tokens.
        together: tokens counted for both of two experts, int64 [E, E]; `counts` on the diagonal.
        origins: of EEP's new experts, the original one that each has the largest coefficient of; empty elsewhere.
        by_word: tokens that chose each expert, of each of the usage's `words`, int64 [words, E].
        neurons: of one expert, of all experts' union, and of the whole network; empty where experts are whole networks.
    """

    layer: int
    counts: WholeNumbers = field(repr=False)
    weights: RealNumbers = field(repr=False)
    together: WholeNumbers = field(repr=False)
    by_word: WholeNumbers = field(repr=False)
    origins: tuple[int, ...] = ()
    neurons: tuple[int, ...] = ()

    @property
    def experts(self) -> int:
        return len(self.counts)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def effective(self) -> float:
        """How many experts would be as uneven if all were used alike: exp of the entropy of the counts' shares."""
        total = self.counts.sum()
        if not total:
            return 0.0
        shares = self.counts[self.counts > 0] / total
        return float(np.exp(-(shares * np.log(shares)).sum()))


@dataclass(frozen=True, slots=True)
class MixedLayer:
    """The mixing matrix of one block-mixed linear layer, as the model runs on it.

    Attributes:
        name: of the linear layer, as in `layers.0.mlp.up_proj`.
        variant: of its blocks.
        blocks: float64 [K, K], one number per block: `a_ij` of variant I, the root mean square of the r singular values
            (`|M_ij|_F / sqrt(r)`) of variants II and III. An identity block is 1 in all of them.
    """

    name: str
    variant: str
    blocks: RealNumbers = field(repr=False)


@dataclass(frozen=True, slots=True)
class Usage:
    """What was seen of one model on one split.

    Attributes:
        tokens: how many were run; layers count as many.
        routed: its layers of experts, in order of depth; none for a dense model.
        mixed: its block-mixed linear layers, in order of depth.
        words: the most frequent of these tokens as text, at most `WORDS`, the most frequent first.
    """

    tokens: int
    routed: tuple[RoutedLayer, ...] = field(default=(), repr=False)
    mixed: tuple[MixedLayer, ...] = field(default=(), repr=False)
    words: tuple[str, ...] = ()

    @computed_field  # type: ignore[prop-decorator]
    @property
    def active(self) -> float:
        """Experts that a token used, on average over tokens and layers; fewer than k where some are skipped."""
        if not self.routed:
            return 0.0
        return sum(int(layer.counts.sum()) for layer in self.routed) / (len(self.routed) * self.tokens)
