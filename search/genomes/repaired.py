"""Genomes of any kind combined with a repair, and their space.

A repaired genome consists of a base, which is a genome of another kind, and a repair recipe
(`moevolve.workers.methods.repair`). In a phase with `repair`, bases are bred and all get the phase's recipe; a repair
phase keeps the base and varies the recipe.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moevolve.search.genomes.contract.base import Description, Genome, GenomeSpace, Offspring
from moevolve.search.genomes.contract.phases import PhaseConfig, RepairPhase
from moevolve.workers.contract.edits import Calibration, CalibrationRecipe, Edit, IdentityEdit, LayeredEdit, combined
from moevolve.workers.contract.fitting import FitRows, NeuronRecipe, RowsRecipe
from moevolve.workers.methods.repair.edit import RepairedEdit, RepairRecipe

# First bytes of repaired genomes; those of others are a hash, which can't be as long and the same.
_MAGIC = b"repaired "
# Bounds of the weights that are searched.
_ANSWER_WEIGHTS = (0.25, 64.0)


@dataclass(frozen=True)
class RepairedGenome(Genome):
    """One repaired candidate: `recipe` repairs the edit of `base`."""

    space: RepairedSpace = field(repr=False, compare=False)
    base: Genome
    recipe: RepairRecipe

    def to_bytes(self) -> bytes:
        """Return a magic word, the recipe as one line of JSON, and the base's bytes."""
        return _MAGIC + self.recipe.text.encode() + b"\n" + self.base.to_bytes()

    def express(self) -> Edit:
        """Return the base's edit with its repair, or the base's edit alone if it changes nothing."""
        return self._edit

    @cached_property
    def _edit(self) -> Edit:
        edit, rows = self.base.express(), self.space.rows
        if isinstance(edit, IdentityEdit):
            return edit
        assert isinstance(edit, LayeredEdit), f"edits of kind {type(edit).__name__} can't be repaired"
        assert rows is not None, "the space isn't calibrated"
        return RepairedEdit(edit, self.recipe, rows)


