"""The ToMoE genome: widths, expert masks and routers of feed-forward networks, and masks of attention heads.

Source: ToMoE (arXiv 2501.15316). The paper trains all of it by gradients; here a few coordinates per expert are
searched. An expert's mask keeps the neurons of the largest scores

    standardised log of (saliency + slopes @ r / max(1, |r|))  +  projection(latent)

with `r` the expert's row of the router on the principal directions of the network's inputs: saliencies are those
expected on the tokens that the router sends there, as far as they depend linearly on these directions. With all
coordinates zero every expert keeps the most salient neurons. Experts are interchangeable: the edit has them in order of
their routers' rows.

Saliency and the fixed projection both prefer some neurons, so neither gives a random mask, which the method has to be
compared with. Where an expert has a seed, standard normal numbers of that seed take the saliency's place, and a random
individual's coordinates are zero: every mask of the layer's width is equally likely then. Head masks are random
likewise. Children keep their parents' seeds, layer by layer. The paper has no such thing: its masks are trained. A
seed may also be `FLUCTUATION`: the neurons' fluctuations (FLAP) take the saliencies' place then, router or not.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from moevolve.search.genomes.contract.rng import generator
from moevolve.search.genomes.tomoe.projection import Projection, Terms, standardised, terms_of, top
from moevolve.workers.methods.tomoe.edit import HeadMasks, ToMoeEdit

if TYPE_CHECKING:
    from moevolve.search.genomes.tomoe.space import ToMoeSpace

HEADER = struct.Struct("<4s5I")
MAGIC = b"TME1"
ARRAYS = ("shares", "latents", "routers", "heads", "seeds")
SEEDS = 1 << 24
"""Seeds are below this: whole numbers that float32 holds exactly."""
SHARPNESS = 10.0
"""Logits per router coordinate. It changes no choice of an expert, only how decided the load-balance term takes it."""
FLUCTUATION = -1
"""In a seed's place: a mask by fluctuation."""
_LEAST = 0.05
"""Least saliency expected on an expert's tokens, as a share of that over all tokens: lines go below zero."""
_ROUTED = 0.5
"""Standard deviation of random head masks' dependence on a direction, as the projection gives coordinates of 0.3."""


