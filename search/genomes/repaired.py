"""Genomes of any kind that are repaired once they are expressed, and the space of those that a search may bring forth.

A repaired genome is another kind's, the base, and a recipe (`moevolve.workers.methods.repair`). In a phase whose
candidates are all repaired, the base is bred and the recipe is the phase's; a repair phase leaves the base and varies
the recipe.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moevolve.search.genomes.contract.base import Choosing, Description, Genome, GenomeSpace, Offspring
from moevolve.search.settings.phases import PhaseConfig, RepairPhase
from moevolve.workers.contract.edits import Calibration, CalibrationRecipe, Edit, IdentityEdit, LayeredEdit, combined
from moevolve.workers.contract.fitting import FitRows, NeuronRecipe, RowsRecipe
from moevolve.workers.methods.repair.edit import RepairedEdit, RepairRecipe

_HEADER = struct.Struct("<4sI")
_MAGIC = b"RPR1"


@dataclass(frozen=True)
class RepairedGenome:
    """One candidate, repaired.

    Attributes:
        space: the space it belongs to.
        base: what is repaired.
        recipe: how.
    """

    space: RepairedSpace = field(repr=False, compare=False)
    base: Genome
    recipe: RepairRecipe

    def to_bytes(self) -> bytes:
        """Magic, length of the recipe (uint32), the recipe as JSON, and the base's bytes."""
        recipe = self.recipe.text.encode()
        return _HEADER.pack(_MAGIC, len(recipe)) + recipe + self.base.to_bytes()

    @cached_property
    def content_hash(self) -> str:
        """The base's own where there is nothing to repair, whatever the recipe."""
        if isinstance(self._edit, IdentityEdit):
            return self.base.content_hash
        return hashlib.sha256(_MAGIC + self.recipe.text.encode() + self.base.content_hash.encode()).hexdigest()

    def express(self) -> Edit:
        """The base's edit, repaired; a base that changes nothing has nothing to repair."""
        return self._edit

    @cached_property
    def _edit(self) -> Edit:
        edit, rows = self.base.express(), self.space.rows
        if isinstance(edit, IdentityEdit):
            return edit
        assert isinstance(edit, LayeredEdit), f"edits of kind {type(edit).__name__} can't be repaired"
        assert rows is not None, "the space has to be calibrated before this is known"
        return RepairedEdit(edit, self.recipe, rows)


@dataclass(frozen=True)
class RepairedSpace:
    """The genomes of a search that repairs some.

    Attributes:
        inner: where the bases come from.
        tokens: most that any of the search's repairs takes.
        recombinable: see `GenomeKind`.
        rows: what is fitted; None before calibration.
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

    def chooses(self, phase: PhaseConfig) -> bool:
        """See `Choosing`."""
        return isinstance(self.inner, Choosing) and self.inner.chooses(phase)

    def start(self, phase: PhaseConfig) -> Offspring[Any] | None:
        start = self.inner.start(phase)
        return None if start is None else self.made(start, phase)

    def sample(self, rng: np.random.Generator, phase: PhaseConfig) -> Offspring[Any]:
        return self.made(self.inner.sample(rng, phase), phase)

    def breed(self, rng: np.random.Generator, phase: PhaseConfig, parents: tuple[Genome, ...]) -> Offspring[Any]:
        if isinstance(phase, RepairPhase):
            return self._varied(rng, phase, parents)
        return self.made(self.inner.breed(rng, phase, tuple(map(bare, parents))), phase)

    def made(self, offspring: Offspring[Any], phase: PhaseConfig) -> Offspring[Any]:
        """What was made of bases, repaired if the phase's candidates are."""
        recipe = phase.repair
        return offspring if recipe is None else replace(offspring, genome=self.repaired(offspring.genome, recipe))

    def repaired(self, genome: Genome, recipe: RepairRecipe) -> RepairedGenome:
        """A genome, or the base of a repaired one, repaired as a recipe says."""
        return RepairedGenome(self, bare(genome), recipe)

    def _varied(self, rng: np.random.Generator, phase: RepairPhase, parents: tuple[Genome, ...]) -> Offspring[Any]:
        """The first parent's base; its recipe, or where there are two the second's, with something else in it."""
        donor = parents[-1]
        recipe = donor.recipe if isinstance(donor, RepairedGenome) else phase.repair
        varied = vary(rng, self._within(recipe), self._within(phase.repair), self.recombinable)
        return Offspring(self.repaired(parents[0], varied), "repair", tuple(range(len(parents))))

    def _within(self, recipe: RepairRecipe) -> RepairRecipe:
        """The same with no more tokens than there are: else it would be varied to others that fit the same ones."""
        assert self.rows is not None, "the space has to be calibrated before this is known"
        return replace(recipe, tokens=max(2, min(recipe.tokens, len(self.rows.tokens))))

    def from_bytes(self, data: bytes) -> Genome:
        if not data.startswith(_MAGIC):
            genome: Genome = self.inner.from_bytes(data)
            return genome
        length = _HEADER.unpack_from(data)[1] if len(data) >= _HEADER.size else 0
        text, rest = data[_HEADER.size : _HEADER.size + length], data[_HEADER.size + length :]
        try:
            recipe = RepairRecipe.from_text(text.decode())
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"these bytes are no repaired genome: {error}") from None
        return RepairedGenome(self, self.inner.from_bytes(rest), recipe)

    def flatten(self, genome: Genome, phase: PhaseConfig) -> NDArray[np.float64]:
        return self.inner.flatten(bare(genome), phase)

    def unflatten(self, vector: NDArray[np.float64], phase: PhaseConfig) -> Genome:
        genome: Genome = self.inner.unflatten(vector, phase)
        return genome if phase.repair is None else self.repaired(genome, phase.repair)

    def describe(self, genome: Genome) -> Description:
        description = self.inner.describe(bare(genome))
        if not isinstance(genome, RepairedGenome):
            return description
        return replace(description, summary=f"{description.summary}, {described(genome.recipe)}")


