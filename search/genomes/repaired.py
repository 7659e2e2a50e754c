"""Genomes of any kind combined with a repair, and their space.

A repaired genome consists of a base, which is a genome of another kind, and settings of a repair
(`moevolve.workers.methods.repair`). In a phase with `repair`, bases are bred and all get the phase's settings; a repair
phase gives its settings to bases of earlier phases.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from moevolve.search.genomes.contract.base import Child, Description, Genome, GenomeSpace
from moevolve.search.genomes.contract.phases import PhaseConfig
from moevolve.workers.contract.edits import Calibration, Edit, IdentityEdit, LayeredEdit, Measurement, combined
from moevolve.workers.contract.fitting import FitRows, RowsMeasurement
from moevolve.workers.methods.repair.edit import RepairedEdit, RepairSettings

# First bytes of repaired genomes; those of others are a hash, which can't be as long and the same.
_MAGIC = b"repaired "


@dataclass(frozen=True)
class RepairedGenome(Genome):
    """One repaired candidate: `settings` repair the edit of `base`."""

    space: RepairedSpace = field(repr=False, compare=False)
    base: Genome
    settings: RepairSettings

    def to_bytes(self) -> bytes:
        """Return a magic word, the settings as one line of JSON, and the base's bytes."""
        return _MAGIC + self.settings.text.encode() + b"\n" + self.base.to_bytes()

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
        return RepairedEdit(edit, self.settings, rows)


@dataclass(frozen=True)
class RepairedSpace(GenomeSpace[Genome]):
    """All genomes of a search with repairs: bases and repaired bases.

    Attributes:
        inner: Space of the bases.
        tokens: Largest number of calibration tokens that a repair of the search is fitted on.
        continuations: How often the unedited model continues each calibration row where rows have fewer tokens.
        rows: Calibration rows that repairs are fitted on; None before calibration.
    """

    inner: GenomeSpace[Genome]
    tokens: int
    continuations: int = 0
    rows: FitRows | None = field(default=None, repr=False, compare=False)

    @property
    def kind(self) -> str:
        return self.inner.kind

    @property
    def measurement(self) -> Measurement | None:
        return combined(self.inner.measurement, RowsMeasurement(self.tokens, continuations=self.continuations))

    def calibrated(self, calibration: Calibration) -> RepairedSpace:
        inner = self.inner if self.inner.measurement is None else self.inner.calibrated(calibration)
        return replace(self, inner=inner, rows=FitRows.of(calibration.arrays))

    def selects_subset(self, phase: PhaseConfig) -> bool:
        return self.inner.selects_subset(phase)

    def importance(self, phase: PhaseConfig) -> NDArray[np.float64]:
        return self.inner.importance(phase)

    def start(self, phase: PhaseConfig) -> Child | None:
        start = self.inner.start(phase)
        return None if start is None else self.repair_offspring(start, phase)

    def sample(self, rng: np.random.Generator, phase: PhaseConfig) -> Child:
        return self.repair_offspring(self.inner.sample(rng, phase), phase)

    def breed(self, rng: np.random.Generator, phase: PhaseConfig, parents: tuple[Genome, ...]) -> Child:
        return self.repair_offspring(self.inner.breed(rng, phase, tuple(map(base_genome, parents))), phase)

    def repair_offspring(self, offspring: Child, phase: PhaseConfig) -> Child:
        """Return the offspring, repaired by the phase's settings if it has them."""
        settings = phase.repair
        return offspring if settings is None else replace(offspring, genome=self.repaired(offspring.genome, settings))

    def repaired(self, genome: Genome, settings: RepairSettings) -> RepairedGenome:
        """Return a genome repaired by settings, which replace those of a genome that is repaired already."""
        return RepairedGenome(self, base_genome(genome), settings)

    def from_bytes(self, data: bytes) -> Genome:
        if not data.startswith(_MAGIC):
            return self.inner.from_bytes(data)
        text, _, rest = data.removeprefix(_MAGIC).partition(b"\n")
        try:
            settings = RepairSettings.from_text(text.decode())
        except ValueError as error:
            raise ValueError(f"these bytes are no repaired genome: {error}") from None
        return RepairedGenome(self, self.inner.from_bytes(rest), settings)

    def flatten(self, genome: Genome, phase: PhaseConfig) -> NDArray[np.float64]:
        return self.inner.flatten(base_genome(genome), phase)

    def unflatten(self, vector: NDArray[np.float64], phase: PhaseConfig) -> Genome:
        genome: Genome = self.inner.unflatten(vector, phase)
        return genome if phase.repair is None else self.repaired(genome, phase.repair)

    def describe(self, genome: Genome) -> Description:
        description = self.inner.describe(base_genome(genome))
        if not isinstance(genome, RepairedGenome):
            return description
        return replace(description, summary=f"{description.summary}, {repair_summary(genome.settings)}")


def base_genome(genome: Genome) -> Genome:
    """Return a repaired genome's base; other genomes are returned unchanged."""
    return genome.base if isinstance(genome, RepairedGenome) else genome


def base_space(space: GenomeSpace[Genome]) -> GenomeSpace[Genome]:
    """Return the space of the bases; other spaces are returned unchanged."""
    return space.inner if isinstance(space, RepairedSpace) else space


def repaired_space(inner: GenomeSpace[Genome], phases: Sequence[PhaseConfig]) -> GenomeSpace[Genome]:
    """Return the space of a search with these phases: `inner` itself if they have no repairs."""
    repairs = [phase.repair for phase in phases if phase.repair is not None]
    if not repairs:
        return inner
    return RepairedSpace(inner, max(each.tokens for each in repairs), repairs[0].continuations)


def repair_summary(settings: RepairSettings) -> str:
    """Describe settings in a few words for listings; `repair_rows` has all of it."""
    filled = ", neurons of all experts" if settings.neurons else ""
    rounds = f", {settings.input_rounds} rounds of inputs" if settings.input_rounds else ""
    return f"repaired, lambda {_lambdas(settings)}{filled}{rounds}"


def repair_rows(settings: RepairSettings) -> tuple[tuple[str, str], ...]:
    """Return labels and values of all settings, but the memory it may take."""
    return (
        ("ridge lambda", _lambdas(settings)),
        ("fitted on", f"{settings.tokens:,} tokens"),
        ("continuations of a row, where rows have fewer", str(settings.continuations)),
        ("weight of answers' tokens", f"{settings.answer_weight:.2g}"),
        ("rounds of gate and up projections", str(settings.input_rounds)),
        ("neurons", "of all experts, each in one expert" if settings.neurons else "each expert's own"),
    )


def _lambdas(settings: RepairSettings) -> str:
    low, high = min(settings.ridge_lambdas), max(settings.ridge_lambdas)
    return f"{low:.2g}" if low == high else f"{low:.2g} to {high:.2g}"
