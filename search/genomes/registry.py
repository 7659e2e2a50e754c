"""Genome kinds by the type of their configuration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from moevolve.evaluators.errors import UserError
from moevolve.search.config_genomes import AnyGenomeSection, EepSection, FactorLlmSection, NanoMoeSection, ToMoeSection
from moevolve.search.genomes.base import GenomeSpace
from moevolve.search.genomes.eep import EepSpace
from moevolve.search.genomes.factorllm_space import FactorLlmSpace
from moevolve.search.genomes.nanomoe import NanoMoeSpace
from moevolve.search.genomes.tomoe_space import ToMoeSpace
from moevolve.workers.messages import ModelFacts

SPACES: dict[type, Callable[[Any, ModelFacts], GenomeSpace[Any]]] = {
    NanoMoeSection: NanoMoeSpace.of,
    EepSection: EepSpace.of,
    FactorLlmSection: FactorLlmSpace.of,
    ToMoeSection: ToMoeSpace.of,
}
"""What makes the space of a `genome` section for a model."""


def make_space(section: AnyGenomeSection, facts: ModelFacts) -> GenomeSpace[Any]:
    """The space of a configuration's `genome` section for a model; one with a recipe is yet to be calibrated.

    Raises:
        UserError: the section asks for what the model can't give.
    """
    make = SPACES.get(type(section))
    if make is None:
        raise UserError(f"genome.kind: {section.kind} is not there yet")
    return make(section, facts)
