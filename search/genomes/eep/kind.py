"""The genome kind `eep`, with the costs of its candidates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import comb

from moevolve.search.genomes.contract.kind import GenomeKind
from moevolve.search.genomes.contract.phases import PhaseConfig
from moevolve.search.genomes.eep.baselines import BASELINES, expert_recipes
from moevolve.search.genomes.eep.figures import EepFigures
from moevolve.search.genomes.eep.space import EepSection, EepSpace
from moevolve.search.genomes.experts.costs import ExpertsCosts
from moevolve.workers.contract.edits import combined
from moevolve.workers.contract.facts import ModelFacts


class EepCosts(ExpertsCosts[EepSpace]):
    """Costs of EEP candidates.

    Routers run over all n experts; a continuous mapping is applied to their scores, or, in logits space, folded into
    the router.
    """

    def counts(self, phase: PhaseConfig) -> tuple[int, int, int, int]:
        return self.space.retained, self.space.active, *self.space.parameters(one_hot=phase.kind != "merge")

    def distinct_candidates(self, phase: PhaseConfig) -> int | None:
        if phase.kind != "prune":
            return None
        subsets = self.space.subsets
        groups = subsets.routing_groups
        return comb(subsets.experts // groups, subsets.retained // groups) ** (groups * self.space.groups)


def _space(section: EepSection, facts: ModelFacts, phases: Sequence[PhaseConfig]) -> EepSpace:
    """Make a space whose recipe includes the measurements for surrogates and baselines."""
    space = EepSpace.of(section, facts)
    return replace(space, recipe=combined(*expert_recipes(space, section, phases), space.recipe))


EEP = GenomeKind(
    section=EepSection,
    make_space=_space,
    costs=EepCosts,
    figures=EepFigures(),
    baselines=BASELINES,
    repairable=True,
    recombinable=True,
    baseline_settings={"genome.groups": "per_layer"},
)
