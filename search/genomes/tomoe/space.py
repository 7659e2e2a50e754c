"""The space of ToMoE genomes: their start, random ones, breeding, and what they cost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations, product
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from moevolve.evaluators.errors import UserError
from moevolve.search.genomes.contract.base import Description, Offspring, bred
from moevolve.search.genomes.contract.operators import gaussian_noise, layer_crossover, select_groups
from moevolve.search.genomes.tomoe.budget import WidthBudget
from moevolve.search.genomes.tomoe.genome import ARRAYS, FLUCTUATION, HEADER, MAGIC, SEEDS, ToMoeGenome
from moevolve.search.genomes.tomoe.section import ToMoeSection
from moevolve.search.settings.phases import PhaseConfig, TunePhase
from moevolve.workers.contract.edits import Calibration
from moevolve.workers.contract.facts import DenseFacts, ModelFacts
from moevolve.workers.families.registry import maskable_types
from moevolve.workers.methods.tomoe.edit import ToMoeRecipe

_SAMPLE = 512
"""Calibration tokens on which coverage and balance are estimated."""
_SPREAD = 0.3
"""Standard deviation of random coordinates."""


@dataclass(frozen=True)
class ToMoeSpace:
    """All ToMoE genomes for one model.

    Attributes:
        section: the settings.
        facts: the model.
        dense: its dense networks.
        budget: what widths may be.
        calibration: the start; None as long as it isn't measured.
    """

    kind: ClassVar[str] = "tomoe"
    section: ToMoeSection
    facts: ModelFacts = field(repr=False)
    dense: DenseFacts = field(repr=False)
    budget: WidthBudget = field(repr=False)
    calibration: Calibration | None = field(default=None, repr=False, compare=False)

    @classmethod
    def of(cls, section: ToMoeSection, facts: ModelFacts) -> ToMoeSpace:
        """Build the space of a configuration for a model.

        Raises:
            UserError: the model has no dense networks, its heads can't be masked, or the settings don't suit its sizes;
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
        """Layers, experts N, latent coordinates, components, widths per layer."""
        section = self.section
        return self.dense.layers, section.experts, section.latent, section.components, len(self.budget.whole)

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of a genome's arrays."""
        layers, experts, latent, components, kinds = self.sizes
        return {
            "shares": (layers, kinds),
            "latents": (layers, experts, latent),
            "routers": (layers, experts, 1 + components),
            "heads": (layers if self.section.attention else 0, latent, 2 + components),
            "seeds": (layers, experts + self.section.attention),
        }

    @property
    def phase_kinds(self) -> tuple[str, ...]:
        return ("tune",)

    @property
    def recipe(self) -> ToMoeRecipe:
        section = self.section
        return ToMoeRecipe(section.attention, section.components, _SAMPLE, section.calibration_tokens)

    def calibrated(self, calibration: Calibration) -> ToMoeSpace:
        return replace(self, calibration=calibration)

    @property
    def measured(self) -> dict[str, NDArray[np.float32]]:
        """The calibration's arrays; see `calibrate_tomoe`."""
        assert self.calibration is not None, "the space has to be calibrated before masks are made in it"
        return dict(self.calibration.arrays)

    def start(self, phase: PhaseConfig) -> Offspring[ToMoeGenome]:
        """The same share of everything; experts for the two ends of every direction, or one mask for all."""
        if self.section.start == "saliency":
            return Offspring(self.genome(), "start", ())
        _, experts, _, components, _ = self.sizes
        rows = np.zeros(self.shapes["routers"])
        for expert, row in zip(range(experts), _spread_out(components), strict=False):
            rows[:, expert, 1:] = row
        return Offspring(self.genome(routers=rows), "start", ())

    def sample(self, rng: np.random.Generator, phase: PhaseConfig) -> Offspring[ToMoeGenome]:
        """Random widths and routers; masks that are random whatever saliency says."""
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
        return bred(self.genome(**arrays), parents)

    def from_bytes(self, data: bytes) -> ToMoeGenome:
        magic, *sizes = HEADER.unpack_from(data) if len(data) >= HEADER.size else (b"", 0)
        count = sum(int(np.prod(shape)) for shape in self.shapes.values())
        if magic != MAGIC or tuple(sizes) != self.sizes or len(data) != HEADER.size + 4 * count:
            raise ValueError("these bytes are no ToMoE genome of this space")
        return self._split(np.frombuffer(data, dtype="<f4", offset=HEADER.size))

    def flatten(self, genome: ToMoeGenome, phase: PhaseConfig) -> NDArray[np.float64]:
        """All coordinates in order: shares, latents, routers, heads; then seeds.

        A mask by saliency is 0, one by fluctuation -1, a random one 1 plus its seed's place among the seeds: small
        steps turn none of them into one of the others.
        """
        *coordinates, seeds = (getattr(genome, name).astype(np.float64).ravel() for name in ARRAYS)
        return np.concatenate([*coordinates, np.where(seeds > 0, 1 + seeds / SEEDS, seeds)])

    def unflatten(self, vector: NDArray[np.float64], phase: PhaseConfig) -> ToMoeGenome:
        """Inverse of `flatten`; of the last numbers, masks are random over 0.5 and by fluctuation below -0.5."""
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
        """A genome of `arrays`; those left out are zeros."""
        return ToMoeGenome(self, **{name: arrays.get(name, np.zeros(shape)) for name, shape in self.shapes.items()})

    def describe(self, genome: ToMoeGenome) -> Description:
        """What is kept, what a token runs, and the terms. The space must be calibrated.

        It is that of the exported code, which runs an expert's neurons and the kept query and key dimensions, but all
        value dimensions where tokens differ in them: a token's mask is put on the finished values. The paper and the
        budget count masked ones as inactive, and no routers.
        """
        widths, terms, heads = genome.widths, genome.terms, genome.express().heads
        used = self.active_parameters(widths, None if heads is None else heads.static)
        narrow, wide = int(widths[:, 0].min()), int(widths[:, 0].max())
        return Description(
            experts=self.section.experts,
            active=1,
            parameters=used + int((terms.unions - widths[:, 0]).sum()) * self.budget.costs[0],
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
        """The same share of everything: widths of the start, [layers, 1 or 3]; all candidates' sum up alike."""
        return self.budget.widths(np.zeros(self.shapes["shares"], dtype=np.float32))

    def active_parameters(self, widths: NDArray[np.int64], static: NDArray[np.bool_] | None = None) -> int:
        """What a token runs at widths [layers, 1 or 3]: all but neurons and pairs beyond them, and routers.

        Value dimensions beyond their width are run, too, but in layers where all tokens keep the same ones (`static`).
        """
        still = np.zeros(len(widths), dtype=np.bool_) if static is None else static
        unused = (np.array(self.budget.whole) - widths) * np.array(self.budget.costs)
        unused[:, 2:] *= still[:, None]
        return self.facts.parameters + self._router_parameters(widths, still) - int(unused.sum())

    def _router_parameters(self, widths: NDArray[np.int64], static: NDArray[np.bool_]) -> int:
        """Of the routers that masked networks and heads need."""
        _, experts, _, components, kinds = self.sizes
        networks = int((widths[:, 0] < self.dense.width).sum()) * experts * self.dense.hidden
        if kinds == 1:
            return networks
        scores = components * self.dense.hidden + self.dense.head_dim * (components + 1)
        return networks + int(((widths[:, 2] < self.dense.head_dim) & ~static).sum()) * scores


def _spread_out(components: int) -> Iterator[NDArray[np.float64]]:
    """Unit rows [components] far from each other: both ends of every direction, then of every two directions' sums."""
    axes = np.eye(components)
    for axis, sign in product(axes, (1, -1)):
        yield sign * axis
    for (one, two), first, second in product(combinations(axes, 2), (1, -1), (1, -1)):
        yield (first * one + second * two) / np.sqrt(2)
