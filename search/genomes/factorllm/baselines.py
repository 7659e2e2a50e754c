"""Other methods that partition a dense network without training, as FactorLLM genomes.

Both are measured on a worker. `moevolve.workers.methods.factorllm.calibrate_baselines` says what
they lack of the papers. The factor on the experts' outputs is the space's; the papers have none
(`genome.output_scale: one`).

KnowledgeFactor (Yang et al., ECCV 2022), the other baseline of FactorLLM's Table 1, has no counterpart: it trains one
network for what tasks share and one per task, and doesn't partition the network's neurons. The nearest method without
training is CMoE, whose shared experts are active for all tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moevolve.search.genomes.contract.base import Baseline, Offspring
from moevolve.search.genomes.factorllm.genome import FactorLlmGenome
from moevolve.search.genomes.factorllm.space import FactorLlmSpace
from moevolve.search.settings.phases import PhaseConfig
from moevolve.workers.contract.edits import CalibrationRecipe, combined
from moevolve.workers.methods.factorllm.edit import CmoeRecipe, MoeficationRecipe

_FIRING = 10
"""Number of neurons that count as activated by a token, CMoE's `K_a`."""


def moefication(space: FactorLlmSpace) -> Offspring[FactorLlmGenome]:
    """Cluster neurons by input weights, choose experts by cosine with their mean: MoEfication (arXiv 2110.01786)."""
    return Offspring(space.from_partition(space.statistics["moefication_experts"], "moefication"), "moefication", ())


def cmoe(space: FactorLlmSpace) -> Offspring[FactorLlmGenome]:
    """Make half of the active experts shared, and route to the others: CMoE (arXiv 2502.04416)."""
    shared = space.active // 2
    note = f"cmoe, {shared} of the experts are shared"
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


def _moefication_recipe(space: FactorLlmSpace) -> CalibrationRecipe:
    return MoeficationRecipe(space.experts, space.section.calibration_tokens)


def _cmoe_recipe(space: FactorLlmSpace) -> CalibrationRecipe:
    section, firing = space.section, min(_FIRING, space.dense.width)
    return CmoeRecipe(space.experts, space.active // 2, firing, section.ridge, section.calibration_tokens)


BASELINES = {
    "moefication": FactorLlmBaseline(moefication, ("tune",), _moefication_recipe),
    "cmoe": FactorLlmBaseline(cmoe, ("tune",), _cmoe_recipe, shared_experts=True),
}


def baselines_recipe(space: FactorLlmSpace, phases: Sequence[PhaseConfig]) -> CalibrationRecipe | None:
    """Return the measurements for the baselines that `phases` begin with; None if they need none."""
    names = dict.fromkeys(name for phase in phases for name in phase.baselines if name in BASELINES)
    return combined(*(BASELINES[name].recipe(space) for name in names))