@dataclass(frozen=True)
class RepairedSpace(GenomeSpace[Any]):
    """All genomes of a search with repairs: bases and repaired bases.

    Attributes:
        inner: Space of the bases.
        tokens: Largest number of calibration tokens that a repair of the search is fitted on.
        recombinable: See `GenomeKind`.
        rows: Calibration rows that repairs are fitted on; None before calibration.
    """

    inner: GenomeSpace[Any]
    tokens: int
    recombinable: bool
    rows: FitRows | None = field(default=None, repr=False, compare=False)

    @property
    def kind(self) -> str:
        return self.inner.kind

    @property
    def phase_kinds(self) -> tuple[str, ...]:
        return (*self.inner.phase_kinds, "repair")

    @property
    def recipe(self) -> CalibrationRecipe | None:
        return combined(self.inner.recipe, RowsRecipe(self.tokens))

    def calibrated(self, calibration: Calibration) -> RepairedSpace:
        inner = self.inner if self.inner.recipe is None else self.inner.calibrated(calibration)
        return replace(self, inner=inner, rows=FitRows.of(calibration.arrays))

    def selects_subset(self, phase: PhaseConfig) -> bool:
        return self.inner.selects_subset(phase)

    def importance(self, phase: PhaseConfig) -> NDArray[np.float64]:
        return self.inner.importance(phase)

    def start(self, phase: PhaseConfig) -> Offspring[Any] | None:
        start = self.inner.start(phase)
        return None if start is None else self.repair_offspring(start, phase)

    def sample(self, rng: np.random.Generator, phase: PhaseConfig) -> Offspring[Any]:
        return self.repair_offspring(self.inner.sample(rng, phase), phase)

    def breed(self, rng: np.random.Generator, phase: PhaseConfig, parents: tuple[Genome, ...]) -> Offspring[Any]:
        if not isinstance(phase, RepairPhase):
            return self.repair_offspring(self.inner.breed(rng, phase, tuple(map(base_genome, parents))), phase)
        # The base is the first parent's, the recipe to vary the last parent's.
        donor = parents[-1]
        recipe = donor.recipe if isinstance(donor, RepairedGenome) else phase.repair
        varied = vary_recipe(rng, self._limit_tokens(recipe), self._limit_tokens(phase.repair), self.recombinable)
        return Offspring(self.repaired(parents[0], varied), "repair", tuple(range(len(parents))))

    def repair_offspring(self, offspring: Offspring[Any], phase: PhaseConfig) -> Offspring[Any]:
        """Return the offspring, repaired by the phase's recipe if it has one."""
        recipe = phase.repair
        return offspring if recipe is None else replace(offspring, genome=self.repaired(offspring.genome, recipe))

    def repaired(self, genome: Genome, recipe: RepairRecipe) -> RepairedGenome:
        """Return a genome repaired by a recipe, which replaces the recipe of a genome that is repaired already."""
        return RepairedGenome(self, base_genome(genome), recipe)

    def _limit_tokens(self, recipe: RepairRecipe) -> RepairRecipe:
        # With more tokens than there are, recipes with different numbers would fit the same tokens.
        assert self.rows is not None, "the space isn't calibrated"
        return replace(recipe, tokens=max(2, min(recipe.tokens, len(self.rows.tokens))))

    def from_bytes(self, data: bytes) -> Genome:
        if not data.startswith(_MAGIC):
            genome: Genome = self.inner.from_bytes(data)
            return genome
        text, _, rest = data.removeprefix(_MAGIC).partition(b"\n")
        try:
            recipe = RepairRecipe.from_text(text.decode())
        except ValueError as error:
            raise ValueError(f"these bytes are no repaired genome: {error}") from None
        return RepairedGenome(self, self.inner.from_bytes(rest), recipe)

    def flatten(self, genome: Genome, phase: PhaseConfig) -> NDArray[np.float64]:
        return self.inner.flatten(base_genome(genome), phase)

    def unflatten(self, vector: NDArray[np.float64], phase: PhaseConfig) -> Genome:
        genome: Genome = self.inner.unflatten(vector, phase)
        return genome if phase.repair is None else self.repaired(genome, phase.repair)

    def describe(self, genome: Genome) -> Description:
        description = self.inner.describe(base_genome(genome))
        if not isinstance(genome, RepairedGenome):
            return description
        return replace(description, summary=f"{description.summary}, {recipe_summary(genome.recipe)}")


def base_genome(genome: Genome) -> Genome:
    """Return a repaired genome's base; other genomes are returned unchanged."""
    return genome.base if isinstance(genome, RepairedGenome) else genome


def base_space(space: GenomeSpace[Any]) -> GenomeSpace[Any]:
    """Return the space of the bases; other spaces are returned unchanged."""
    return space.inner if isinstance(space, RepairedSpace) else space


def repaired_space(inner: GenomeSpace[Any], phases: Sequence[PhaseConfig], recombinable: bool) -> GenomeSpace[Any]:
    """Return the space of a search with these phases: `inner` itself if they have no repairs."""
    tokens = [phase.repair.tokens for phase in phases if phase.repair is not None]
    return RepairedSpace(inner, max(tokens), recombinable) if tokens else inner


def recipe_summary(recipe: RepairRecipe) -> str:
    """Describe a recipe in a few words for listings; `recipe_settings` has all of it."""
    filled = "" if recipe.neurons is None else ", neurons of all experts"
    return f"repaired, {recipe.target}, {_strength(recipe)}, lambda {_lambdas(recipe)}{filled}"


