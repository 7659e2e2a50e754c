"""From latent coordinates to scores: the fixed, seeded networks that stand for ToMoE's trained projections.

The paper (ToMoE, arXiv 2501.15316, Eq. 3 and 5, App. A) trains a hypernetwork that makes expert embeddings and
projections (layer norm, GELU, linear) that turn them into scores. Without gradients these are random, the same in every
search, and what is searched are the embeddings' few coordinates. Layer norm divides by sqrt(variance + 1), so that
zero coordinates give zero scores and small ones small scores.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from moevolve.search.rng import generator

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