def bare(genome: Genome) -> Genome:
    """The base of a repaired genome; any other as it is."""
    return genome.base if isinstance(genome, RepairedGenome) else genome


def bare_space(space: GenomeSpace[Any]) -> GenomeSpace[Any]:
    """Where bases come from."""
    return space.inner if isinstance(space, RepairedSpace) else space


def repaired_space(inner: GenomeSpace[Any], phases: Sequence[PhaseConfig], recombinable: bool) -> GenomeSpace[Any]:
    """The space of a search with these phases; `inner` if they repair nothing. `recombinable`: see `GenomeKind`."""
    tokens = [phase.repair.tokens for phase in phases if phase.repair is not None]
    return RepairedSpace(inner, max(tokens), recombinable) if tokens else inner


def described(recipe: RepairRecipe) -> str:
    """A recipe for listings."""
    low, high = min(recipe.ridge_lambdas), max(recipe.ridge_lambdas)
    lambdas = f"{low:.2g}" if low == high else f"{low:.2g} to {high:.2g}"
    parts = ["repaired", recipe.target, f"ridge lambda {lambdas}", f"{recipe.tokens} tokens"]
    if recipe.neurons is not None:
        each = recipe.neurons
        shares = "shared" if each.shared else "apart"
        worth = f"{each.routing:.2g}/{each.activation:.2g}/{each.output:.2g}"
        parts.append(f"neurons {shares} by {worth} of {each.candidates:.2g} times as many")
        parts.append(f"router {each.router}")
        if each.width_slope:
            parts.append(f"widths by {each.width_slope:+.2g}")
    return ", ".join(parts)


def vary(rng: np.random.Generator, recipe: RepairRecipe, phase: RepairRecipe, recombinable: bool) -> RepairRecipe:
    """A recipe with one or more other values.

    Args:
        rng: the individual's generator.
        recipe: what it is made from.
        phase: the phase's own: `tokens` are at most its, and `neurons` have its exponents where they are put back.
        recombinable: whether there may be `neurons`.
    """
    changes: dict[str, Any] = {}
    while not changes:
        if rng.random() < 0.5:
            middle = float(np.exp(np.mean(np.log(recipe.ridge_lambdas))))
            changes["ridge_lambdas"] = (float(np.clip(middle * 10 ** rng.normal(0, 0.7), 1e-6, 1e2)),)
        if rng.random() < 0.25:
            changes["target"] = "local" if recipe.target == "global" else "global"
        if rng.random() < 0.25:
            changes["tokens"] = max(2, phase.tokens // int(2 ** rng.integers(3)))
        if recombinable and rng.random() < 0.5:
            changes["neurons"] = _varied_neurons(rng, recipe.neurons, phase.neurons or NeuronRecipe())
        changes = {name: value for name, value in changes.items() if value != getattr(recipe, name)}
    return replace(recipe, **changes)


def _varied_neurons(rng: np.random.Generator, neurons: NeuronRecipe | None, first: NeuronRecipe) -> NeuronRecipe | None:
    """Put aside, put back, or with another exponent, sharing, number of candidates, or other rows of the router.

    Widths are varied only where the phase has a width_slope: uneven ones take the native form.
    """
    if neurons is None:
        return replace(first, shared=bool(rng.random() < 0.5))
    draw = rng.random()
    if draw < 0.2:
        return None
    if draw < 0.4:
        return replace(neurons, shared=not neurons.shared)
    if draw < 0.5:
        return replace(neurons, router="kept" if neurons.router == "fitted" else "fitted")
    if draw < 0.65:
        return replace(neurons, candidates=float(rng.choice([1.0, 2.0, 4.0, 8.0])))
    if draw < 0.8 and first.width_slope:
        return replace(neurons, width_slope=float(rng.choice([-0.25, 0.0, 0.25, 0.5, 0.75])))
    exponent, which = float(rng.choice([0.0, 0.5, 1.0, 2.0, 3.0])), int(rng.integers(3))
    if which == 0:
        return replace(neurons, routing=exponent)
    return replace(neurons, activation=exponent) if which == 1 else replace(neurons, output=exponent)