def recipe_settings(recipe: RepairRecipe) -> tuple[tuple[str, str], ...]:
    """Return labels and values of all that a recipe sets, but the memory it may take."""
    settings = [
        ("repair", _strength(recipe)),
        ("repair target", f"{recipe.target} ({_TARGETS[recipe.target]})"),
        ("ridge lambda", _lambdas(recipe)),
        ("fitted on", f"{recipe.tokens:,} tokens"),
        ("weight of answers' tokens", f"{recipe.answer_weight:.2g}"),
    ]
    neurons = recipe.neurons
    if neurons is None:
        return (*settings, ("neurons", "each expert's own"))
    return (
        *settings,
        ("neurons", f"of all experts, each in {'any number of experts' if neurons.shared else 'one expert'}"),
        ("exponent of neurons' routing weights", f"{neurons.routing:.2g}"),
        ("exponent of neurons' activations", f"{neurons.activation:.2g}"),
        ("exponent of neurons' output weights", f"{neurons.output:.2g}"),
        ("neurons on the shortlist", f"{neurons.candidates:.2g} times those kept"),
        ("router rows", neurons.router),
    )


_TARGETS = {"global": "the unedited model's residual stream", "local": "the unedited layer's output"}


def _strength(recipe: RepairRecipe) -> str:
    return f"gated, up to {recipe.strength}" if recipe.gate else recipe.strength


def _lambdas(recipe: RepairRecipe) -> str:
    low, high = min(recipe.ridge_lambdas), max(recipe.ridge_lambdas)
    return f"{low:.2g}" if low == high else f"{low:.2g} to {high:.2g}"


def vary_recipe(
    rng: np.random.Generator, recipe: RepairRecipe, phase: RepairRecipe, recombinable: bool
) -> RepairRecipe:
    """Return a recipe that differs from `recipe` in at least one value.

    Args:
        rng: The individual's generator.
        recipe: The parent's recipe.
        phase: The phase's recipe, which limits `tokens` and gives the exponents of `neurons` that are added. If it has
            `neurons`, they aren't dropped.
        recombinable: True if the recipe may have `neurons`.
    """
    changes: dict[str, Any] = {}
    # About two settings change per child, numbers more often than choices among two or three.
    while not changes:
        if rng.random() < 0.5:
            centre = float(np.exp(np.mean(np.log(recipe.ridge_lambdas))))
            changes["ridge_lambdas"] = (float(np.clip(centre * 10 ** rng.normal(0, 0.7), 1e-6, 1e2)),)
        if rng.random() < 0.25:
            changes["target"] = "local" if recipe.target == "global" else "global"
        if rng.random() < 0.25:
            changes["tokens"] = max(2, phase.tokens // int(2 ** rng.integers(3)))
        if rng.random() < 0.5:
            changes["answer_weight"] = float(np.clip(recipe.answer_weight * 2 ** rng.normal(0, 1), *_ANSWER_WEIGHTS))
        if rng.random() < 0.15:
            changes["strength"] = str(rng.choice(["scalar", "ridge", "matched"]))
        if recombinable and rng.random() < 0.5:
            changes["neurons"] = _varied_neurons(rng, recipe.neurons, phase.neurons)
        changes = {name: value for name, value in changes.items() if value != getattr(recipe, name)}
    return replace(recipe, **changes)


def _varied_neurons(
    rng: np.random.Generator, neurons: NeuronRecipe | None, default: NeuronRecipe | None
) -> NeuronRecipe | None:
    """Add `neurons`, drop them if the phase's recipe, `default`, has none, or change one of their settings."""
    if neurons is None:
        return replace(default or NeuronRecipe(), shared=bool(rng.random() < 0.5))
    draw = rng.random()
    if draw < 0.2 and default is None:
        return None
    if draw < 0.4:
        return replace(neurons, shared=not neurons.shared)
    if draw < 0.5:
        return replace(neurons, router="kept" if neurons.router == "fitted" else "fitted")
    if draw < 0.65:
        return replace(neurons, candidates=float(rng.choice([1.0, 2.0, 4.0, 8.0])))
    exponent, which = float(rng.choice([0.0, 0.5, 1.0, 2.0, 3.0])), int(rng.integers(3))
    if which == 0:
        return replace(neurons, routing=exponent)
    return replace(neurons, activation=exponent) if which == 1 else replace(neurons, output=exponent)
