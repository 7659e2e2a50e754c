"""Baselines by name: what each needs measured, and which phases it can begin."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from moevolve.evaluators.errors import UserError
from moevolve.search.config.phases import PhaseConfig
from moevolve.search.genomes.base import GenomeSpace, Offspring
from moevolve.search.genomes.eep.baselines.hc_smoe import hc_smoe
from moevolve.search.genomes.eep.baselines.naee import naee
from moevolve.search.genomes.eep.baselines.scores import frequency, reap, soft_activation
from moevolve.search.genomes.eep.genome import EepGenome
from moevolve.search.genomes.eep.space import EepSpace
from moevolve.search.genomes.sections import EepSection
from moevolve.workers.methods.base import Calibration
from moevolve.workers.methods.eep.edit import ExpertsRecipe, Statistic, SubsetRecipe


@dataclass(frozen=True, slots=True)
class Baseline:
    """A one-shot method.

    Attributes:
        make: its individual, from a space and its calibration.
        phases: kinds of phases that it can begin.
        statistics: what must be measured.
        subsets: whether subsets of experts must be compared.
        by_part: whether it can keep as many experts in every routing group.
    """

    make: Callable[[EepSpace, Calibration], Offspring[EepGenome]]
    phases: tuple[str, ...]
    statistics: tuple[Statistic, ...]
    subsets: bool = False
    by_part: bool = True


_PRUNING = ("prune", "merge")
BASELINES: dict[str, Baseline] = {
    "frequency": Baseline(frequency, _PRUNING, ("usage",)),
    "soft_activation": Baseline(soft_activation, _PRUNING, ("usage",)),
    "reap": Baseline(reap, _PRUNING, ("saliency",)),
    "naee": Baseline(naee, _PRUNING, (), subsets=True, by_part=False),
    "hc_smoe": Baseline(hc_smoe, ("merge",), ("mean_outputs", "usage"), by_part=False),
}
"""All but `random`, which is any space's `sample`."""


def experts_recipe(space: EepSpace, section: EepSection, phases: Sequence[PhaseConfig]) -> ExpertsRecipe | None:
    """What must be measured for the baselines that `phases` begin with and for dynamic skipping; None for nothing."""
    needed = [BASELINES[name] for phase in phases for name in phase.baselines if name in BASELINES]
    statistics: set[Statistic] = {name for baseline in needed for name in baseline.statistics}
    if section.dynamic_skipping:
        statistics.add("ratio")
    subsets = None
    if any(baseline.subsets for baseline in needed):
        subsets = SubsetRecipe(
            retained=space.retained,
            active=space.active,
            layer_groups=space.layer_groups,
            logits_space=space.router_space == "logits",
            limit=section.naee_subsets,
            sample=section.naee_tokens,
        )
    if not statistics and subsets is None:
        return None
    return ExpertsRecipe(tuple(sorted(statistics)), subsets, section.calibration_tokens)


def check_baselines(phases: Sequence[PhaseConfig], space: object) -> None:
    """Refuse names in `init` that mean nothing for their phase.

    Raises:
        UserError: an unknown name, one that doesn't suit the phase or the genome kind; the message names the field.
    """
    for position, phase in enumerate(phases):
        for name in phase.baselines:
            where = f"phases.{position}.init: {name}"
            if not isinstance(space, EepSpace):
                raise UserError(f"{where}: baselines are for genome kind eep; leave init out")
            suited = ["random", *(each for each, baseline in BASELINES.items() if phase.kind in baseline.phases)]
            if name not in BASELINES:
                raise UserError(f"{where} is unknown; a {phase.kind} phase can begin with {', '.join(suited)}")
            if name not in suited:
                raise UserError(f"{where} can't begin a {phase.kind} phase; use {', '.join(suited)}")
            parts = space.subsets.parts
            if parts > 1 and name in BASELINES and not BASELINES[name].by_part:
                raise UserError(
                    f"{where} chooses among all experts at once, and this {space.facts.family} model has {parts} "
                    "routing groups that must keep as many each; use another"
                )


def baseline_offspring(name: str, space: GenomeSpace[Any]) -> Offspring[EepGenome]:
    """The individual of a baseline in a calibrated space."""
    assert isinstance(space, EepSpace) and space.calibration is not None
    return BASELINES[name].make(space, space.calibration)
