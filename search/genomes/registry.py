"""Genome kinds by the type of their configuration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from moevolve.search.config.phases import PhaseConfig
from moevolve.search.genomes.base import GenomeSpace
from moevolve.search.genomes.eep.baselines.registry import experts_recipe
from moevolve.search.genomes.eep.space import EepSpace
from moevolve.search.genomes.factorllm.space import FactorLlmSpace
from moevolve.search.genomes.nanomoe.space import NanoMoeSpace
from moevolve.search.genomes.sections import (
    AnyGenomeSection,
    EepSection,
    FactorLlmSection,
    NanoMoeSection,
    ToMoeSection,
)
from moevolve.search.genomes.tomoe.space import ToMoeSpace
from moevolve.workers.facts import ModelFacts
from moevolve.workers.methods.base import combined

SPACES: dict[type, Callable[[Any, ModelFacts], GenomeSpace[Any]]] = {
    NanoMoeSection: NanoMoeSpace.of,
    EepSection: EepSpace.of,
    FactorLlmSection: FactorLlmSpace.of,
    ToMoeSection: ToMoeSpace.of,
}
"""What makes the space of a `genome` section for a model."""


def make_space(section: AnyGenomeSection, facts: ModelFacts, phases: Sequence[PhaseConfig] = ()) -> GenomeSpace[Any]:
    """The space of a configuration's `genome` section for a model; one with a recipe is yet to be calibrated.

    Args:
        section: the section.
        facts: the model.
        phases: of the search, which may begin with baselines that something must be measured for.

    Raises:
        UserError: the section asks for what the model can't give.
    """
    space = SPACES[type(section)](section, facts)
    if isinstance(space, EepSpace) and isinstance(section, EepSection):
        return replace(space, recipe=combined(experts_recipe(space, section, phases), space.recipe))
    return space
