"""Other methods that divide a dense network without training, as FactorLLM genomes.

Both are measured on a worker. `moevolve.workers.methods.factorllm.calibrate_baselines` says what
they lack of the papers. The factor on the experts' outputs is the space's; the papers have none
(`genome.output_scale: one`).

The other baseline of FactorLLM's Table 1, KnowledgeFactor (Yang et al., ECCV 2022), is none here. It makes a network
for what tasks share and one per task, by training both on bounds of mutual information, and says nothing of which of
the network's own neurons either has. What comes nearest without training is CMoE, whose shared experts all tokens have.
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
"""Neurons that a token activates, CMoE's `K_a`."""


def moefication(space: FactorLlmSpace) -> Offspring[FactorLlmGenome]:
    """Experts by input weights, chosen by cosine with their mean: MoEfication (arXiv 2110.01786)."""
    return Offspring(space.divided(space.measured["moefication_experts"], "moefication"), "moefication", ())


def cmoe(space: FactorLlmSpace) -> Offspring[FactorLlmGenome]:
    """Half of the active experts are shared ones, the others by representative neurons: CMoE (arXiv 2502.04416)."""
    shared = space.active // 2
    note = f"cmoe, {shared} of the experts are shared"
    return Offspring(space.divided(space.measured["cmoe_experts"], "cmoe"), "cmoe", (), note)


@dataclass(frozen=True, slots=True)
class FactorLlmBaseline(Baseline):
    """A division and routers that are measured.

    Attributes:
        measured: how, for a space.
        shares: whether some experts are shared: their routers need a bias, and a second active expert is chosen.
    """

    measured: Callable[[FactorLlmSpace], CalibrationRecipe]
    shares: bool = False

    def fault(self, space: FactorLlmSpace) -> str | None:
        if not self.shares or (space.section.router_bias and 1 < space.active < space.n):
            return None
        return "has shared experts, which needs genome.router_bias and 2 active experts at least, but not all of them"


def _moefication_recipe(space: FactorLlmSpace) -> CalibrationRecipe:
    return MoeficationRecipe(space.n, space.section.calibration_tokens)


def _cmoe_recipe(space: FactorLlmSpace) -> CalibrationRecipe:
    section, firing = space.section, min(_FIRING, space.dense.width)
    return CmoeRecipe(space.n, space.active // 2, firing, section.ridge, section.calibration_tokens)


BASELINES = {
    "moefication": FactorLlmBaseline(moefication, ("tune",), _moefication_recipe),
    "cmoe": FactorLlmBaseline(cmoe, ("tune",), _cmoe_recipe, shares=True),
}


def baselines_recipe(space: FactorLlmSpace, phases: Sequence[PhaseConfig]) -> CalibrationRecipe | None:
    """What must be measured for the baselines that phases begin with; None for nothing."""
    names = dict.fromkeys(name for phase in phases for name in phase.baselines if name in BASELINES)
    return combined(*(BASELINES[name].measured(space) for name in names))
