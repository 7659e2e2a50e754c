"""The genome kind `factorllm`: its baselines, and what its candidates cost.

Baselines are other methods that partition a dense network without training, as FactorLLM genomes. Both are measured on
a worker. `moevolve.workers.methods.factorllm.calibrate_baselines` says what they lack of the papers. The factor on the
experts' outputs is the space's; the papers have none (`genome.output_scale: one`).

KnowledgeFactor (Yang et al., ECCV 2022), the other baseline of FactorLLM's Table 1, has no counterpart: it trains one
network for what tasks share and one per task, and doesn't partition the network's neurons. The nearest method without
training is CMoE, whose shared experts are active for all tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from moevolve.search.genomes.contract.base import Offspring
from moevolve.search.genomes.contract.costs import FitOutline, GenomeCosts, down_projection_bytes
from moevolve.search.genomes.contract.kind import Baseline, GenomeKind
from moevolve.search.genomes.contract.phases import PhaseConfig
from moevolve.search.genomes.factorllm.figures import FactorLlmFigures
from moevolve.search.genomes.factorllm.space import FactorLlmGenome, FactorLlmSection, FactorLlmSpace
from moevolve.workers.contract.edits import ROW_TOKENS, CalibrationRecipe, combined, recipe_parts
from moevolve.workers.contract.facts import ModelFacts
from moevolve.workers.methods.factorllm.edit import CmoeRecipe, MoeficationRecipe

# Number of neurons that count as activated by a token, CMoE's `K_a`.
_FIRING = 10


def moefication(space: FactorLlmSpace) -> Offspring[FactorLlmGenome]:
    """Cluster neurons by input weights, choose experts by cosine with their mean: MoEfication (arXiv 2110.01786)."""
    return Offspring(space.from_partition(space.statistics["moefication_experts"], "moefication"), "moefication", ())


def cmoe(space: FactorLlmSpace) -> Offspring[FactorLlmGenome]:
    """Make half of the active experts shared, and route to the others: CMoE (arXiv 2502.04416)."""
    note = f"cmoe, {space.active // 2} of the experts are shared"
    return Offspring(space.from_partition(space.statistics["cmoe_experts"], "cmoe"), "cmoe", (), note)


@dataclass(frozen=True, slots=True)
class FactorLlmBaseline(Baseline):
    """A measured partition with measured routers.

    Attributes:
        recipe: Function that returns the measurement for a space.
        shared_experts: True if some experts are shared, which needs a router bias and at least two active experts.
    """

    recipe: Callable[[FactorLlmSpace], CalibrationRecipe]
    shared_experts: bool = False

    def problem(self, space: FactorLlmSpace) -> str | None:
        if not self.shared_experts or (space.section.router_bias and 1 < space.active < space.experts):
            return None
        return "has shared experts, which needs genome.router_bias and 2 active experts at least, but not all of them"


BASELINES = {
    "moefication": FactorLlmBaseline(
        moefication, ("tune",), lambda space: MoeficationRecipe(space.experts, space.section.calibration_tokens)
    ),
    "cmoe": FactorLlmBaseline(
        cmoe,
        ("tune",),
        lambda space: CmoeRecipe(
            experts=space.experts,
            shared=space.active // 2,
            firing=min(_FIRING, space.dense.width),
            ridge=space.section.ridge,
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
        cmoe = any(isinstance(part, CmoeRecipe) for part in recipe_parts(self.space.baseline_recipe))
        held = counts * (min(dense.layers, max(1, STATISTICS_MEMORY // counts)) + 1) if cmoe else 0
        row = 8 * max(longest, ROW_TOKENS) * dense.hidden  # float64 inputs; short sequences share a row of the batch
        return max(held, directions_bytes(dense.hidden, dense.layers)) + row

    def calibration_host_bytes(self) -> int:
        """Count k-means, which keeps three float32 copies of a network's input weights."""
        partitions = [getattr(part, "partition", "kmeans") for part in recipe_parts(self.space.recipe)]
        return 3 * 4 * self.space.dense.hidden * self.space.dense.width if "kmeans" in partitions else 0

    def fitted_maps(self, uneven: bool) -> tuple[tuple[FitOutline, ...], ...]:
        space = self.space
        return ((FitOutline(space.dense.width, space.experts, space.active / space.experts),),) * space.dense.layers

    def counts(self, phase: PhaseConfig) -> tuple[int, int, int, int]:
        return self.space.experts, self.space.active, self.space.parameters, self.space.active_parameters


def _space(section: FactorLlmSection, facts: ModelFacts, phases: Sequence[PhaseConfig]) -> FactorLlmSpace:
    """Make a space whose recipe includes the measurements for the baselines that the phases begin with."""
    space = FactorLlmSpace.of(section, facts)
    names = dict.fromkeys(name for phase in phases for name in phase.baselines if name in BASELINES)
    return replace(space, baseline_recipe=combined(*(BASELINES[name].recipe(space) for name in names)))


FACTORLLM = GenomeKind(
    section=FactorLlmSection,
    make_space=_space,
    costs=FactorLlmCosts,
    figures=FactorLlmFigures(),
    baselines=BASELINES,
    repairable=True,
)
