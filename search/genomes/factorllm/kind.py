"""The genome kind `factorllm`: its baselines, what its candidates cost, and what listings say of them.

Baselines partition a dense network without training, as FactorLLM genomes; all are measured on a worker. `kmeans` is
FactorLLM's start with MoEfication's partition, and the others are other methods.
`moevolve.workers.methods.factorllm.calibrate_baselines` says what they lack of the papers.

KnowledgeFactor (Yang et al., ECCV 2022), the other baseline of FactorLLM's Table 1, has no counterpart: it trains one
network for what tasks share and one per task, and doesn't partition the network's neurons. The nearest method without
training is CMoE, whose shared experts are active for all tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from moevolve.search.genomes.contract.base import Offspring
from moevolve.search.genomes.contract.costs import FitOutline, GenomeCosts, down_projection_bytes
from moevolve.search.genomes.contract.kind import Baseline, GenomeFigures, GenomeKind
from moevolve.search.genomes.contract.outline import GenomeOutline
from moevolve.search.genomes.contract.phases import PhaseConfig
from moevolve.search.genomes.factorllm.space import RIDGE, FactorLlmGenome, FactorLlmSection, FactorLlmSpace
from moevolve.workers.contract.edits import ROW_TOKENS, Measurement, combined, measurement_parts
from moevolve.workers.contract.facts import ModelFacts
from moevolve.workers.methods.factorllm.edit import CmoeMeasurement, MoeficationMeasurement

# Number of neurons that count as activated by a token, CMoE's `K_a`.
_FIRING = 10


def kmeans(space: FactorLlmSpace) -> Offspring[FactorLlmGenome]:
    """Cluster neurons by input weights like MoEfication, and fit routers like FactorLLM's start."""
    return space.measured("kmeans")


def moefication(space: FactorLlmSpace) -> Offspring[FactorLlmGenome]:
    """Cluster neurons by input weights, choose experts by cosine with their mean: MoEfication (arXiv 2110.01786)."""
    return space.measured("moefication")


def cmoe(space: FactorLlmSpace) -> Offspring[FactorLlmGenome]:
    """Make half of the active experts shared, and route to the others: CMoE (arXiv 2502.04416)."""
    return space.measured("cmoe", f"cmoe, {space.active // 2} of the experts are shared")


@dataclass(frozen=True, slots=True)
class FactorLlmBaseline(Baseline):
    """A measured partition with measured routers.

    Attributes:
        measurement: Function that returns the measurement for a space.
        shared_experts: True if some experts are shared, which needs a router bias and at least two active experts.
    """

    measurement: Callable[[FactorLlmSpace], Measurement]
    shared_experts: bool = False

    def problem(self, space: FactorLlmSpace) -> str | None:
        if not self.shared_experts or (space.section.router_bias and 1 < space.active < space.experts):
            return None
        return "has shared experts, which needs genome.router_bias and 2 active experts at least, but not all of them"


BASELINES = {
    "kmeans": FactorLlmBaseline(kmeans, lambda space: space.measurement_of("kmeans")),
    "moefication": FactorLlmBaseline(
        moefication, lambda space: MoeficationMeasurement(space.experts, space.section.calibration_tokens)
    ),
    "cmoe": FactorLlmBaseline(
        cmoe,
        lambda space: CmoeMeasurement(
            experts=space.experts,
            shared=space.active // 2,
            firing=min(_FIRING, space.dense.width),
            ridge=RIDGE,
            tokens=space.section.calibration_tokens,
        ),
        shared_experts=True,
    ),
}


class FactorLlmCosts(GenomeCosts[FactorLlmSpace]):
    """Costs of FactorLLM candidates, the same for all."""

    def buffer_bytes(self, phases: Iterable[str], host: bool, repaired: bool) -> int:
        return down_projection_bytes(self.outline, self.space.dense) if repaired else 0

    def calibration_bytes(self, longest: int) -> int:
        """Count routers, and for CMoE how often neurons are activated together."""
        from moevolve.workers.methods.shared.input_statistics import STATISTICS_MEMORY, directions_bytes

        dense, counts = self.space.dense, 4 * self.space.dense.width**2
        cmoe = any(isinstance(part, CmoeMeasurement) for part in measurement_parts(self.space.baseline_measurement))
        held = counts * (min(dense.layers, max(1, STATISTICS_MEMORY // counts)) + 1) if cmoe else 0
        row = 8 * max(longest, ROW_TOKENS) * dense.hidden  # float64 inputs; short sequences share a row of the batch
        return max(held, directions_bytes(dense.hidden, dense.layers)) + row

    def calibration_host_bytes(self) -> int:
        """Count k-means, which keeps three float32 copies of a network's input weights."""
        clustered = {type(part) for part in measurement_parts(self.space.baseline_measurement)} - {CmoeMeasurement}
        return 3 * 4 * self.space.dense.hidden * self.space.dense.width if clustered else 0

    def fitted_maps(self) -> tuple[tuple[FitOutline, ...], ...]:
        space = self.space
        return ((FitOutline(space.dense.width, space.experts, space.active / space.experts),),) * space.dense.layers

    def counts(self, phase: PhaseConfig) -> tuple[int, int, int, int]:
        return self.space.experts, self.space.active, self.space.parameters, self.space.active_parameters


def _space(section: FactorLlmSection, facts: ModelFacts, phases: Sequence[PhaseConfig]) -> FactorLlmSpace:
    """Make a space whose measurement includes those for the baselines that the phases begin with."""
    space = FactorLlmSpace.of(section, facts)
    names = dict.fromkeys(name for phase in phases for name in phase.baselines if name in BASELINES)
    return replace(space, baseline_measurement=combined(*(BASELINES[name].measurement(space) for name in names)))


class FactorLlmFigures(GenomeFigures[FactorLlmGenome]):
    """No drawing, only columns."""

    def outline(self, genome: FactorLlmGenome) -> GenomeOutline:
        closed = int((genome.base_router > 0).sum())
        routers = f"{closed} of {genome.space.dense.layers} layers from a closed form"
        return GenomeOutline((("configuration", genome.space.name), ("routers", routers)))


FACTORLLM = GenomeKind(
    section=FactorLlmSection,
    make_space=_space,
    costs=FactorLlmCosts,
    figures=FactorLlmFigures(),
    baselines=BASELINES,
    repairable=True,
)
