"""The genome kind `nanomoe`: its parts, and what its candidates cost."""

from __future__ import annotations

from collections.abc import Iterable

from moevolve.search.genomes.contract.base import GenomeKind
from moevolve.search.genomes.contract.costs import GenomeCosts
from moevolve.search.genomes.nanomoe.baselines import BASELINES
from moevolve.search.genomes.nanomoe.figures import NanoMoeFigures
from moevolve.search.genomes.nanomoe.section import NanoMoeSection
from moevolve.search.genomes.nanomoe.space import NanoMoeSpace


class NanoMoeCosts(GenomeCosts[NanoMoeSpace]):
    """The same for all candidates; plain low rank has one only."""

    def token_flops(self, phase: str) -> int:
        form, layers = self.space.form, self.space.layers
        changes = (form.flops(each.outputs, each.inputs) - 2 * each.outputs * each.inputs for each in layers)
        return self.outline.token_flops + sum(changes)

    def buffer_bytes(self, phases: Iterable[str], host: bool, repaired: bool) -> int:
        """Factors of all chosen layers, and a candidate's own where they are refined."""
        space, size = self.space, self.outline.facts.dtype_bytes
        values = sum(space.form.rank * (linear.inputs + linear.outputs) for linear in space.layers)
        return size * values * (2 if space.refine else 1)

    def measuring_bytes(self, longest: int) -> int:
        """A layer's weight in float64 with matrices of its shorter side, and its inputs' moments."""
        from moevolve.workers.methods.shared.input_statistics import STATISTICS_MEMORY

        sizes = {(linear.inputs, linear.outputs) for linear in self.space.layers}
        decomposed = max(8 * (inputs * outputs + 4 * min(inputs, outputs) ** 2) for inputs, outputs in sizes)
        if self.space.tokens is None:
            return decomposed
        return max(8 * max(sizes)[0] ** 2, STATISTICS_MEMORY) + 2 * decomposed

    def counts(self, phase: str) -> tuple[int, int, int, int]:
        blocks = self.space.form.blocks
        return blocks, blocks, self.space.parameters, self.space.active_parameters

    def different(self, phase: str) -> int | None:
        return 1 if self.space.form.variant == "low_rank" else None


NANOMOE = GenomeKind(
    section=NanoMoeSection,
    make_space=lambda section, facts, phases: NanoMoeSpace.of(section, facts),
    costs=NanoMoeCosts,
    figures=NanoMoeFigures(),
    baselines=BASELINES,
)
