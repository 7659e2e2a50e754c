"""The space of FactorLLM genomes: their start, random ones, breeding, and what they cost."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from moevolve.evaluators.errors import UserError
from moevolve.search.genomes.contract.base import Description, Offspring, bred
from moevolve.search.genomes.contract.operators import balanced_swaps, gaussian_noise, layer_crossover, select_groups
from moevolve.search.genomes.factorllm.genome import ARRAYS, HEADER, MAGIC, ROUTERS, FactorLlmGenome
from moevolve.search.genomes.factorllm.section import FactorLlmSection
from moevolve.search.settings.phases import PhaseConfig, TunePhase
from moevolve.workers.contract.edits import Calibration, CalibrationRecipe, combined
from moevolve.workers.contract.facts import DenseFacts, ModelFacts
from moevolve.workers.methods.factorllm.edit import FactorLlmRecipe

_SPACING = 0.5
"""Distance of two experts in a vector's scores: a step of 0.1 per score lets few neurons change places."""


@dataclass(frozen=True)
class FactorLlmSpace:
    """All FactorLLM genomes for one model.

    Attributes:
        section: the settings.
        facts: the model.
        dense: its dense networks.
        beside: how divisions and routers of baselines are measured; None for no such.
        calibration: the start; None as long as it isn't measured.
    """

    kind: ClassVar[str] = "factorllm"
    section: FactorLlmSection
    facts: ModelFacts = field(repr=False)
    dense: DenseFacts = field(repr=False)
    beside: CalibrationRecipe | None = None
    calibration: Calibration | None = field(default=None, repr=False, compare=False)

    @classmethod
    def of(cls, section: FactorLlmSection, facts: ModelFacts) -> FactorLlmSpace:
        """Build the space of a configuration for a model.

        Raises:
            UserError: the model has no dense networks, or their sizes don't allow the settings; the message names the
                field.
        """
        dense = facts.dense
        if dense is None:
            raise UserError(
                f"genome.kind: factorllm needs dense feed-forward networks of a supported family, not {facts.family}"
            )
        if dense.width % section.experts:
            raise UserError(
                f"genome.experts: {dense.width} neurons can't be divided among {section.experts} experts equally"
            )
        matrices = 3 if dense.gated else 2
        if section.routers not in (1, matrices):
            raise UserError(
                f"genome.routers: {section.routers} is neither 1 nor {matrices}, the linear layers of a network of "
                f"{facts.family}"
            )
        if section.components > dense.hidden:
            raise UserError(f"genome.components: {section.components} is more than the {dense.hidden} inputs")
        return cls(section, facts, dense)

    @property
    def n(self) -> int:
        """Experts N."""
        return self.section.experts

    @property
    def active(self) -> int:
        return self.section.active

    @property
    def routers(self) -> int:
        return self.section.routers

    @property
    def components(self) -> int:
        return self.section.components

    @property
    def output_scale(self) -> float:
        return 1.0 if self.section.output_scale == "one" else self.n / self.active

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of a genome's arrays."""
        rows = (self.dense.layers, self.routers, self.n)
        return {
            "experts": (self.dense.layers, self.dense.width),
            "anchored": (self.dense.layers,),
            "coordinates": (*rows, self.components),
            "biases": rows,
        }

    @cached_property
    def in_order(self) -> NDArray[np.uint8]:
        """Experts of neurons that are divided in order: uint8 [width]."""
        return np.repeat(np.arange(self.n), self.dense.width // self.n).astype(np.uint8)

    @property
    def phase_kinds(self) -> tuple[str, ...]:
        return ("tune",)

    @property
    def recipe(self) -> CalibrationRecipe:
        section = self.section
        own = FactorLlmRecipe(
            experts=self.n,
            active=self.active,
            routers=self.routers,
            partition=section.partition,
            output_scale=self.output_scale,
            router_bias=section.router_bias,
            components=self.components,
            ridge=section.ridge,
            tokens=section.calibration_tokens,
        )
        return combined(own, self.beside) or own

    def calibrated(self, calibration: Calibration) -> FactorLlmSpace:
        return replace(self, calibration=calibration)

    @property
    def measured(self) -> dict[str, NDArray[np.float32]]:
        """The calibration's arrays; see `calibrate_factorllm`."""
        assert self.calibration is not None, "the space has to be calibrated before anything is made in it"
        return dict(self.calibration.arrays)

    def start(self, phase: PhaseConfig) -> Offspring[FactorLlmGenome]:
        """The calibration's division and routers as they are."""
        return Offspring(self.divided(self.measured["experts"], "router"), "start", ())

    def divided(self, experts: NDArray[Any], router: str) -> FactorLlmGenome:
        """A measured division, uint8 [layers, width], with one of the measured `ROUTERS` in all layers."""
        return self.genome(experts=experts, anchored=np.full(self.dense.layers, 1 + ROUTERS.index(router)))

    def sample(self, rng: np.random.Generator, phase: PhaseConfig) -> Offspring[FactorLlmGenome]:
        experts: NDArray[Any] = self.measured["experts"]
        if self.section.random_division:
            experts = np.stack([rng.permutation(self.in_order) for _ in range(self.dense.layers)])
        coordinates = rng.standard_normal(self.shapes["coordinates"])
        return Offspring(self.genome(experts=experts, coordinates=coordinates), "random", ())

    def breed(
        self, rng: np.random.Generator, phase: PhaseConfig, parents: tuple[FactorLlmGenome, ...]
    ) -> Offspring[FactorLlmGenome]:
        assert isinstance(phase, TunePhase)
        arrays = {name: getattr(parents[0], name).copy() for name in ARRAYS}
        if len(parents) == 2:
            other = layer_crossover(rng, self.dense.layers)
            for name, array in arrays.items():
                array[other] = getattr(parents[1], name)[other]
        for layer in select_groups(rng, self.dense.layers, phase.group_rate):
            arrays["experts"][layer] = balanced_swaps(rng, arrays["experts"][layer], phase.swap_rate)
            for name in ("coordinates", "biases") if self.section.router_bias else ("coordinates",):
                arrays[name][layer] = gaussian_noise(rng, arrays[name][layer], phase.entry_rate, phase.sigma)
        return bred(self.genome(**arrays), parents)

    def from_bytes(self, data: bytes) -> FactorLlmGenome:
        magic, *sizes = HEADER.unpack_from(data) if len(data) >= HEADER.size else (b"", 0, 0, 0, 0, 0)
        expected = [self.dense.layers, self.dense.width, self.routers, self.n, self.components]
        counts = {name: int(np.prod(self.shapes[name])) * np.dtype(ARRAYS[name]).itemsize for name in ARRAYS}
        if magic != MAGIC or sizes != expected or len(data) != HEADER.size + sum(counts.values()):
            raise ValueError("these bytes are no FactorLLM genome of this space")
        arrays, offset = {}, HEADER.size
        for name, size in counts.items():
            dtype = np.dtype(ARRAYS[name]).newbyteorder("<")
            arrays[name] = np.frombuffer(data[offset : offset + size], dtype=dtype).reshape(self.shapes[name])
            offset += size
        return self.genome(**arrays)

    def genome(self, **arrays: NDArray[Any]) -> FactorLlmGenome:
        """A genome of `arrays`, cast to their types; those left out are zeros."""
        zeros: dict[str, NDArray[Any]] = {name: np.zeros(shape) for name, shape in self.shapes.items()}
        return FactorLlmGenome(self, **(zeros | arrays))

    def flatten(self, genome: FactorLlmGenome, phase: PhaseConfig) -> NDArray[np.float64]:
        """Scores of neurons [layers * width], then of the calibration's routers [layers], coordinates and biases.

        A neuron's score is its expert's number times a spacing; a router's is its number.
        """
        parts = [genome.experts * _SPACING, genome.anchored, genome.coordinates]
        if self.section.router_bias:
            parts.append(genome.biases)
        return np.concatenate([np.asarray(part, dtype=np.float64).ravel() for part in parts])

    def unflatten(self, vector: NDArray[np.float64], phase: PhaseConfig) -> FactorLlmGenome:
        """Neurons in order of scores (ties: lower index) fill one expert after the other; routers are rounded.

        Numbers that are no measured router's are the start's router's.
        """
        sizes = [int(np.prod(shape)) for shape in self.shapes.values()]
        scores, numbers, coordinates, biases = np.split(vector, np.cumsum(sizes)[:3])
        order = np.argsort(scores.reshape(self.shapes["experts"]), axis=1, kind="stable")
        experts = np.empty_like(order)
        np.put_along_axis(experts, order, np.broadcast_to(self.in_order.astype(order.dtype), order.shape), axis=1)
        anchored = np.rint(np.clip(numbers, 0, len(ROUTERS)))
        return self.genome(
            experts=experts,
            anchored=np.where(np.isin(anchored, self._measured_routers), anchored, 1),
            coordinates=coordinates.reshape(self.shapes["coordinates"]),
            biases=(biases if self.section.router_bias else np.zeros(sizes[3])).reshape(self.shapes["biases"]),
        )

    @property
    def _measured_routers(self) -> tuple[int, ...]:
        """Numbers of the routers that genomes can include, 0 for none."""
        arrays = {} if self.calibration is None else self.calibration.arrays
        return (0, 1, *(number for number, name in enumerate(ROUTERS, 1) if f"{name}_weight" in arrays))

    def describe(self, genome: FactorLlmGenome) -> Description:
        """Costs as in the paper's Fig. 3: K of N experts, and R routers.

        With several routers they are upper bounds: those that disagree leave experts out.
        """
        dense = self.dense
        network = (3 if dense.gated else 2) * dense.hidden * dense.width
        share = self.active / self.n + self.routers * self.n * dense.hidden / network
        started = int((genome.anchored > 0).sum())
        return Description(
            experts=self.n,
            active=self.active,
            parameters=self.parameters,
            active_parameters=self.active_parameters,
            parameters_full=self.facts.parameters,
            summary=f"{self.name}, {share:.1%} of the FFN FLOPs, closed-form routers in {started} of {dense.layers}",
        )

    @property
    def parameters(self) -> int:
        """Of the model with its routers."""
        router = self.routers * self.n * (self.dense.hidden + self.section.router_bias)
        return self.facts.parameters + self.dense.layers * router

    @property
    def active_parameters(self) -> int:
        """Of these, what a token passes through: all but the neurons of the experts not chosen."""
        dense, matrices = self.dense, 3 if self.dense.gated else 2
        neurons = dense.width * (matrices * dense.hidden + (matrices - 1) * dense.bias)
        return self.parameters - dense.layers * neurons * (self.n - self.active) // self.n

    @property
    def name(self) -> str:
        """As the paper names it: `1R4E2K`."""
        return f"{self.routers}R{self.n}E{self.active}K"
