"""Baselines by name: what each needs measured, and which phases it can begin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from moevolve.search.genomes.contract.base import Baseline, Offspring
from moevolve.search.genomes.eep.baseline_scores import frequency, reap, soft_activation
from moevolve.search.genomes.eep.baseline_subsets import fitted, naee
from moevolve.search.genomes.eep.genome import EepGenome
from moevolve.search.genomes.eep.hc_smoe import hc_smoe
from moevolve.search.genomes.eep.section import EepSection, limit_of
from moevolve.search.genomes.eep.space import EepSpace
from moevolve.search.settings.phases import PhaseConfig
from moevolve.workers.methods.eep.edit import ExpertsRecipe, Statistic, SubsetRecipe


@dataclass(frozen=True, slots=True)
class EepBaseline(Baseline):
    """A one-shot choice of experts.

    Attributes:
        statistics: what must be measured.
        subsets: whether subsets of experts must be compared as they are.
        fitted: whether they must be by what a fit of them leaves.
        by_part: whether it can keep as many experts in every routing group.
        whole: whether it keeps all experts there are.
    """

    statistics: tuple[Statistic, ...] = ()
    subsets: bool = False
    fitted: bool = False
    by_part: bool = True
    whole: bool = False

    def fault(self, space: EepSpace) -> str | None:
        if self.whole and space.retained < space.experts:
            return f"keeps every expert, which takes genome.experts: {space.experts} instead of {space.retained}"
        parts = space.subsets.parts
        if self.by_part or parts == 1:
            return None
        return (
            f"chooses among all experts at once, and this {space.facts.family} model has {parts} routing groups that "
            "must keep as many each; use another"
        )


def _identity(space: EepSpace) -> Offspring[EepGenome]:
    """All experts as they are: with `active` or `dynamic_skipping`, the unedited ones at another number per token."""
    every = np.tile(np.arange(space.experts), (space.groups, 1))
    return Offspring(space.from_kept(every), "identity", ())


_PRUNING = ("prune", "merge")
BASELINES: dict[str, EepBaseline] = {
    "frequency": EepBaseline(frequency, _PRUNING, ("usage",)),
    "soft_activation": EepBaseline(soft_activation, _PRUNING, ("usage",)),
    "reap": EepBaseline(reap, _PRUNING, ("saliency",)),
    "naee": EepBaseline(naee, _PRUNING, (), subsets=True, by_part=False),
    "fitted": EepBaseline(fitted, _PRUNING, (), fitted=True, by_part=False),
    "hc_smoe": EepBaseline(hc_smoe, ("merge",), ("mean_outputs", "usage"), by_part=False),
    "identity": EepBaseline(_identity, _PRUNING, whole=True),
}


def experts_recipe(space: EepSpace, section: EepSection, phases: Sequence[PhaseConfig]) -> ExpertsRecipe | None:
    """What must be measured for the baselines that `phases` begin with; None for nothing."""
    needed = [BASELINES[name] for phase in phases for name in phase.baselines if name in BASELINES]
    statistics: set[Statistic] = {name for baseline in needed for name in baseline.statistics}
    compared = SubsetRecipe(
        retained=space.retained,
        active=space.active,
        layer_groups=space.layer_groups,
        logits_space=space.router_space == "logits",
        limit=section.naee_subsets,
        sample=section.naee_tokens,
    )
    subsets = compared if any(baseline.subsets for baseline in needed) else None
    by_fit = replace(compared, limit=section.fitted_subsets, sample=section.fitted_tokens)
    fitted = by_fit if any(baseline.fitted for baseline in needed) else None
    if not statistics and subsets is None and fitted is None:
        return None
    return ExpertsRecipe(tuple(sorted(statistics)), subsets, limit_of(section.calibration_tokens), fitted)
