"""The genome kind `factorllm`, whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from moevolve.search.config.phases import PhaseConfig
from moevolve.search.genomes.base import GenomeKind
from moevolve.search.genomes.factorllm.baselines import BASELINES, baselines_recipe
from moevolve.search.genomes.factorllm.cost import FactorLlmCosts
from moevolve.search.genomes.factorllm.figures import FactorLlmFigures
from moevolve.search.genomes.factorllm.section import FactorLlmSection
from moevolve.search.genomes.factorllm.space import FactorLlmSpace
from moevolve.workers.facts import ModelFacts


def _space(section: FactorLlmSection, facts: ModelFacts, phases: Sequence[PhaseConfig]) -> FactorLlmSpace:
    """A space whose recipe measures the phases' baselines, too."""
    space = FactorLlmSpace.of(section, facts)
    return replace(space, beside=baselines_recipe(space, phases))


FACTORLLM = GenomeKind(
    section=FactorLlmSection,
    make_space=_space,
    costs=FactorLlmCosts,
    figures=FactorLlmFigures(),
    baselines=BASELINES,
    repairable=True,
)
