"""Scores of neurons and head dimensions, the masks that they choose, and the paper's regularisation terms of masks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from moevolve.search.genomes.contract.operators import generator
from moevolve.workers.methods.tomoe.edit import HeadMasks, ToMoeEdit

# Scale of embeddings per latent coordinate; steps of 0.1 in a few coordinates replace a few percent of a mask.
_GAIN = 5.0


@dataclass(frozen=True)
class Projection:
    """A fixed random network from coordinates [..., latent] to scores [..., outputs]: linear, LayerNorm, GELU, linear.

    Attributes:
        embed: Weights of the first layer, float64 [latent, embedding].
        project: Weights of the second layer, float64 [embedding, outputs].
    """

    embed: NDArray[np.float64]
    project: NDArray[np.float64]

    def __call__(self, coordinates: NDArray[np.float32]) -> NDArray[np.float64]:
        """Return scores; coordinates of standard deviation 0.3 give scores of standard deviation about 1/2."""
        embedding = coordinates.astype(np.float64) @ self.embed
        centred = embedding - embedding.mean(axis=-1, keepdims=True)
        normed = centred / np.sqrt(centred.var(axis=-1, keepdims=True) + 1)
        # GELU in its tanh approximation.
        gelu = normed / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (normed + 0.044715 * normed**3)))
        return np.asarray(gelu @ self.project)


@lru_cache(maxsize=16)
def projection(name: str, latent: int, embedding: int, outputs: int) -> Projection:
    """Return the network of a name and sizes; equal arguments give equal weights."""
    rng = generator(0, outputs, f"tomoe {name}")
    embed = rng.standard_normal((latent, embedding)) * (_GAIN / np.sqrt(latent))
    return Projection(embed, rng.standard_normal((embedding, outputs)) / np.sqrt(embedding))


def top_mask(scores: NDArray[np.float64], count: int) -> NDArray[np.bool_]:
    """Return the mask of the `count` largest scores in every row [..., n]; the first of equal ones count."""
    # Masks must not depend on the last digits, which differ between machines.
    order = np.argsort(-np.round(scores, 6), axis=-1, kind="stable")
    kept = np.zeros(scores.shape, dtype=np.bool_)
    np.put_along_axis(kept, order[..., :count], True, axis=-1)
    return kept


def standardised_log(saliency: NDArray[np.floating]) -> NDArray[np.float64]:
    """Return the logarithms of saliencies >= 0, [n], standardised to mean 0 and standard deviation 1."""
    floor = 1e-9 * float(saliency.max()) or 1.0
    logs = np.log(np.maximum(saliency, floor, dtype=np.float64))
    deviation = float(logs.std())
    return np.asarray((logs - logs.mean()) / (deviation if deviation > 0 else 1.0))


@dataclass(frozen=True, slots=True)
class RegularisationTerms:
    """The paper's union-coverage and load-balance terms of an edit.

    Attributes:
        unions: Number of neurons that any expert of a layer keeps, int64 [layers].
        coverage: Share of a network's neurons that any expert keeps, and with head masks share of the value dimensions
            that any sampled token keeps: float64 [layers, 1 or 2].
        balances: Load balance `N sum_i F_i P_i`, float64 [layers]: 1 if all experts are used equally, N if one is used.
    """

    unions: NDArray[np.int64]
    coverage: NDArray[np.float64]
    balances: NDArray[np.float64]

    @property
    def union_term(self) -> float:
        """`R_U`, the mean of log(1 / coverage); 0 if everything is used."""
        return float(-np.log(self.coverage).mean())

    @property
    def balance_term(self) -> float:
        """`R_L` - 1, the mean over layers; 0 if all experts are used equally."""
        return float(self.balances.mean() - 1)


def regularisation_terms(
    edit: ToMoeEdit, network_sample: NDArray[np.float32], head_sample: NDArray[np.float32] | None
) -> RegularisationTerms:
    """Compute the regularisation terms of an edit.

    Args:
        edit: Masks and routers.
        network_sample: Sampled inputs of the networks along the edit's directions, [layers, tokens, components].
        head_sample: Sampled inputs of attention along the heads' directions; required with head masks.
    """
    unions = edit.kept.any(axis=1).sum(axis=1, dtype=np.int64)
    coverage = [unions / edit.width]
    if edit.heads is not None:
        assert head_sample is not None
        coverage.append(_value_coverage(edit.heads, head_sample))
    balances = []
    for router, sample in zip(edit.router.astype(np.float64), network_sample.astype(np.float64), strict=True):
        logits = np.round(sample @ router.T, 6)
        chosen = np.bincount(logits.argmax(axis=1), minlength=edit.experts) / len(logits)
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        softmax = (weights / weights.sum(axis=1, keepdims=True)).mean(axis=0)
        balances.append(edit.experts * float(chosen @ softmax))
    return RegularisationTerms(unions, np.stack(coverage, axis=1), np.array(balances))


def _value_coverage(heads: HeadMasks, sample: NDArray[np.float32]) -> NDArray[np.float64]:
    """Share of the value dimensions that any sampled token keeps: float64 [layers]."""
    shares = []
    for layer, active in enumerate(heads.active.tolist()):
        scores = heads.value_bias[layer] + sample[layer].astype(np.float64) @ heads.value_router[layer].T
        shares.append(top_mask(scores, active).any(axis=0).mean())
    return np.array(shares)


def random_scores(seed: int, what: str, *shape: int) -> NDArray[np.float64]:
    """Return standard normal numbers that depend on the arguments only; they vary as standardised saliencies do."""
    return generator(seed, 0, f"tomoe random {what}").standard_normal(shape)
