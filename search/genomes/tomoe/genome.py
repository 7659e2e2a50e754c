"""The ToMoE genome: widths, expert masks and routers of feed-forward networks, and masks of attention heads.

Source: ToMoE (arXiv 2501.15316). The paper trains masks and routers by gradients; here a few coordinates per expert are
searched. An expert's mask keeps the neurons with the largest scores

    standardised log of (saliency + slopes @ r / max(1, |r|))  +  projection(latent)

where `r` is the expert's router row on the principal directions of the network's inputs. The first term is the saliency
expected on the tokens that the router sends to the expert, in a model that is linear in these directions. With all
coordinates zero, every expert keeps the most salient neurons. Experts are interchangeable; the edit sorts them by their
router rows.

Random masks, which the method has to be compared with, need something else, since saliency and the fixed projection
both prefer some neurons. If an expert has a seed, standard normal numbers from it replace the saliency; a random
individual's latent coordinates are zero, so that all masks of the layer's width are equally likely. Head masks work
alike. Children inherit seeds layer by layer. The seed `FLUCTUATION` replaces saliencies by the neurons' fluctuations
(FLAP), independent of the router. The paper has no such seeds: its masks are trained.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from moevolve.search.genomes.contract.base import ArrayGenome
from moevolve.search.genomes.contract.operators import generator
from moevolve.workers.methods.tomoe.edit import HeadMasks, ToMoeEdit

if TYPE_CHECKING:
    from moevolve.search.genomes.tomoe.space import ToMoeSpace


_GAIN = 5.0
"""Scale of embeddings per latent coordinate; steps of 0.1 in a few coordinates replace a few percent of a mask."""


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


def standardised_log(saliency: NDArray[np.floating], like: NDArray[np.floating] | None = None) -> NDArray[np.float64]:
    """Return log saliencies, standardised to mean 0 and standard deviation 1.

    Args:
        saliency: Saliencies >= 0, [..., n].
        like: Saliencies [n] whose logarithms give mean and standard deviation; by default `saliency`, then [n].
    """
    like = saliency if like is None else like
    floor = 1e-9 * float(like.max()) or 1.0
    logs, reference = np.log(np.maximum(saliency, floor, dtype=np.float64)), np.log(np.maximum(like, floor))
    deviation = float(reference.std())
    return np.asarray((logs - reference.mean()) / (deviation if deviation > 0 else 1.0))


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


HEADER = struct.Struct("<4s5I")
MAGIC = b"TME1"
ARRAYS = ("shares", "latents", "routers", "heads", "seeds")
SEEDS = 1 << 24
"""Upper bound of seeds, which are integers that float32 represents exactly."""
SHARPNESS = 10.0
"""Logits per router coordinate. It affects only the softmax in the load-balance term, not the choice of experts."""
FLUCTUATION = -1
"""Special seed for a mask by fluctuation."""
_MIN_EXPECTED = 0.05
"""Lower bound of the saliency expected on an expert's tokens, as a share of the mean over all tokens; the linear
model can give negative values."""
_ROUTED = 0.5
"""Standard deviation of random value-router coefficients: that of the projection at coordinates of 0.3."""


@dataclass(frozen=True, eq=False)
class ToMoeGenome(ArrayGenome):
    """One ToMoE candidate. Arrays are float32 and read-only.

    Attributes:
        shares: Logarithms of relative widths, [layers, 1 or 3]; see `WidthBudget.widths`.
        latents: Latent coordinates of expert embeddings, [layers, N, latent].
        routers: Router rows on the mean input's direction and on the principal ones, [layers, N, 1 + components].
        heads: Latent coordinates of the head masks, [layers, latent, 2 + components]: of the pairs' scores, of the
            values' scores, and of the values' scores along each principal direction of the attention's inputs. It has
            no layers without head masks.
        seeds: Integer seeds of random masks below `SEEDS`, 0 for masks by saliency, or `FLUCTUATION`: [layers, N], or
            [layers, N + 1] with head masks, whose seed is last (`FLUCTUATION` means 0 there).
    """

    space: ToMoeSpace = field(repr=False, compare=False)
    shares: NDArray[np.float32] = field(repr=False)
    latents: NDArray[np.float32] = field(repr=False)
    routers: NDArray[np.float32] = field(repr=False)
    heads: NDArray[np.float32] = field(repr=False)
    seeds: NDArray[np.float32] = field(repr=False)

    def __post_init__(self) -> None:
        for name in ARRAYS:
            # Adding zero turns -0.0 into 0.0, so that equal arrays have equal bytes.
            array = np.array(getattr(self, name), dtype=np.float32) + np.float32(0)
            self._set_array(name, array, self.space.shapes[name])
        if not ((self.seeds >= FLUCTUATION) & (self.seeds < SEEDS) & (self.seeds == np.rint(self.seeds))).all():
            raise ValueError(f"a genome's seeds must be whole numbers from {FLUCTUATION} to {SEEDS - 1}")

    def to_bytes(self) -> bytes:
        """Return the magic number, the sizes (five uint32) and the arrays as little-endian float32."""
        arrays = (getattr(self, name).astype("<f4").tobytes() for name in ARRAYS)
        return HEADER.pack(MAGIC, *self.space.sizes) + b"".join(arrays)

    @cached_property
    def content_hash(self) -> str:
        # Different coordinates can choose the same masks, so the hash is the edit's.
        return hashlib.sha256(MAGIC + self._edit.phenotype_hash.encode()).hexdigest()

    def express(self) -> ToMoeEdit:
        """Return the edit; the space must be calibrated."""
        return self._edit

    @cached_property
    def widths(self) -> NDArray[np.int64]:
        """Neurons per expert, and with head masks kept pairs and value dimensions: int64 [layers, 1 or 3]."""
        return self.space.budget.widths(self.shares)

    @cached_property
    def _edit(self) -> ToMoeEdit:
        kept = self._kept
        router = self.routers * np.float32(SHARPNESS) + np.float32(0)
        for layer, (rows, masks) in enumerate(zip(router, kept, strict=True)):
            pairs = zip(rows.astype(">f4"), np.packbits(masks, axis=1), strict=True)
            keys = [(row.tobytes(), mask.tobytes()) for row, mask in pairs]
            order = sorted(range(len(keys)), key=keys.__getitem__)
            router[layer], kept[layer] = rows[order], masks[order]
        return ToMoeEdit(kept, router, self.space.statistics["network_directions"], self._head_masks)

    @cached_property
    def terms(self) -> RegularisationTerms:
        """The edit's terms; the space must be calibrated."""
        measured = self.space.statistics
        return regularisation_terms(self._edit, measured["network_sample"], measured.get("head_sample"))

    @property
    def _kept(self) -> NDArray[np.bool_]:
        """Neuron masks in the genome's own order of experts: bool [layers, N, width]."""
        measured, section = self.space.statistics, self.space.section
        saliency, slopes = measured["neuron_saliency"], measured["neuron_slopes"]
        project = projection("neurons", section.latent, section.embedding, saliency.shape[1])
        kept = np.empty((*self.latents.shape[:2], saliency.shape[1]), dtype=np.bool_)
        for layer, width in enumerate(self.widths[:, 0].tolist()):
            base = saliency[layer].astype(np.float64)
            rows = self.routers[layer, :, 1:].astype(np.float64)
            rows /= np.maximum(1, np.linalg.norm(rows, axis=1, keepdims=True))
            expected = np.maximum(base + rows @ slopes[layer].astype(np.float64).T, _MIN_EXPECTED * base)
            scores = standardised_log(expected, base)
            for expert, seed in enumerate(self.seeds[layer, : len(scores)].astype(int).tolist()):
                if seed == FLUCTUATION:
                    scores[expert] = standardised_log(measured["neuron_fluctuation"][layer])
                elif seed:
                    scores[expert] = _random_scores(seed, "neurons", scores.shape[1])
            kept[layer] = top_mask(scores + project(self.latents[layer]), width)
        return kept

    @property
    def _head_masks(self) -> HeadMasks | None:
        if not len(self.heads):
            return None
        measured, section = self.space.statistics, self.space.section
        pairs, values = measured["pair_saliency"], measured["value_saliency"]
        head_dim = values.shape[1]
        of_pairs = projection("pairs", section.latent, section.embedding, pairs.shape[1])
        of_values = projection("values", section.latent, section.embedding, head_dim)
        pair_scores = np.stack([standardised_log(each) for each in pairs])
        value_bias = np.stack([standardised_log(each) for each in values])
        router = np.zeros((len(values), head_dim, section.components))
        for layer, seed in enumerate(self.seeds[:, -1].astype(int).tolist()):
            if seed > 0:
                pair_scores[layer] = _random_scores(seed, "pairs", pairs.shape[1])
                value_bias[layer] = _random_scores(seed, "values", head_dim)
                router[layer] = _ROUTED * _random_scores(seed, "value router", head_dim, section.components)
        pair_scores += of_pairs(self.heads[:, :, 0])
        value_bias += of_values(self.heads[:, :, 1])
        for component in range(section.components):
            router[:, :, component] += of_values(self.heads[:, :, 2 + component])
        kept_pairs = [top_mask(scores, width) for scores, width in zip(pair_scores, self.widths[:, 1], strict=True)]
        return HeadMasks(
            pairs=np.stack(kept_pairs),
            active=self.widths[:, 2],
            value_bias=np.round(value_bias, 6).astype(np.float32) + np.float32(0),
            value_router=np.round(router, 6).astype(np.float32) + np.float32(0),
            directions=measured["head_directions"],
        )


def _random_scores(seed: int, what: str, *shape: int) -> NDArray[np.float64]:
    """Standard normal numbers that depend on the arguments only; standardised saliencies have the same variance."""
    return generator(seed, 0, f"tomoe random {what}").standard_normal(shape)
