"""The settings of NanoMoE searches, a genome (the mixing matrix M of every chosen linear layer), and its space.

Source: NanoMoE, Sec. 3. U and V are not in the genome: a worker derives them from the layer's weight and M. M is stored
relative to the result of the layer's fit (see `NanoMoeSection.fit`); without a fit the genome has M's parameters.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from moevolve.evaluators.errors import UserError
from moevolve.search.genomes.contract.arrays import FLOATS, ArrayGenome, ArraySpace, Shape, inherited
from moevolve.search.genomes.contract.base import (
    MOST_STEPS,
    MOST_TOKENS,
    Description,
    GenomeSection,
    Offspring,
    offspring_of,
)
from moevolve.search.genomes.contract.operators import gaussian_noise, select_groups
from moevolve.search.genomes.contract.phases import PhaseConfig, TunePhase
from moevolve.workers.contract.facts import LinearFacts, ModelFacts, active_parameters
from moevolve.workers.contract.fitting import FitRows, RowsMeasurement
from moevolve.workers.methods.nanomoe.edit import BlockForm, NanoMoeEdit, Variant


class NanoMoeSection(GenomeSection):
    """The NanoMoE genome: chosen linear layers factorised as blockdiag(U) M blockdiag(V), with M searched.

    Attributes:
        variant: Form of the blocks of the mixing matrix M: `I` scalars, `II` diagonals, `III` diagonals plus rank one;
            `low_rank` is plain U V, a baseline without anything to search.
        blocks: Number of blocks K of the inputs and of the outputs, which it must divide; ignored by `low_rank`.
        rank: Rank r: columns of every block of U, rows of every block of V.
        layers: Shell pattern on the names of the linear layers to factorise, such as `layers.0.mlp.up_proj`.
        fit: Rounds of alternating least squares that fit U, V and M to a layer's weight before the search and so give
            its start; with 0 the start is plain low rank, with the identity in all of M's blocks.
        fit_to: Target of the fits: the layers' `weights`, or their `outputs` on calibration rows (SVD-LLM).
        calibration_tokens: Number of calibration tokens for `outputs`.
    """

    random_title: ClassVar[str] = "random mixing"
    parts: ClassVar[str] = "blocks"
    count_format: ClassVar[str] = "{experts} of inputs and of outputs per layer"
    kind: Literal["nanomoe"]
    variant: Variant = "I"
    blocks: int = Field(4, ge=1, le=1024)
    rank: int = Field(ge=1, le=65535)
    layers: str = "*.mlp.*"
    fit: int = Field(0, ge=0, le=MOST_STEPS)
    fit_to: Literal["weights", "outputs"] = "weights"
    calibration_tokens: int = Field(8192, ge=1, le=MOST_TOKENS)


# Step size at which rank-one parts and diagonals change equally in norm; it determines the unit of rank-one parts.
_STEP = 0.1


@dataclass(frozen=True, eq=False, repr=False)
class NanoMoeGenome(ArrayGenome):
    """One NanoMoE candidate: `mixing` are the parameters of M, as in `NanoMoeEdit`, read-only."""

    space: NanoMoeSpace
    mixing: NDArray[np.float32] = field(metadata=FLOATS)

    def express(self) -> NanoMoeEdit:
        return self._edit

    @cached_property
    def _edit(self) -> NanoMoeEdit:
        space = self.space
        names = tuple(each.name for each in space.layers)
        return NanoMoeEdit(space.form, names, self.mixing, space.fit, space.rows)

    @property
    def change(self) -> float:
        """Mean absolute change of M's parameters since the start; 0 if M has none."""
        return float(np.abs(self.mixing - self.space.unmixed).mean()) if self.mixing.size else 0.0


