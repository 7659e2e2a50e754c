"""The genome kind `tomoe`, whole."""

from __future__ import annotations

from moevolve.search.genomes.base import GenomeKind
from moevolve.search.genomes.tomoe.baselines import BASELINES
from moevolve.search.genomes.tomoe.cost import ToMoeCosts
from moevolve.search.genomes.tomoe.figures import ToMoeFigures
from moevolve.search.genomes.tomoe.section import ToMoeSection
from moevolve.search.genomes.tomoe.space import ToMoeSpace

TOMOE = GenomeKind(
    section=ToMoeSection,
    make_space=lambda section, facts, phases: ToMoeSpace.of(section, facts),
    costs=ToMoeCosts,
    figures=ToMoeFigures(),
    baselines=BASELINES,
    repairable=True,
)
