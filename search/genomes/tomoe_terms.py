"""ToMoE's regularisation terms, of an edit and a sample of calibration tokens: how much of the model is in use, and how
evenly.

Source: ToMoE (arXiv 2501.15316), Eq. 6 and 7 (union of experts), Eq. 9 (load balance).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moevolve.search.genomes.tomoe_projection import top
from moevolve.workers.edits.tomoe import ToMoeEdit


@dataclass(frozen=True, slots=True)
class Terms:
    """What an edit makes of its layers.

    Attributes:
        unions: neurons that any expert of a layer keeps, int64 [layers].
        coverage: share of a network's neurons, or of a head's value dimensions, that any expert or sampled token uses:
            float64 [layers, 1 or 2].
        balances: `N sum_i F_i P_i` of every layer, float64 [layers]: 1 if all experts are used alike, N if one is.
    """

    unions: NDArray[np.int64]
    coverage: NDArray[np.float64]
    balances: NDArray[np.float64]

    @property
    def union_term(self) -> float:
        """`R_U`: mean of log(1 / coverage), from 0 for a model that is all in use."""
        return float(-np.log(self.coverage).mean())

    @property
    def balance_term(self) -> float:
        """`R_L` less 1, its value where all experts are used alike; mean over layers."""
        return float(self.balances.mean() - 1)


def terms_of(edit: ToMoeEdit, network_sample: NDArray[np.float32], head_sample: NDArray[np.float32] | None) -> Terms:
    """Work out the terms.

    Args:
        edit: the edit.
        network_sample: sampled tokens' products with the edit's directions, [layers, tokens, components].
        head_sample: the same of the heads' directions; needed where the edit has head masks.
    """
    unions = edit.kept.any(axis=1).sum(axis=1, dtype=np.int64)
    coverage = [unions / edit.width]
    if edit.heads is not None:
        assert head_sample is not None
        coverage.append(_value_coverage(edit, head_sample))
    balances = []
    for router, sample in zip(edit.router.astype(np.float64), network_sample.astype(np.float64), strict=True):
        logits = np.round(sample @ router.T, 6)
        chosen = np.bincount(logits.argmax(axis=1), minlength=edit.experts) / len(logits)
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        softmax = (weights / weights.sum(axis=1, keepdims=True)).mean(axis=0)
        balances.append(edit.experts * float(chosen @ softmax))
    return Terms(unions, np.stack(coverage, axis=1), np.array(balances))


def _value_coverage(edit: ToMoeEdit, sample: NDArray[np.float32]) -> NDArray[np.float64]:
    """Share of the value dimensions that any sampled token keeps, [layers]."""
    heads = edit.heads
    assert heads is not None
    shares = []
    for layer, active in enumerate(heads.active.tolist()):
        scores = heads.value_bias[layer] + sample[layer].astype(np.float64) @ heads.value_router[layer].T
        shares.append(top(scores, active).any(axis=0).mean())
    return np.array(shares)
