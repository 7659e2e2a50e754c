"""The genome kind `factorllm`, whole."""

from __future__ import annotations

from moevolve.search.genomes.base import GenomeKind
from moevolve.search.genomes.factorllm.cost import FactorLlmCosts
from moevolve.search.genomes.factorllm.figures import FactorLlmFigures
from moevolve.search.genomes.factorllm.section import FactorLlmSection
from moevolve.search.genomes.factorllm.space import FactorLlmSpace

FACTORLLM = GenomeKind(
    section=FactorLlmSection,
    make_space=lambda section, facts, phases: FactorLlmSpace.of(section, facts),
    costs=FactorLlmCosts,
    figures=FactorLlmFigures(),
    repairable=True,
)
