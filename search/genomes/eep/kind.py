"""The genome kind `eep`, whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from moevolve.search.config.phases import PhaseConfig
from moevolve.search.genomes.base import GenomeKind
from moevolve.search.genomes.eep.baselines.registry import BASELINES, experts_recipe
from moevolve.search.genomes.eep.cost import EepCosts
from moevolve.search.genomes.eep.figures import EepFigures
from moevolve.search.genomes.eep.section import EepSection
from moevolve.search.genomes.eep.space import EepSpace
from moevolve.workers.facts import ModelFacts
from moevolve.workers.methods.base import combined


def _space(section: EepSection, facts: ModelFacts, phases: Sequence[PhaseConfig]) -> EepSpace:
    """A space whose recipe measures what the phases' baselines choose by, too."""
    space = EepSpace.of(section, facts)
    return replace(space, recipe=combined(experts_recipe(space, section, phases), space.recipe))


EEP = GenomeKind(
    section=EepSection,
    make_space=_space,
    costs=EepCosts,
    figures=EepFigures(),
    baselines=BASELINES,
    repairable=True,
    recombinable=True,
    one_shot={"genome.groups": "per_layer"},
)
