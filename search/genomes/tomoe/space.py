"""The settings of ToMoE searches, ToMoE genomes, and the space of these for one model.

Source: ToMoE (arXiv 2501.15316). The paper trains a hypernetwork that makes experts' embeddings (Eq. 1), projections
of these to masks (Eq. 3), routers, and a nonlinear path from a token's input to the mask of its values (Eq. 5). Here a
few coordinates per expert are searched instead: projections are fixed and random, without a hypernetwork, and scores
of values are linear in a token's input. An expert's mask keeps the neurons with the largest scores

    standardised log of saliency  +  projection(latent)

With all coordinates zero, every expert keeps the most salient neurons of all tokens. The start takes the routers that
the calibration fits, and each expert's saliency on its own tokens (seed `FITTED`). Experts are interchangeable; the
edit sorts them by their router rows.

Random masks, which the method has to be compared with, need something else, since saliency and the fixed projection
both prefer some neurons. If an expert has a seed, standard normal numbers from it replace the saliency; a random
individual's latent coordinates are zero, so that all masks of the layer's width are equally likely. Head masks work
alike. Children inherit seeds layer by layer. The seed `FLUCTUATION` replaces saliencies by the neurons' fluctuations
(FLAP). The paper has no such seeds: its masks are trained.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from moevolve.evaluators.errors import UserError
from moevolve.search.genomes.contract.arrays import FLOATS, ArrayGenome, ArraySpace, inherited
from moevolve.search.genomes.contract.base import (
    MOST_PARTS,
    MOST_TOKENS,
    Description,
    GenomeSection,
    Offspring,
    offspring_of,
)
from moevolve.search.genomes.contract.operators import gaussian_noise, select_groups
from moevolve.search.genomes.contract.phases import PhaseConfig, TunePhase
from moevolve.search.genomes.tomoe.budget import WidthBudget
from moevolve.search.genomes.tomoe.scores import (
    RegularisationTerms,
    projection,
    random_scores,
    regularisation_terms,
    standardised_log,
    top_mask,
)
from moevolve.workers.contract.facts import DenseFacts, ModelFacts
from moevolve.workers.families.registry import maskable_types
from moevolve.workers.methods.tomoe.edit import HeadMasks, ToMoeEdit, ToMoeMeasurement


class ToMoeSection(GenomeSection):
    """The ToMoE genome: overlapping expert masks on dense feed-forward networks, and masks on attention heads.

    Attributes:
        experts: Number of experts N per layer; one is active per token.
        budget: Active share p of the masked parts' parameters. As in the paper, routers don't count, and values that a
            token's mask drops count as inactive, although they are computed. A candidate uses the budget up to less
            than one neuron's parameters.
        equal_widths: Let the experts of all layers keep the same number of neurons, so that a candidate may be below
            the budget by a neuron's parameters per layer. With `experts: 1` and `attention: false`, candidates are
            narrower dense models, whose exports are stock.
        attention: Mask the heads' dimensions too (Llama, Mistral, Qwen2), and not only the networks.
        coverage, balance: Weights of the paper's union-coverage and load-balance terms as penalties on the fitness.
            Balance is measured on calibration tokens in the unedited model. The paper's weights are 2 and 1, for an
            unbounded loss; they outweigh a fitness of at most 1.
        calibration_tokens: Number of calibration tokens that experts are fitted to and saliencies measured on.
    """

    random_title: ClassVar[str] = "random masks and routers"
    kind: Literal["tomoe"]
    experts: int = Field(8, ge=1, le=MOST_PARTS)
    budget: float = Field(0.5, gt=0, le=1)
    equal_widths: bool = False
    attention: bool = True
    coverage: float = Field(0.0, ge=0, le=1e6)
    balance: float = Field(0.0, ge=0, le=1e6)
    calibration_tokens: int = Field(8192, ge=1, le=MOST_TOKENS)


# Searched coordinates per expert; an expert's embedding is a fixed projection of them, whose dimension is the paper's.
_LATENT, _EMBEDDING = 8, 128
# Most directions of a layer's inputs in which the router is searched; a fitted router of N experts has N - 1, of which
# the first are used.
_COMPONENTS = 8
# Number of calibration tokens on which coverage and balance are estimated.
_SAMPLE = 512
# Additional width of a network that writes all of the residual stream, as a multiple of one that writes little. With 0,
# 1 and 2, half of SmolLM2-135M's neurons have log perplexities 1.31, 1.00 and 0.97 above the full model's, unrepaired.
_WRITTEN = 2.0
# Standard deviation of random coordinates.
_SPREAD = 0.3


# Upper bound of seeds, which are integers that float32 represents exactly.
SEEDS = 1 << 24
# Logits per router coordinate. It affects only the softmax in the load-balance term, not the choice of experts.
SHARPNESS = 10.0
# Special seed for a mask by fluctuation.
FLUCTUATION = -1
# Special seed for a mask by the saliency on the tokens of a fitted expert.
FITTED = -2
# Standard deviation of random value-router coefficients: that of the projection at coordinates of 0.3.
_ROUTED = 0.5


@dataclass(frozen=True, eq=False, repr=False)
class ToMoeGenome(ArrayGenome):
    """One ToMoE candidate. Arrays are float32 and read-only.

    Attributes:
        shares: Logarithms of relative widths, [layers, 1 or 3]; see `WidthBudget.widths`. It has no layers if widths
            are equal.
        latents: Latent coordinates of expert embeddings, [layers, N, latent].
        routers: Router rows on the mean input's direction and on the other ones, [layers, N, 1 + components].
        heads: Latent coordinates of the head masks, [layers, latent, 2 + components]: of the pairs' scores, of the
            values' scores, and of the values' scores along each principal direction of the attention's inputs. It has
            no layers without head masks.
        seeds: Integer seeds of random masks below `SEEDS`, 0 for masks by saliency, `FLUCTUATION` or `FITTED`:
            [layers, N], or [layers, N + 1] with head masks, whose seed is last (those below 0 mean 0 there).
    """

    space: ToMoeSpace
    shares: NDArray[np.float32] = field(metadata=FLOATS)
    latents: NDArray[np.float32] = field(metadata=FLOATS)
    routers: NDArray[np.float32] = field(metadata=FLOATS)
    heads: NDArray[np.float32] = field(metadata=FLOATS)
    seeds: NDArray[np.float32] = field(metadata=FLOATS)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not ((self.seeds >= FITTED) & (self.seeds < SEEDS) & (self.seeds == np.rint(self.seeds))).all():
            raise ValueError(f"a genome's seeds must be whole numbers from {FITTED} to {SEEDS - 1}")

    def express(self) -> ToMoeEdit:
        """Return the edit; the space must be calibrated."""
        return self._edit

    @cached_property
    def widths(self) -> NDArray[np.int64]:
        """Neurons per expert, and with head masks kept pairs and value dimensions: int64 [layers, 1 or 3]."""
        return self.space.budget.widths(self.shares) if len(self.shares) else self.space.even_widths

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
        measured = self.space.statistics
        width = measured["neuron_saliency"].shape[1]
        project = projection("neurons", _LATENT, _EMBEDDING, width)
        kept = np.empty((*self.latents.shape[:2], width), dtype=np.bool_)
        for layer, count in enumerate(self.widths[:, 0].tolist()):
            scores = np.empty(kept.shape[1:])
            for expert, seed in enumerate(self.seeds[layer, : len(scores)].astype(int).tolist()):
                if seed > 0:
                    scores[expert] = random_scores(seed, "neurons", width)
                elif seed == FITTED:
                    scores[expert] = standardised_log(measured["expert_saliency"][layer, expert])
                else:
                    name = "neuron_fluctuation" if seed == FLUCTUATION else "neuron_saliency"
                    scores[expert] = standardised_log(measured[name][layer])
            kept[layer] = top_mask(scores + project(self.latents[layer]), count)
        return kept

    @property
    def _head_masks(self) -> HeadMasks | None:
        if not len(self.heads):
            return None
        measured, components = self.space.statistics, self.space.components
        pairs, values = measured["pair_saliency"], measured["value_saliency"]
        head_dim = values.shape[1]
        of_pairs = projection("pairs", _LATENT, _EMBEDDING, pairs.shape[1])
        of_values = projection("values", _LATENT, _EMBEDDING, head_dim)
        pair_scores = np.stack([standardised_log(each) for each in pairs])
        value_bias = np.stack([standardised_log(each) for each in values])
        router = np.zeros((len(values), head_dim, components))
        for layer, seed in enumerate(self.seeds[:, -1].astype(int).tolist()):
            if seed > 0:
                pair_scores[layer] = random_scores(seed, "pairs", pairs.shape[1])
                value_bias[layer] = random_scores(seed, "values", head_dim)
                router[layer] = _ROUTED * random_scores(seed, "value router", head_dim, components)
        pair_scores += of_pairs(self.heads[:, :, 0])
        value_bias += of_values(self.heads[:, :, 1])
        for component in range(components):
            router[:, :, component] += of_values(self.heads[:, :, 2 + component])
        kept_pairs = [top_mask(scores, width) for scores, width in zip(pair_scores, self.widths[:, 1], strict=True)]
        return HeadMasks(
            pairs=np.stack(kept_pairs),
            active=self.widths[:, 2],
            value_bias=np.round(value_bias, 6).astype(np.float32) + np.float32(0),
            value_router=np.round(router, 6).astype(np.float32) + np.float32(0),
            directions=measured["head_directions"],
        )


@dataclass(frozen=True)
class ToMoeSpace(ArraySpace[ToMoeGenome]):
    """All ToMoE genomes for one model.

    Attributes:
        dense: Sizes of the model's dense networks.
        budget: Budget of the layers' widths.
    """

    kind: ClassVar[str] = "tomoe"
    genome_type: ClassVar[type[ToMoeGenome]] = ToMoeGenome
    section: ToMoeSection
    dense: DenseFacts = field(repr=False)
    budget: WidthBudget = field(repr=False)

    @classmethod
    def of(cls, section: ToMoeSection, facts: ModelFacts) -> ToMoeSpace:
        """Make the space of a model.

        Raises:
            UserError: The model has no dense networks, its heads can't be masked, or the settings don't fit its sizes;
                the message names the field.
        """
        dense = facts.dense
        if dense is None:
            raise UserError(
                f"genome.kind: tomoe needs dense feed-forward networks of a supported family, not {facts.family}"
            )
        maskable = maskable_types()
        if section.attention and (facts.family not in maskable or dense.rotary_dim != dense.head_dim):
            raise UserError(
                f"genome.attention: heads of {facts.family} can't be masked, only those of {', '.join(maskable)} "
                "with rotary embedding of whole heads; set attention: false"
            )
        return cls(section, dense, WidthBudget.of(facts, section.attention, section.budget), facts=facts)

    @property
    def components(self) -> int:
        """Number of directions of a layer's inputs in which the router is searched."""
        return min(_COMPONENTS, self.dense.hidden - 1)

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of a genome's arrays."""
        section, layers = self.section, self.dense.layers
        experts, components = section.experts, self.components
        return {
            "shares": (0 if section.equal_widths else layers, len(self.budget.full_widths)),
            "latents": (layers, experts, _LATENT),
            "routers": (layers, experts, 1 + components),
            "heads": (layers if section.attention else 0, _LATENT, 2 + components),
            "seeds": (layers, experts + self.section.attention),
        }

    @property
    def measurement(self) -> ToMoeMeasurement:
        section = self.section
        return ToMoeMeasurement(
            section.attention,
            section.experts,
            section.budget,
            self.components,
            sample=_SAMPLE,
            tokens=section.calibration_tokens,
        )

    def start(self, phase: PhaseConfig) -> Offspring[ToMoeGenome]:
        """Return the genome of the fitted experts.

        Widths grow with the share of the residual stream that the network writes, which is near 1 for the first network
        of a language model: later ones can't make up for what it drops.
        """
        shares = np.zeros(self.shapes["shares"])
        if len(shares):
            wanted = 1 + _WRITTEN * self.statistics["network_share"].astype(np.float64)
            shares[:, 0] = np.log(wanted / wanted.mean())
        arrays = {"routers": self.statistics["expert_rows"], "seeds": np.full(self.shapes["seeds"], FITTED)}
        return Offspring(self.genome(shares=shares, **arrays), "start", ())

    def sample(self, rng: np.random.Generator, phase: PhaseConfig) -> Offspring[ToMoeGenome]:
        """Draw random widths and routers, and random masks that ignore saliency."""
        arrays = {name: rng.standard_normal(self.shapes[name]) * _SPREAD for name in ("shares", "routers")}
        return Offspring(self.genome(**arrays, seeds=rng.integers(1, SEEDS, self.shapes["seeds"])), "random", ())

    def breed(
        self, rng: np.random.Generator, phase: PhaseConfig, parents: tuple[ToMoeGenome, ...]
    ) -> Offspring[ToMoeGenome]:
        assert isinstance(phase, TunePhase)
        arrays = inherited(rng, parents, self.dense.layers)
        touched = [name for name, shape in self.shapes.items() if shape[0] and name != "seeds"]
        for layer in select_groups(rng, self.dense.layers, phase.group_rate):
            for name in touched:
                arrays[name][layer] = gaussian_noise(rng, arrays[name][layer], phase.entry_rate, phase.sigma)
            for expert in np.flatnonzero(rng.random(self.section.experts) < phase.swap_rate):
                for name in ("latents", "routers"):
                    arrays[name][layer, expert] = rng.standard_normal(self.shapes[name][2]) * _SPREAD
                if arrays["seeds"][layer, expert] > 0:
                    arrays["seeds"][layer, expert] = rng.integers(1, SEEDS)
        return offspring_of(self.genome(**arrays), parents)

    def flatten(self, genome: ToMoeGenome, phase: PhaseConfig) -> NDArray[np.float64]:
        """Return all coordinates in order (shares, latents, routers, heads), then one number per seed.

        It is 0 for saliency, `FLUCTUATION` or `FITTED`, and 1 + seed / `SEEDS` for a random mask, so that small steps
        don't turn one into another.
        """
        coordinates, seeds = np.split(super().flatten(genome, phase), [-genome.seeds.size])
        return np.concatenate([coordinates, np.where(seeds > 0, 1 + seeds / SEEDS, seeds)])

    def unflatten(self, vector: NDArray[np.float64], phase: PhaseConfig) -> ToMoeGenome:
        """Invert `flatten`: seeds' numbers above 0.5 are random masks, the others are rounded."""
        coordinates, places = np.split(vector, [-int(np.prod(self.shapes["seeds"]))])
        random = np.clip(np.rint((places - 1) * SEEDS), 1, SEEDS - 1)
        seeds = np.where(places > 0.5, random, np.clip(np.rint(places), FITTED, 0))
        return super().unflatten(np.concatenate([coordinates, seeds]), phase)

    def describe(self, genome: ToMoeGenome) -> Description:
        """Return the sizes and costs of the exported model; the space must be calibrated.

        The exported code runs an expert's neurons and the kept query and key dimensions, but all value dimensions of
        layers where they differ between tokens, since masks are applied to computed values. The paper and the budget
        count masked values as inactive and don't count routers.
        """
        widths, terms, heads = genome.widths, genome.terms, genome.express().heads
        used = self.active_parameters(widths, None if heads is None else heads.static)
        narrow, wide = widths[:, 0].min(), widths[:, 0].max()
        return Description(
            experts=self.section.experts,
            active=1,
            parameters=used + int((terms.unions - widths[:, 0]).sum()) * self.budget.unit_costs[0],
            active_parameters=used,
            parameters_full=self.facts.parameters,
            active_parameters_full=self.facts.active_parameters,
            summary=(
                f"{self.section.experts} experts of {narrow} to {wide} neurons, budget {self.section.budget:.0%}, "
                f"coverage {terms.coverage.mean():.1%}, balance {terms.balance_term:+.2f}"
                if self.section.experts > 1
                else f"{narrow} to {wide} of {self.dense.width} neurons, budget {self.section.budget:.0%}"
            ),
            penalty=self.section.coverage * terms.union_term + self.section.balance * terms.balance_term,
        )

    @property
    def even_widths(self) -> NDArray[np.int64]:
        """Widths of the start, which keeps the same proportion of every layer: int64 [layers, 1 or 3]."""
        widths = self.budget.widths(np.zeros((self.dense.layers, len(self.budget.full_widths)), dtype=np.float32))
        if self.section.equal_widths:
            widths[:, 0] = widths[:, 0].min()
        return widths

    def active_parameters(self, widths: NDArray[np.int64], static: NDArray[np.bool_] | None = None) -> int:
        """Count the parameters that a token uses at widths [layers, 1 or 3], routers included.

        Masked value dimensions count as used except in layers where all tokens have the same mask (`static`, bool
        [layers]).
        """
        still = np.zeros(len(widths), dtype=np.bool_) if static is None else static
        unused = (np.array(self.budget.full_widths) - widths) * np.array(self.budget.unit_costs)
        unused[:, 2:] *= still[:, None]
        dense, section = self.dense, self.section
        routers = int((widths[:, 0] < dense.width).sum()) * section.experts * dense.hidden
        if section.experts == 1 and not section.attention and np.ptp(widths[:, 0]) == 0:
            routers = 0  # one mask per layer, all equally wide, makes a narrower dense model
        if section.attention:
            scores = self.components * dense.hidden + dense.head_dim * (self.components + 1)
            routers += int(((widths[:, 2] < dense.head_dim) & ~still).sum()) * scores
        return self.facts.parameters + routers - int(unused.sum())