@dataclass(frozen=True)
class NanoMoeSpace(ArraySpace[NanoMoeGenome]):
    """All NanoMoE genomes for one model.

    Attributes:
        form: Form of every chosen layer.
        layers: The chosen linear layers.
        fit: See `NanoMoeSection`.
        tokens: Number of calibration tokens for outputs; None if layers are fitted to their weights.
    """

    kind: ClassVar[str] = "nanomoe"
    genome_type: ClassVar[type[NanoMoeGenome]] = NanoMoeGenome
    form: BlockForm
    layers: tuple[LinearFacts, ...] = field(repr=False)
    fit: int
    tokens: int | None

    @classmethod
    def of(cls, section: NanoMoeSection, facts: ModelFacts) -> NanoMoeSpace:
        """Make the space of a model.

        Raises:
            UserError: No layer matches, K doesn't divide a layer's sizes, or r exceeds them; the message names the
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
        # Plain low rank is a fixed function of the weight, so rounds of fitting would change nothing but its hash.
        tokens = section.calibration_tokens if section.fit_to == "outputs" else None
        return cls(form, layers, section.fit if mixes else 0, tokens, facts=facts)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of a genome's parameters."""
        return (len(self.layers), *self.form.mixing_shape)

    @property
    def shapes(self) -> dict[str, Shape]:
        return {"mixing": self.shape}

    @property
    def identity(self) -> tuple[object, ...]:
        return self.form, [each.name for each in self.layers]

    @property
    def measurement(self) -> RowsMeasurement | None:
        return None if self.tokens is None else RowsMeasurement(self.tokens)

    @cached_property
    def rows(self) -> FitRows | None:
        """Calibration rows that layers' outputs are fitted on; None if layers are fitted to their weights."""
        return None if self.tokens is None else FitRows.of(self.statistics)

    def start(self, phase: PhaseConfig) -> Offspring[NanoMoeGenome]:
        """Return plain low rank, or the result of the fit."""
        return Offspring(NanoMoeGenome(self, self.unmixed), "start", ())

    def sample(self, rng: np.random.Generator, phase: PhaseConfig) -> Offspring[NanoMoeGenome]:
        """Return the start plus Gaussian noise of the phase's sigma in every coordinate."""
        assert isinstance(phase, TunePhase)
        if not self._units.size:
            return self.start(phase)
        noise = (rng.standard_normal(self.shape) * phase.sigma * self._units).astype(np.float32)
        return Offspring(NanoMoeGenome(self, self.unmixed + noise), "random", ())

    def breed(
        self, rng: np.random.Generator, phase: PhaseConfig, parents: tuple[NanoMoeGenome, ...]
    ) -> Offspring[NanoMoeGenome]:
        assert isinstance(phase, TunePhase)
        child = inherited(rng, parents, len(self.layers))["mixing"]
        for layer in select_groups(rng, len(self.layers), phase.group_rate):
            noise = gaussian_noise(rng, np.zeros_like(child[layer]), phase.entry_rate, phase.sigma)
            child[layer] += noise * self._units
        return offspring_of(NanoMoeGenome(self, child), parents)

    def flatten(self, genome: NanoMoeGenome, phase: PhaseConfig) -> NDArray[np.float64]:
        """Return M's parameters layer by layer, in units in which steps of 0.1 suit all of them."""
        return (genome.mixing.astype(np.float64) / self._units).ravel()

    def unflatten(self, vector: NDArray[np.float64], phase: PhaseConfig) -> NanoMoeGenome:
        return NanoMoeGenome(self, (vector.reshape(self.shape) * self._units).astype(np.float32))

    def describe(self, genome: NanoMoeGenome) -> Description:
        form = self.form
        blocks = "" if form.variant == "low_rank" else f" K={form.blocks}"
        return Description(
            experts=form.blocks,
            active=form.blocks,
            parameters=self.parameters,
            active_parameters=self.active_parameters,
            parameters_full=self.facts.parameters,
            active_parameters_full=self.facts.active_parameters,
            summary=f"{form.variant}{blocks} r={form.rank} on {len(self.layers)} layers, mean |dM| {genome.change:.3f}",
        )

    @property
    def parameters(self) -> int:
        """Parameters of the model with its factorised layers."""
        return self.facts.parameters - self._saved

    @property
    def active_parameters(self) -> int:
        """Parameters that a token uses."""
        return active_parameters(self.facts, self.facts.experts, self.facts.active) - self._saved

    @cached_property
    def _saved(self) -> int:
        """Number of parameters that the factorisation saves."""
        sizes = [(each.outputs, each.inputs) for each in self.layers]
        return sum(outputs * inputs - self.form.parameters(outputs, inputs) for outputs, inputs in sizes)

    @cached_property
    def unmixed(self) -> NDArray[np.float32]:
        """M of the fit, or without a fit the identity in all blocks: float32 of `shape`."""
        return np.broadcast_to(self.form.unmixed, self.shape)

    @cached_property
    def _units(self) -> NDArray[np.float64]:
        """Size of one coordinate in each of a layer's parameters: float64 [*form.mixing_shape]."""
        units = np.ones(self.form.mixing_shape)
        if self.form.variant == "III":
            # Steps s of all entries of alpha and beta give a rank-one part of norm s^2 unit^2 r; it is s at s = _STEP.
            units[1:] = (_STEP * self.form.rank) ** -0.5
        return units
