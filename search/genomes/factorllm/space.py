"""The settings of FactorLLM searches, FactorLLM genomes, and the space of these for one model.

Source: FactorLLM (arXiv 2408.11855), Sec. 3.2 and 3.3. The paper trains experts and routers by gradients; here the
experts keep the network's weights, and partition and routers are searched. A router is

    logits(x) = W x + b + C (D x - o) + c

where `W` and `b` are a router measured in the calibration (`ROUTERS`) or zeros, `D` are the scaled principal directions
of the network's inputs, `o` is `D` times the mean input, and the coordinates `C` and biases `c` are in units of a
logit's standard deviation over tokens. Experts are interchangeable: the edit numbers them by their first neurons.

Outputs of the chosen experts are summed, as in the paper. The authors' code multiplies the sum by N / K, rounded down:
on the dense demo model that was worse before repair, by 0.3 to 47 points of similarity of predictions, and no better
after it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from moevolve.evaluators.errors import UserError
from moevolve.search.genomes.contract.arrays import BYTES, FLOATS, ArrayGenome, ArraySpace, inherited
from moevolve.search.genomes.contract.base import (
    MOST_TOKENS,
    Description,
    GenomeSection,
    Offspring,
    offspring_of,
)
from moevolve.search.genomes.contract.operators import balanced_swaps, gaussian_noise, select_groups
from moevolve.search.genomes.contract.phases import PhaseConfig, TunePhase
from moevolve.workers.contract.edits import Measurement, combined
from moevolve.workers.contract.facts import DenseFacts, ModelFacts
from moevolve.workers.methods.factorllm.edit import FactorLlmEdit, FactorLlmMeasurement, Partition


class FactorLlmSection(GenomeSection):
    """The FactorLLM genome: every dense feed-forward network partitioned into equal experts, and linear routers.

    The paper names configurations by their numbers: 1R4E2K has one router, 4 experts and 2 active experts.

    Attributes:
        experts: Number of experts N per network, each with equally many neurons.
        active: Number of active experts K per token.
        routers: Number of routers R per network: 1 (the paper's recommendation), or one for each linear layer (3 in
            gated networks, 2 in plain ones). Each of several routers chooses K slices of its layer; a neuron is active
            if all routers chose its expert. Each starts from labels of its own: the K slices of its layer whose outputs
            are nearest to the whole layer's.
        router_bias: Give routers a bias, as in the paper. Without it a top-1 partition of a Llama or Mistral is an
            ordinary Mixtral and can be exported as one.
        random_division: Give random individuals random partitions. Otherwise they have the start's partition
            and random routers (the paper's Fig. 4 without its router).
        calibration_tokens: Number of calibration tokens that the start is measured on.
    """

    random_title: ClassVar[str] = "random divisions and routers"
    kind: Literal["factorllm"]
    experts: int = Field(ge=2, le=256)
    active: int = Field(ge=1, le=256)
    routers: int = Field(1, ge=1, le=3)
    router_bias: bool = True
    random_division: bool = True
    calibration_tokens: int = Field(8192, ge=1, le=MOST_TOKENS)

    @model_validator(mode="after")
    def _active_within_experts(self) -> Self:
        if self.active > self.experts:
            raise ValueError(f"active {self.active} is more than the {self.experts} experts")
        return self


# Most principal directions in which routers are searched.
_COMPONENTS = 8
# Distance of two experts' scores in a flattened genome; with it, steps of 0.1 per score move few neurons.
_SPACING = 0.5


# Regularisation of the routers' closed-form start, as a share of the inputs' mean variance.
RIDGE = 1e-3
# Names of measured routers: R closed-form ones of the start and of `kmeans`, and one of the other baselines.
ROUTERS = ("start", "kmeans", "moefication", "cmoe")


@dataclass(frozen=True, eq=False, repr=False)
class FactorLlmGenome(ArrayGenome):
    """One FactorLLM candidate. Arrays are read-only.

    Attributes:
        assignment: Expert of every neuron, uint8 [layers, width]; all experts have equally many neurons.
        base_router: Measured router `W`, `b` of every layer, as 1 + index in `ROUTERS`, or 0 for none: uint8 [layers].
        coordinates: Coordinates `C`, float32 [layers, routers, N, components].
        biases: Biases `c`, float32 [layers, routers, N]; zeros in a space without router biases.
    """

    space: FactorLlmSpace
    assignment: NDArray[np.uint8] = field(metadata=BYTES)
    base_router: NDArray[np.uint8] = field(metadata=BYTES)
    coordinates: NDArray[np.float32] = field(metadata=FLOATS)
    biases: NDArray[np.float32] = field(metadata=FLOATS)

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.base_router > len(ROUTERS)).any():
            raise ValueError(f"a genome's routers must be none or one of {', '.join(ROUTERS)}")
        if not (np.sort(self.assignment, axis=1) == self.space.contiguous).all():
            raise ValueError("a genome's experts must have equally many neurons in every layer")

    @cached_property
    def _numbering(self) -> NDArray[np.int64]:
        """Experts of every layer in order of their first neurons: int64 [layers, N]."""
        firsts = np.stack([np.unique(row, return_index=True)[1] for row in self.assignment])
        return np.argsort(firsts, axis=1)

    def express(self) -> FactorLlmEdit:
        """Return the edit; the space must be calibrated."""
        return self._edit

    @cached_property
    def _edit(self) -> FactorLlmEdit:
        start = self.space.statistics
        numbering = self._numbering
        shape = self.space.shapes["biases"]
        weight, bias = np.zeros((*shape, self.space.dense.hidden), np.float32), self.biases.copy()
        for number in np.unique(self.base_router[self.base_router > 0]).tolist():
            layers, name = self.base_router == number, ROUTERS[number - 1]
            # MoEfication and CMoE have one router; in a space with several, all of them are copies of it.
            weight[layers] = start[f"{name}_weight"].reshape(shape[0], -1, *weight.shape[2:])[layers]
            bias[layers] += start[f"{name}_bias"].reshape(shape[0], -1, shape[2])[layers]
        # Not a matrix product: its last digits, and so the hash, depend on the machine.
        for component, steps in enumerate(np.moveaxis(self.coordinates, 3, 0)):
            weight = weight + steps[..., None] * start["directions"][:, None, None, component]
            bias = bias - steps * start["offsets"][:, None, None, component]
        renumbered = np.take_along_axis(np.argsort(numbering, axis=1), self.assignment.astype(np.int64), axis=1)
        return FactorLlmEdit(
            order=np.argsort(renumbered, axis=1, kind="stable").astype(np.int32),
            router_weight=_renumber(weight, numbering),
            router_bias=_renumber(bias, numbering),
            active=self.space.active,
        )


@dataclass(frozen=True)
class FactorLlmSpace(ArraySpace[FactorLlmGenome]):
    """All FactorLLM genomes for one model.

    Attributes:
        dense: Sizes of the model's dense networks.
        baseline_measurement: Measurements of baselines' partitions and routers; None without baselines.
    """

    kind: ClassVar[str] = "factorllm"
    genome_type: ClassVar[type[FactorLlmGenome]] = FactorLlmGenome
    section: FactorLlmSection
    dense: DenseFacts = field(repr=False)
    baseline_measurement: Measurement | None = None

    @classmethod
    def of(cls, section: FactorLlmSection, facts: ModelFacts) -> FactorLlmSpace:
        """Make the space of a model.

        Raises:
            UserError: The model has no dense networks, or their sizes don't fit the settings; the message names the
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
        if section.routers not in (1, dense.matrices):
            raise UserError(
                f"genome.routers: {section.routers} is neither 1 nor {dense.matrices}, the linear layers of a network "
                f"of {facts.family}"
            )
        return cls(section, dense, facts=facts)

    @property
    def experts(self) -> int:
        return self.section.experts

    @property
    def active(self) -> int:
        return self.section.active

    @property
    def routers(self) -> int:
        return self.section.routers

    @property
    def components(self) -> int:
        """Number of principal directions of a network's inputs in which routers are searched."""
        return min(_COMPONENTS, self.dense.hidden)

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of a genome's arrays."""
        rows = (self.dense.layers, self.routers, self.experts)
        return {
            "assignment": (self.dense.layers, self.dense.width),
            "base_router": (self.dense.layers,),
            "coordinates": (*rows, self.components),
            "biases": rows,
        }

    @cached_property
    def contiguous(self) -> NDArray[np.uint8]:
        """Partition of the neurons in order: expert of every neuron, uint8 [width]."""
        return np.repeat(np.arange(self.experts), self.dense.width // self.experts).astype(np.uint8)

    @property
    def measurement(self) -> Measurement:
        own = self.measurement_of("start")
        return combined(own, self.baseline_measurement) or own

    def measurement_of(self, partition: Partition) -> FactorLlmMeasurement:
        """Return the measurement of a partition and its closed-form routers."""
        section = self.section
        return FactorLlmMeasurement(
            experts=self.experts,
            active=self.active,
            routers=self.routers,
            partition=partition,
            router_bias=section.router_bias,
            components=self.components,
            ridge=RIDGE,
            tokens=section.calibration_tokens,
        )

    def start(self, phase: PhaseConfig) -> Offspring[FactorLlmGenome]:
        """Return the measured partition and routers unchanged."""
        return self.measured("start")

    def measured(self, name: str, note: str = "") -> Offspring[FactorLlmGenome]:
        """Return the measured partition of one of `ROUTERS`, with that router in all layers."""
        numbers = np.full(self.dense.layers, 1 + ROUTERS.index(name))
        genome = self.genome(assignment=self.statistics[f"{name}_experts"], base_router=numbers)
        return Offspring(genome, name, (), note)

    def sample(self, rng: np.random.Generator, phase: PhaseConfig) -> Offspring[FactorLlmGenome]:
        assignment: NDArray[np.integer] = self.statistics["start_experts"]
        if self.section.random_division:
            assignment = np.stack([rng.permutation(self.contiguous) for _ in range(self.dense.layers)])
        coordinates = rng.standard_normal(self.shapes["coordinates"])
        return Offspring(self.genome(assignment=assignment, coordinates=coordinates), "random", ())

    def breed(
        self, rng: np.random.Generator, phase: PhaseConfig, parents: tuple[FactorLlmGenome, ...]
    ) -> Offspring[FactorLlmGenome]:
        assert isinstance(phase, TunePhase)
        arrays = inherited(rng, parents, self.dense.layers)
        for layer in select_groups(rng, self.dense.layers, phase.group_rate):
            arrays["assignment"][layer] = balanced_swaps(rng, arrays["assignment"][layer], phase.swap_rate)
            for name in ("coordinates", "biases") if self.section.router_bias else ("coordinates",):
                arrays[name][layer] = gaussian_noise(rng, arrays[name][layer], phase.entry_rate, phase.sigma)
        return offspring_of(self.genome(**arrays), parents)

    def flatten(self, genome: FactorLlmGenome, phase: PhaseConfig) -> NDArray[np.float64]:
        """Return scores of neurons [layers * width] and of base routers [layers], then coordinates and biases.

        A neuron's score is its expert's index times a spacing; a base router's score is its number.
        """
        parts = [genome.assignment * _SPACING, genome.base_router, genome.coordinates]
        if self.section.router_bias:
            parts.append(genome.biases)
        return np.concatenate([np.asarray(part, dtype=np.float64).ravel() for part in parts])

    def unflatten(self, vector: NDArray[np.float64], phase: PhaseConfig) -> FactorLlmGenome:
        """Invert `flatten`: neurons in order of scores (ties: lower index) fill one expert after the other.

        Base routers are rounded; numbers without a measured router stand for the start's.
        """
        sizes = [int(np.prod(shape)) for shape in self.shapes.values()]
        scores, numbers, coordinates, biases = np.split(vector, np.cumsum(sizes)[:3])
        order = np.argsort(scores.reshape(self.shapes["assignment"]), axis=1, kind="stable")
        assignment = np.empty_like(order)
        np.put_along_axis(assignment, order, np.broadcast_to(self.contiguous.astype(order.dtype), order.shape), axis=1)
        base_router = np.rint(np.clip(numbers, 0, len(ROUTERS)))
        arrays = {} if self.calibration is None else self.calibration.arrays
        measured = [0, 1, *(number for number, name in enumerate(ROUTERS, 1) if f"{name}_weight" in arrays)]
        return self.genome(
            assignment=assignment,
            base_router=np.where(np.isin(base_router, measured), base_router, 1),
            coordinates=coordinates.reshape(self.shapes["coordinates"]),
            biases=(biases if self.section.router_bias else np.zeros(sizes[3])).reshape(self.shapes["biases"]),
        )

    def describe(self, genome: FactorLlmGenome) -> Description:
        """Return costs as in the paper's Fig. 3: K of N experts, and R routers.

        With several routers they are upper bounds, since tokens use fewer experts where routers disagree.
        """
        dense = self.dense
        network = dense.matrices * dense.hidden * dense.width
        share = self.active / self.experts + self.routers * self.experts * dense.hidden / network
        started = int((genome.base_router > 0).sum())
        return Description(
            experts=self.experts,
            active=self.active,
            parameters=self.parameters,
            active_parameters=self.active_parameters,
            parameters_full=self.facts.parameters,
            active_parameters_full=self.facts.active_parameters,
            summary=f"{self.name}, {share:.1%} of the FFN FLOPs, closed-form routers in {started} of {dense.layers}",
        )

    @property
    def parameters(self) -> int:
        """Parameters of the model with its routers."""
        router = self.routers * self.experts * (self.dense.hidden + self.section.router_bias)
        return self.facts.parameters + self.dense.layers * router

    @property
    def active_parameters(self) -> int:
        """Parameters that a token uses: all but the neurons of the experts that aren't chosen."""
        neurons = self.dense.layers * self.dense.width * self.dense.neuron_parameters
        return self.parameters - neurons * (self.experts - self.active) // self.experts

    @property
    def name(self) -> str:
        """Name of the configuration in the paper's form, `1R4E2K`."""
        return f"{self.routers}R{self.experts}E{self.active}K"


def _renumber(array: NDArray[np.float32], numbering: NDArray[np.int64]) -> NDArray[np.float32]:
    """Reorder the experts of an array [layers, routers, N, ...] by `numbering` [layers, N]."""
    index = numbering[:, None].reshape(len(numbering), 1, -1, *[1] * (array.ndim - 3))
    return np.take_along_axis(array, index, axis=2)