@dataclass(frozen=True)
class ToMoeGenome:
    """One candidate; float32 arrays, read-only.

    Attributes:
        space: the space it belongs to.
        shares: what widths are in proportion to, in logarithms: [layers, 1 or 3], see `WidthBudget.widths`.
        latents: coordinates of expert embeddings, [layers, N, latent].
        routers: rows of the routers, [layers, N, 1 + components]: on the mean input's direction, then on principal
            ones.
        heads: [layers, latent, 2 + components], or no layers without head masks: latent coordinates of the pairs' and
            of the values' scores, then of the values' scores along each principal direction of the attention's inputs.
        seeds: of random masks, whole numbers below `SEEDS`, or 0 for masks by saliency, or `FLUCTUATION`: [layers, N],
            with head masks [layers, N + 1], theirs last, where `FLUCTUATION` is as 0.
    """

    space: ToMoeSpace = field(repr=False, compare=False)
    shares: NDArray[np.float32] = field(repr=False)
    latents: NDArray[np.float32] = field(repr=False)
    routers: NDArray[np.float32] = field(repr=False)
    heads: NDArray[np.float32] = field(repr=False)
    seeds: NDArray[np.float32] = field(repr=False)

    def __post_init__(self) -> None:
        for name in ARRAYS:
            # Adding zero turns -0.0 into 0.0: equal arrays have equal bytes.
            array = np.array(getattr(self, name), dtype=np.float32) + np.float32(0)
            if array.shape != self.space.shapes[name]:
                raise ValueError(f"{name} has shape {array.shape}, the space has {self.space.shapes[name]}")
            array.flags.writeable = False
            object.__setattr__(self, name, array)
        if not ((self.seeds >= FLUCTUATION) & (self.seeds < SEEDS) & (self.seeds == np.rint(self.seeds))).all():
            raise ValueError(f"a genome's seeds must be whole numbers from {FLUCTUATION} to {SEEDS - 1}")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ToMoeGenome) and self.to_bytes() == other.to_bytes()

    def __hash__(self) -> int:
        return hash(self.to_bytes())

    def to_bytes(self) -> bytes:
        """Magic, sizes (five uint32) and the arrays as little-endian float32."""
        arrays = (getattr(self, name).astype("<f4").tobytes() for name in ARRAYS)
        return HEADER.pack(MAGIC, *self.space.sizes) + b"".join(arrays)

    @cached_property
    def content_hash(self) -> str:
        """Of what is expressed: coordinates that choose the same masks are the same content."""
        return hashlib.sha256(MAGIC + self._edit.phenotype_hash.encode()).hexdigest()

    def express(self) -> ToMoeEdit:
        """The masks and routers of every layer. The space must be calibrated."""
        return self._edit

    @cached_property
    def widths(self) -> NDArray[np.int64]:
        """Neurons per expert, and with head masks kept pairs and values: int64 [layers, 1 or 3]."""
        return self.space.budget.widths(self.shares)

    @cached_property
    def _edit(self) -> ToMoeEdit:
        kept = self._kept
        router = self.routers * np.float32(SHARPNESS) + np.float32(0)
        for layer, (rows, masks) in enumerate(zip(router, kept, strict=True)):
            keys = [
                (row.astype(">f4").tobytes(), np.packbits(mask).tobytes())
                for row, mask in zip(rows, masks, strict=True)
            ]
            order = sorted(range(len(keys)), key=keys.__getitem__)
            router[layer], kept[layer] = rows[order], masks[order]
        return ToMoeEdit(kept, router, self.space.measured["network_directions"], self._head_masks)

    @cached_property
    def terms(self) -> Terms:
        """The paper's regularisation terms. The space must be calibrated."""
        measured = self.space.measured
        return terms_of(self._edit, measured["network_sample"], measured.get("head_sample"))

    @property
    def _kept(self) -> NDArray[np.bool_]:
        """Masks in the genome's own order of experts: bool [layers, N, width]."""
        measured, section = self.space.measured, self.space.section
        saliency, slopes = measured["neuron_saliency"], measured["neuron_slopes"]
        project = Projection.of("neurons", section.latent, section.embedding, saliency.shape[1])
        kept = np.empty((*self.latents.shape[:2], saliency.shape[1]), dtype=np.bool_)
        for layer, width in enumerate(self.widths[:, 0].tolist()):
            base = saliency[layer].astype(np.float64)
            rows = self.routers[layer, :, 1:].astype(np.float64)
            rows /= np.maximum(1, np.linalg.norm(rows, axis=1, keepdims=True))
            expected = np.maximum(base + rows @ slopes[layer].astype(np.float64).T, _LEAST * base)
            scores = standardised(expected, base)
            for expert, seed in enumerate(self.seeds[layer, : len(scores)].astype(int).tolist()):
                if seed == FLUCTUATION:
                    scores[expert] = standardised(measured["neuron_fluctuation"][layer])
                elif seed:
                    scores[expert] = _random_scores(seed, "neurons", scores.shape[1])
            kept[layer] = top(scores + project(self.latents[layer]), width)
        return kept

    @property
    def _head_masks(self) -> HeadMasks | None:
        if not len(self.heads):
            return None
        measured, section = self.space.measured, self.space.section
        pairs, values = measured["pair_saliency"], measured["value_saliency"]
        head_dim = values.shape[1]
        of_pairs = Projection.of("pairs", section.latent, section.embedding, pairs.shape[1])
        of_values = Projection.of("values", section.latent, section.embedding, head_dim)
        pair_scores = np.stack([standardised(each) for each in pairs])
        value_bias = np.stack([standardised(each) for each in values])
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
        return HeadMasks(
            pairs=np.stack([top(scores, width) for scores, width in zip(pair_scores, self.widths[:, 1], strict=True)]),
            active=self.widths[:, 2],
            value_bias=np.round(value_bias, 6).astype(np.float32) + np.float32(0),
            value_router=np.round(router, 6).astype(np.float32) + np.float32(0),
            directions=measured["head_directions"],
        )


def _random_scores(seed: int, what: str, *shape: int) -> NDArray[np.float64]:
    """Standard normal numbers, always the same: as wide as standardised saliencies."""
    return generator(seed, 0, f"tomoe random {what}").standard_normal(shape)
