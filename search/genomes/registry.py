"""Genome kinds by name."""

from __future__ import annotations

from typing import Any

from moevolve.search.config_genomes import EepSection
from moevolve.search.genomes.base import GenomeSpace
from moevolve.search.genomes.eep import EepSpace
from moevolve.workers.messages import ModelFacts


def make_space(section: EepSection, facts: ModelFacts) -> GenomeSpace[Any]:
    """The space of a configuration's `genome` section for a model.

    Raises:
        UserError: the section asks for what the model can't give.
    """
    return EepSpace.of(section, facts)
