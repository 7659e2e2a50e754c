"""The settings of ToMoE searches and the space of ToMoE genomes for one model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations, product
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from moevolve.evaluators.errors import UserError
from moevolve.search.genomes.contract.base import (
    MOST_PARTS,
    MOST_TOKENS,
    Description,
    GenomeSection,
    Offspring,
    offspring_of,
)
from moevolve.search.genomes.contract.operators import gaussian_noise, layer_crossover, select_groups
from moevolve.search.genomes.contract.phases import PhaseConfig, TunePhase
from moevolve.search.genomes.tomoe.budget import WidthBudget
from moevolve.search.genomes.tomoe.genome import ARRAYS, FLUCTUATION, HEADER, MAGIC, SEEDS, ToMoeGenome
from moevolve.workers.contract.edits import Calibration
from moevolve.workers.contract.facts import DenseFacts, ModelFacts
from moevolve.workers.families.registry import maskable_types
from moevolve.workers.methods.tomoe.edit import ToMoeRecipe


class ToMoeSection(GenomeSection):
    """The ToMoE genome: overlapping expert masks on dense feed-forward networks, and masks on attention heads.

    Attributes:
        experts: Number of experts N per layer; one is active per token.
        budget: Active share p of the masked parts' parameters. As in the paper, routers don't count, and values that a
            token's mask drops count as inactive, although they are computed. A candidate uses the budget up to less
            than one neuron's parameters.
        attention: Mask the heads' dimensions too (Llama, Mistral, Qwen2), and not only the networks.
        embedding: Dimension of an expert's embedding.
        latent: Number of searched coordinates per expert; the embedding is a fixed projection of them.
        components: Number of principal directions of a layer's inputs in which the router is searched.
        coverage, balance: Weights of the paper's union-coverage and load-balance terms as penalties on the fitness.
            Balance is measured on calibration tokens in the unedited model. The paper's weights are 2 and 1, for an
            unbounded loss; they outweigh a fitness of at most 1 (`configs/runs/tomoe-table.yaml`).
        calibration_tokens: Number of calibration tokens that saliencies and directions are measured on.
    """

    random_title: ClassVar[str] = "random masks and routers"
    kind: Literal["tomoe"]
    experts: int = Field(8, ge=1, le=MOST_PARTS)
    budget: float = Field(0.5, gt=0, le=1)
    attention: bool = True
    embedding: int = Field(128, ge=1, le=MOST_PARTS)
    latent: int = Field(8, ge=1, le=MOST_PARTS)
    components: int = Field(8, ge=0, le=MOST_PARTS)
    coverage: float = Field(0.0, ge=0, le=1e6)
    balance: float = Field(0.0, ge=0, le=1e6)
    calibration_tokens: int = Field(8192, ge=1, le=MOST_TOKENS)


_SAMPLE = 512
"""Number of calibration tokens on which coverage and balance are estimated."""
_SPREAD = 0.3
"""Standard deviation of random coordinates."""


@dataclass(frozen=True)
class ToMoeSpace:
    """All ToMoE genomes for one model.

    Attributes:
        dense: Sizes of the model's dense networks.
        budget: Budget of the layers' widths.
        calibration: Measured saliencies and directions; None before calibration.
    """

    kind: ClassVar[str] = "tomoe"
    phase_kinds: ClassVar[tuple[str, ...]] = ("tune",)
    section: ToMoeSection
    facts: ModelFacts = field(repr=False)
    dense: DenseFacts = field(repr=False)
    budget: WidthBudget = field(repr=False)
    calibration: Calibration | None = field(default=None, repr=False, compare=False)

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
        if section.components >= dense.hidden:
            raise UserError(f"genome.components: {section.components} is too many for {dense.hidden} inputs")
        return cls(section, facts, dense, WidthBudget.of(facts, section.attention, section.budget))

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """Numbers of layers, experts N, latent coordinates, components, and widths per layer."""
        section = self.section
        return self.dense.layers, section.experts, section.latent, section.components, len(self.budget.full_widths)

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of a genome's arrays."""
        layers, experts, latent, components, kinds = self.sizes
        return {
            "shares": (layers, kinds),
            "latents": (layers, experts, latent),
            "routers": (layers, experts, 1 + components),
            "heads": (layers if self.section.attention else 0, latent, 2 + components),
            "seeds": (layers, experts + self.section.attention),
        }

    @property
    def recipe(self) -> ToMoeRecipe:
        section = self.section
        return ToMoeRecipe(section.attention, section.components, _SAMPLE, section.calibration_tokens)

    def calibrated(self, calibration: Calibration) -> ToMoeSpace:
        return replace(self, calibration=calibration)

    @property
    def statistics(self) -> dict[str, NDArray[np.float32]]:
        """Arrays of the calibration; see `calibrate_tomoe`."""
        assert self.calibration is not None, "the space isn't calibrated"
        return dict(self.calibration.arrays)

    def start(self, phase: PhaseConfig) -> Offspring[ToMoeGenome]:
        """Return the genome of even widths, with an expert for each end of every principal direction."""
        _, experts, _, components, _ = self.sizes
        rows = np.zeros(self.shapes["routers"])
        for expert, row in zip(range(experts), _spread_out(components), strict=False):
            rows[:, expert, 1:] = row
        return Offspring(self.genome(routers=rows), "start", ())

    def sample(self, rng: np.random.Generator, phase: PhaseConfig) -> Offspring[ToMoeGenome]:
        """Draw random widths and routers, and random masks that ignore saliency."""
        arrays = {name: rng.standard_normal(self.shapes[name]) * _SPREAD for name in ("shares", "routers")}
        return Offspring(self.genome(**arrays, seeds=rng.integers(1, SEEDS, self.shapes["seeds"])), "random", ())

    def breed(
        self, rng: np.random.Generator, phase: PhaseConfig, parents: tuple[ToMoeGenome, ...]
    ) -> Offspring[ToMoeGenome]:
        assert isinstance(phase, TunePhase)
        arrays = {name: getattr(parents[0], name).copy() for name in ARRAYS}
        touched = [name for name, shape in self.shapes.items() if shape[0] and name != "seeds"]
        if len(parents) == 2:
            other = layer_crossover(rng, self.dense.layers)
            for name in (*touched, "seeds"):
                arrays[name][other] = getattr(parents[1], name)[other]
        for layer in select_groups(rng, self.dense.layers, phase.group_rate):
            for name in touched:
                arrays[name][layer] = gaussian_noise(rng, arrays[name][layer], phase.entry_rate, phase.sigma)
            for expert in np.flatnonzero(rng.random(self.section.experts) < phase.swap_rate):
                for name in ("latents", "routers"):
                    arrays[name][layer, expert] = rng.standard_normal(self.shapes[name][2]) * _SPREAD
                if arrays["seeds"][layer, expert] > 0:
                    arrays["seeds"][layer, expert] = rng.integers(1, SEEDS)
        return offspring_of(self.genome(**arrays), parents)

    def from_bytes(self, data: bytes) -> ToMoeGenome:
        magic, *sizes = HEADER.unpack_from(data) if len(data) >= HEADER.size else (b"", 0)
        count = sum(int(np.prod(shape)) for shape in self.shapes.values())
        if magic != MAGIC or tuple(sizes) != self.sizes or len(data) != HEADER.size + 4 * count:
            raise ValueError("these bytes are no ToMoE genome of this space")
        return self._split(np.frombuffer(data, dtype="<f4", offset=HEADER.size))

    def flatten(self, genome: ToMoeGenome, phase: PhaseConfig) -> NDArray[np.float64]:
        """Return all coordinates in order (shares, latents, routers, heads), then one number per seed.

        It is 0 for saliency, -1 for fluctuation, and 1 + seed / `SEEDS` for a random mask, so that small steps don't
        turn one into another.
        """
        *coordinates, seeds = (getattr(genome, name).astype(np.float64).ravel() for name in ARRAYS)
        return np.concatenate([*coordinates, np.where(seeds > 0, 1 + seeds / SEEDS, seeds)])

    def unflatten(self, vector: NDArray[np.float64], phase: PhaseConfig) -> ToMoeGenome:
        """Invert `flatten`: seeds' numbers above 0.5 are random masks, those below -0.5 masks by fluctuation."""
        coordinates, places = np.split(vector, [-int(np.prod(self.shapes["seeds"]))])
        seeds = np.where(places > 0.5, np.clip(np.rint((places - 1) * SEEDS), 1, SEEDS - 1), 0)
        seeds = np.where(places < -0.5, FLUCTUATION, seeds)
        return self._split(np.concatenate([coordinates, seeds]))

    def _split(self, values: NDArray[Any]) -> ToMoeGenome:
        ends = np.cumsum([int(np.prod(shape)) for shape in self.shapes.values()])
        parts = np.split(values, ends[:-1])
        return self.genome(
            **{name: part.reshape(shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}
        )

    def genome(self, **arrays: NDArray[Any]) -> ToMoeGenome:
        """Return a genome of `arrays`; missing ones are zeros."""
        return ToMoeGenome(self, **{name: arrays.get(name, np.zeros(shape)) for name, shape in self.shapes.items()})

    def describe(self, genome: ToMoeGenome) -> Description:
        """Return the sizes and costs of the exported model; the space must be calibrated.

        The exported code runs an expert's neurons and the kept query and key dimensions, but all value dimensions of
        layers where they differ between tokens, since masks are applied to computed values. The paper and the budget
        count masked values as inactive and leave routers out.
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
            summary=(
                f"{self.section.experts} experts of {narrow} to {wide} neurons, budget {self.section.budget:.0%}, "
                f"coverage {terms.coverage.mean():.1%}, balance {terms.balance_term:+.2f}"
            ),
            penalty=self.section.coverage * terms.union_term + self.section.balance * terms.balance_term,
        )

    @property
    def even_widths(self) -> NDArray[np.int64]:
        """Widths of the start, which keeps the same proportion of every layer: int64 [layers, 1 or 3]."""
        return self.budget.widths(np.zeros(self.shapes["shares"], dtype=np.float32))

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
        if section.attention:
            scores = section.components * dense.hidden + dense.head_dim * (section.components + 1)
            routers += int(((widths[:, 2] < dense.head_dim) & ~still).sum()) * scores
        return self.facts.parameters + routers - int(unused.sum())


def _spread_out(components: int) -> Iterator[NDArray[np.float64]]:
    """Yield unit vectors [components]: both ends of every axis, then the diagonals between every two axes."""
    axes = np.eye(components)
    for axis, sign in product(axes, (1, -1)):
        yield sign * axis
    for (one, two), first, second in product(combinations(axes, 2), (1, -1), (1, -1)):
        yield (first * one + second * two) / np.sqrt(2)
