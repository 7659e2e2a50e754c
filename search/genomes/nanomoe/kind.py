"""The genome kind `nanomoe`, whole."""

from __future__ import annotations

from moevolve.search.genomes.base import GenomeKind
from moevolve.search.genomes.nanomoe.baselines import BASELINES
from moevolve.search.genomes.nanomoe.cost import NanoMoeCosts
from moevolve.search.genomes.nanomoe.figures import NanoMoeFigures
from moevolve.search.genomes.nanomoe.section import NanoMoeSection
from moevolve.search.genomes.nanomoe.space import NanoMoeSpace

NANOMOE = GenomeKind(
    section=NanoMoeSection,
    make_space=lambda section, facts, phases: NanoMoeSpace.of(section, facts),
    costs=NanoMoeCosts,
    figures=NanoMoeFigures(),
    baselines=BASELINES,
)
