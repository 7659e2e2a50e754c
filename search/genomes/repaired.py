"""Genomes of any kind combined with a repair, and their space.

A repaired genome consists of a base, which is a genome of another kind, and settings of a repair
(`moevolve.workers.methods.repair`). In a phase with `repair`, bases are bred and all get the phase's settings; a repair
phase keeps the base and varies the settings.
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
from moevolve.workers.contract.edits import Calibration, Edit, IdentityEdit, LayeredEdit, Measurement, combined
from moevolve.workers.contract.fitting import FitRows, NeuronSettings, RowsMeasurement
from moevolve.workers.methods.repair.edit import RepairedEdit, RepairSettings

# First bytes of repaired genomes; those of others are a hash, which can't be as long and the same.
_MAGIC = b"repaired "
# Bounds of the weights that are searched.
_ANSWER_WEIGHTS = (0.25, 64.0)


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
    def measurement(self) -> Measurement | None:
        return combined(self.inner.measurement, RowsMeasurement(self.tokens))

    def calibrated(self, calibration: Calibration) -> RepairedSpace:
        inner = self.inner if self.inner.measurement is None else self.inner.calibrated(calibration)
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
        # The base is the first parent's, the settings to vary the last parent's.
        donor = parents[-1]
        settings = donor.settings if isinstance(donor, RepairedGenome) else phase.repair
        varied = vary_repair(rng, self._limit_tokens(settings), self._limit_tokens(phase.repair), self.recombinable)
        return Offspring(self.repaired(parents[0], varied), "repair", tuple(range(len(parents))))

    def repair_offspring(self, offspring: Offspring[Any], phase: PhaseConfig) -> Offspring[Any]:
        """Return the offspring, repaired by the phase's settings if it has them."""
        settings = phase.repair
        return offspring if settings is None else replace(offspring, genome=self.repaired(offspring.genome, settings))

    def repaired(self, genome: Genome, settings: RepairSettings) -> RepairedGenome:
        """Return a genome repaired by settings, which replace those of a genome that is repaired already."""
        return RepairedGenome(self, base_genome(genome), settings)

    def _limit_tokens(self, settings: RepairSettings) -> RepairSettings:
        # With more tokens than there are, settings with different numbers would fit the same tokens.
        assert self.rows is not None, "the space isn't calibrated"
        return replace(settings, tokens=max(2, min(settings.tokens, len(self.rows.tokens))))

    def from_bytes(self, data: bytes) -> Genome:
        if not data.startswith(_MAGIC):
            genome: Genome = self.inner.from_bytes(data)
            return genome
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


def base_space(space: GenomeSpace[Any]) -> GenomeSpace[Any]:
    """Return the space of the bases; other spaces are returned unchanged."""
    return space.inner if isinstance(space, RepairedSpace) else space


def repaired_space(inner: GenomeSpace[Any], phases: Sequence[PhaseConfig], recombinable: bool) -> GenomeSpace[Any]:
    """Return the space of a search with these phases: `inner` itself if they have no repairs."""
    tokens = [phase.repair.tokens for phase in phases if phase.repair is not None]
    return RepairedSpace(inner, max(tokens), recombinable) if tokens else inner


def repair_summary(settings: RepairSettings) -> str:
    """Describe settings in a few words for listings; `repair_rows` has all of it."""
    filled = "" if settings.neurons is None else ", neurons of all experts"
    rounds = f", {settings.input_rounds} rounds of inputs" if settings.input_rounds else ""
    return f"repaired, {settings.target}, {_strength(settings)}, lambda {_lambdas(settings)}{filled}{rounds}"


def repair_rows(settings: RepairSettings) -> tuple[tuple[str, str], ...]:
    """Return labels and values of all settings, but the memory it may take."""
    rows = [
        ("repair", _strength(settings)),
        ("repair target", f"{settings.target} ({_TARGETS[settings.target]})"),
        ("ridge lambda", _lambdas(settings)),
        ("fitted on", f"{settings.tokens:,} tokens"),
        ("weight of answers' tokens", f"{settings.answer_weight:.2g}"),
        ("rounds of gate and up projections", str(settings.input_rounds)),
    ]
    neurons = settings.neurons
    if neurons is None:
        return (*rows, ("neurons", "each expert's own"))
    return (
        *rows,
        ("neurons", f"of all experts, each in {'any number of experts' if neurons.shared else 'one expert'}"),
        ("exponent of neurons' routing weights", f"{neurons.routing:.2g}"),
        ("exponent of neurons' activations", f"{neurons.activation:.2g}"),
        ("exponent of neurons' output weights", f"{neurons.output:.2g}"),
        ("neurons on the shortlist", f"{neurons.candidates:.2g} times those kept"),
        ("router rows", neurons.router),
    )


_TARGETS = {"global": "the unedited model's residual stream", "local": "the unedited layer's output"}


def _strength(settings: RepairSettings) -> str:
    return f"gated, up to {settings.strength}" if settings.gate else settings.strength


def _lambdas(settings: RepairSettings) -> str:
    low, high = min(settings.ridge_lambdas), max(settings.ridge_lambdas)
    return f"{low:.2g}" if low == high else f"{low:.2g} to {high:.2g}"


def vary_repair(
    rng: np.random.Generator, settings: RepairSettings, phase: RepairSettings, recombinable: bool
) -> RepairSettings:
    """Return settings that differ from `settings` in at least one value.

    Args:
        rng: The individual's generator.
        settings: The parent's settings.
        phase: The phase's settings, which limit `tokens` and give the exponents of `neurons` that are added. If they
            have `neurons`, those aren't dropped.
        recombinable: True if the settings may have `neurons`.
    """
    changes: dict[str, Any] = {}
    # About two settings change per child, numbers more often than choices among two or three.
    while not changes:
        if rng.random() < 0.5:
            centre = float(np.exp(np.mean(np.log(settings.ridge_lambdas))))
            changes["ridge_lambdas"] = (float(np.clip(centre * 10 ** rng.normal(0, 0.7), 1e-6, 1e2)),)
        if rng.random() < 0.25:
            changes["target"] = "local" if settings.target == "global" else "global"
        if rng.random() < 0.25:
            changes["tokens"] = max(2, phase.tokens // int(2 ** rng.integers(3)))
        if rng.random() < 0.5:
            changes["answer_weight"] = float(np.clip(settings.answer_weight * 2 ** rng.normal(0, 1), *_ANSWER_WEIGHTS))
        if rng.random() < 0.15:
            changes["strength"] = str(rng.choice(["scalar", "ridge", "matched"]))
        if recombinable and rng.random() < 0.5:
            changes["neurons"] = _varied_neurons(rng, settings.neurons, phase.neurons)
        changes = {name: value for name, value in changes.items() if value != getattr(settings, name)}
    return replace(settings, **changes)


def _varied_neurons(
    rng: np.random.Generator, neurons: NeuronSettings | None, default: NeuronSettings | None
) -> NeuronSettings | None:
    """Add `neurons`, drop them if the phase's settings, `default`, have none, or change one of their settings."""
    if neurons is None:
        return replace(default or NeuronSettings(), shared=bool(rng.random() < 0.5))
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
