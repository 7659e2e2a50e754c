"""From an expert's searched coordinates to its mask, and the terms that masks cost a candidate."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from moevolve.search.genomes.contract.rng import generator
from moevolve.workers.methods.tomoe.edit import ToMoeEdit

_GAIN = 5.0
"""Embeddings per latent coordinate: a step of 0.1 in a few of them lets a few percent of the neurons change places."""


@dataclass(frozen=True)
class Projection:
    """A fixed network from coordinates [..., latent] to scores [..., outputs].

    Attributes:
        embed: float64 [latent, embedding].
        project: float64 [embedding, outputs].
    """

    embed: NDArray[np.float64]
    project: NDArray[np.float64]

    @classmethod
    def of(cls, name: str, latent: int, embedding: int, outputs: int) -> Projection:
        """The network of a name and sizes, always the same."""
        return _made(name, latent, embedding, outputs)

    def __call__(self, coordinates: NDArray[np.float32]) -> NDArray[np.float64]:
        """Scores, with a standard deviation of about 1/2 where coordinates have one of 0.3."""
        embedding = coordinates.astype(np.float64) @ self.embed
        centred = embedding - embedding.mean(axis=-1, keepdims=True)
        normed = centred / np.sqrt(centred.var(axis=-1, keepdims=True) + 1)
        return np.asarray(_gelu(normed) @ self.project)


@lru_cache(maxsize=16)
def _made(name: str, latent: int, embedding: int, outputs: int) -> Projection:
    rng = generator(0, outputs, f"tomoe {name}")
    embed = rng.standard_normal((latent, embedding)) * (_GAIN / np.sqrt(latent))
    return Projection(embed, rng.standard_normal((embedding, outputs)) / np.sqrt(embedding))


def _gelu(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Gaussian error linear unit, in its tanh form."""
    gelu: NDArray[np.float64] = values / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (values + 0.044715 * values**3)))
    return gelu


def top(scores: NDArray[np.float64], count: int) -> NDArray[np.bool_]:
    """Masks of the `count` largest scores in every row [..., n], the first of those that tie.

    Scores are rounded first: their last digits depend on the machine, and a mask must not.
    """
    order = np.argsort(-np.round(scores, 6), axis=-1, kind="stable")
    kept = np.zeros(scores.shape, dtype=np.bool_)
    np.put_along_axis(kept, order[..., :count], True, axis=-1)
    return kept


def standardised(saliency: NDArray[np.floating], like: NDArray[np.floating] | None = None) -> NDArray[np.float64]:
    """Log saliencies as scores of mean 0 and standard deviation 1.

    Args:
        saliency: [..., n], at least 0.
        like: [n], whose mean and deviation of the logarithm are taken; None takes those of `saliency` [n].
    """
    like = saliency if like is None else like
    floor = 1e-9 * float(like.max()) or 1.0
    logs, reference = np.log(np.maximum(saliency, floor, dtype=np.float64)), np.log(np.maximum(like, floor))
    deviation = float(reference.std())
    return np.asarray((logs - reference.mean()) / (deviation if deviation > 0 else 1.0))


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
