"""The space of NanoMoE genomes: their start, random ones, breeding, and what they cost."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from moevolve.evaluators.errors import UserError
from moevolve.search.genomes.contract.base import Description, Offspring, bred
from moevolve.search.genomes.contract.operators import gaussian_noise, layer_crossover, select_groups
from moevolve.search.genomes.nanomoe.genome import NanoMoeGenome
from moevolve.search.genomes.nanomoe.section import NanoMoeSection
from moevolve.search.settings.phases import PhaseConfig, TunePhase
from moevolve.workers.contract.edits import Calibration
from moevolve.workers.contract.facts import LinearFacts, ModelFacts, active_parameters
from moevolve.workers.contract.fitting import FitRows, RowsRecipe
from moevolve.workers.methods.nanomoe.edit import BlockForm

_HEADER = struct.Struct("<4sBHHH4s")
_MAGIC = b"NMX1"
_VARIANTS = ("I", "II", "III", "low_rank")
_STEP = 0.1
"""Step for which the rank-one parts' unit is chosen: as large in norm as the same step of the diagonals' entries."""


@dataclass(frozen=True)
class NanoMoeSpace:
    """All NanoMoE genomes for one model.

    Attributes:
        form: of every chosen layer.
        layers: the chosen linear layers.
        fit: see `NanoMoeSection`.
        start_seed: of the random start; None for that by singular value decomposition.
        refine: see `NanoMoeSection`.
        tokens: that outputs are measured on; None where layers are fitted to their weights.
        facts: the model, for accounting.
        rows: these tokens; None before calibration.
    """

    kind: ClassVar[str] = "nanomoe"
    form: BlockForm
    layers: tuple[LinearFacts, ...] = field(repr=False)
    fit: int
    start_seed: int | None
    refine: int
    tokens: int | None
    facts: ModelFacts = field(repr=False)
    rows: FitRows | None = field(default=None, repr=False)

    @classmethod
    def of(cls, section: NanoMoeSection, facts: ModelFacts) -> NanoMoeSpace:
        """Build the space of a configuration for a model.

        Raises:
            UserError: no layer matches, K doesn't divide a layer's sizes, or r is above them; the message names the
                field and the layer.
        """
        layers = tuple(each for each in facts.linears if fnmatchcase(each.name, section.layers))
        if not layers:
            known = dict.fromkeys(each.name.split(".", 2)[-1] for each in facts.linears)
            raise UserError(
                f"genome.layers: no linear layer matches {section.layers}; this model ({facts.family}) has in every "
                f"layer {', '.join(known) or 'none'}"
            )
        mixes = section.variant != "low_rank"
        form = BlockForm(section.variant, section.blocks if mixes else 1, section.rank)
        for each in layers:
            for size, what in ((each.inputs, "inputs"), (each.outputs, "outputs")):
                if size % form.blocks:
                    raise UserError(f"genome.blocks: {form.blocks} doesn't divide the {size} {what} of {each.name}")
                if form.rank > size:
                    raise UserError(f"genome.rank: {form.rank} is more than the {size} {what} of {each.name}")
        # Plain low rank is a fixed function of the weight: rounds would only give the same function other names.
        tokens = section.calibration_tokens if section.fit_to == "outputs" else None
        fit, refine = (section.fit, section.refine) if mixes else (0, 0)
        seed = section.start_seed if fit and section.start == "random" else None
        return cls(form, layers, fit, seed, refine, tokens, facts)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of a genome's parameters."""
        return (len(self.layers), *self.form.mixing_shape)

    @cached_property
    def header(self) -> bytes:
        """What a genome's bytes begin with: enough to tell spaces apart."""
        form = self.form
        names = hashlib.sha256("\n".join(each.name for each in self.layers).encode()).digest()
        variant = _VARIANTS.index(form.variant)
        return _HEADER.pack(_MAGIC, variant, form.blocks, form.rank, len(self.layers), names[:4])

    @property
    def phase_kinds(self) -> tuple[str, ...]:
        return ("tune",)

    @property
    def recipe(self) -> RowsRecipe | None:
        return None if self.tokens is None else RowsRecipe(self.tokens)

    def calibrated(self, calibration: Calibration) -> NanoMoeSpace:
        return replace(self, rows=FitRows.of(calibration.arrays))

    def start(self, phase: PhaseConfig) -> Offspring[NanoMoeGenome]:
        """Plain low rank, or what the fit gives."""
        return Offspring(self.unmixed(), "start", ())

    def unmixed(self) -> NanoMoeGenome:
        """Where M is as fitted: without a fit, plain low rank."""
        return NanoMoeGenome(self, self._unmixed)

    def sample(self, rng: np.random.Generator, phase: PhaseConfig) -> Offspring[NanoMoeGenome]:
        """The start with a step of the phase's sigma in every coordinate."""
        assert isinstance(phase, TunePhase)
        if not self._units.size:
            return self.start(phase)
        return Offspring(NanoMoeGenome(self, self._unmixed + self._noise(rng, phase.sigma)), "random", ())

    def breed(
        self, rng: np.random.Generator, phase: PhaseConfig, parents: tuple[NanoMoeGenome, ...]
    ) -> Offspring[NanoMoeGenome]:
        assert isinstance(phase, TunePhase)
        child = parents[0].mixing.copy()
        if len(parents) == 2:
            second = layer_crossover(rng, len(self.layers))
            child[second] = parents[1].mixing[second]
        for layer in select_groups(rng, len(self.layers), phase.group_rate):
            noise = gaussian_noise(rng, np.zeros_like(child[layer]), phase.entry_rate, phase.sigma)
            child[layer] += noise * self._units
        return bred(NanoMoeGenome(self, child), parents)

    def from_bytes(self, data: bytes) -> NanoMoeGenome:
        size = len(self.header)
        if data[:size] != self.header or len(data) != size + 4 * int(np.prod(self.shape)):
            raise ValueError("these bytes are no NanoMoE genome of this space")
        return NanoMoeGenome(self, np.frombuffer(data, dtype="<f4", offset=size).reshape(self.shape))

    def flatten(self, genome: NanoMoeGenome, phase: PhaseConfig) -> NDArray[np.float64]:
        """M's parameters layer by layer, in units in which steps of 0.1 suit all of them."""
        return (genome.mixing.astype(np.float64) / self._units).ravel()

    def unflatten(self, vector: NDArray[np.float64], phase: PhaseConfig) -> NanoMoeGenome:
        return NanoMoeGenome(self, (vector.reshape(self.shape) * self._units).astype(np.float32))

    def describe(self, genome: NanoMoeGenome) -> Description:
        form = self.form
        away = float(np.abs(genome.mixing - self._unmixed).mean()) if genome.mixing.size else 0.0
        blocks = "" if form.variant == "low_rank" else f" K={form.blocks}"
        return Description(
            experts=form.blocks,
            active=form.blocks,
            parameters=self.parameters,
            active_parameters=self.active_parameters,
            parameters_full=self.facts.parameters,
            summary=f"{form.variant}{blocks} r={form.rank} on {len(self.layers)} layers, mean |dM| {away:.3f}",
        )

    @property
    def parameters(self) -> int:
        """Of the model with its factored layers."""
        return self.facts.parameters - self._saved

    @property
    def active_parameters(self) -> int:
        """Of these, what a token passes through."""
        facts = self.facts
        return active_parameters(facts, facts.experts, facts.active) - self._saved

    @cached_property
    def _saved(self) -> int:
        """Parameters that the factors are fewer than the chosen layers' weights."""
        sizes = [(each.outputs, each.inputs) for each in self.layers]
        return sum(outputs * inputs - self.form.parameters(outputs, inputs) for outputs, inputs in sizes)

    @cached_property
    def _unmixed(self) -> NDArray[np.float32]:
        return np.broadcast_to(self.form.unmixed, self.shape)

    @cached_property
    def _units(self) -> NDArray[np.float64]:
        """What one coordinate is worth in each of a layer's parameters: float64 [*form.mixing_shape]."""
        units = np.ones(self.form.mixing_shape)
        if self.form.variant == "III":
            # Steps s of all entries of alpha and beta give a rank-one part of norm s^2 unit^2 r; it is s at s = _STEP.
            units[1:] = (_STEP * self.form.rank) ** -0.5
        return units

    def _noise(self, rng: np.random.Generator, sigma: float) -> NDArray[np.float32]:
        return (rng.standard_normal(self.shape) * sigma * self._units).astype(np.float32)
