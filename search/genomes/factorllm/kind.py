"""The genome kind `factorllm`: its parts, and what its candidates cost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from moevolve.search.genomes.contract.base import GenomeKind
from moevolve.search.genomes.contract.costs import FitOutline, GenomeCosts, down_bytes, network_flops
from moevolve.search.genomes.factorllm.baselines import BASELINES, baselines_recipe
from moevolve.search.genomes.factorllm.figures import FactorLlmFigures
from moevolve.search.genomes.factorllm.section import FactorLlmSection
from moevolve.search.genomes.factorllm.space import FactorLlmSpace
from moevolve.search.settings.phases import PhaseConfig
from moevolve.workers.contract.edits import ROW_TOKENS, recipe_parts
from moevolve.workers.contract.facts import ModelFacts


class FactorLlmCosts(GenomeCosts[FactorLlmSpace]):
    """The same for all candidates: they differ in which neurons an expert has, not in how many."""

    def token_flops(self, phase: str) -> int:
        space, network = self.space, network_flops(self.space.dense)
        routers = 2 * space.routers * space.n * space.dense.hidden
        change = network * space.active // space.n - network + routers
        return self.outline.token_flops + len(self.outline.layers) * change

    def buffer_bytes(self, phases: Iterable[str], host: bool, repaired: bool) -> int:
        return down_bytes(self.outline, self.space.dense) if repaired else 0

    def measuring_bytes(self, longest: int) -> int:
        """What routers take; `coactivation` also counts which neurons fire together."""
        from moevolve.workers.methods.shared.input_statistics import STATISTICS_MEMORY, directions_bytes

        dense, counts = self.space.dense, 4 * self.space.dense.width**2
        firing = counts * (min(dense.layers, max(1, STATISTICS_MEMORY // counts)) + 1)
        coactive = any(getattr(part, "partition", "") == "coactivation" for part in recipe_parts(self.space.recipe))
        row = 8 * max(longest, ROW_TOKENS) * dense.hidden  # inputs in float64; short sequences share a row
        return max(firing if coactive else 0, directions_bytes(dense.hidden, dense.layers)) + row

    def measuring_host_bytes(self) -> int:
        """What k-means on neurons' input weights takes, in float32: as they are, of unit length, and in order."""
        partitions = [getattr(part, "partition", "kmeans") for part in recipe_parts(self.space.recipe)]
        return 3 * 4 * self.space.dense.hidden * self.space.dense.width if "kmeans" in partitions else 0

    def fits(self) -> tuple[tuple[FitOutline, ...], ...]:
        space = self.space
        return ((FitOutline(space.dense.width, space.n, space.active / space.n),),) * space.dense.layers

    def counts(self, phase: str) -> tuple[int, int, int, int]:
        return self.space.n, self.space.active, self.space.parameters, self.space.active_parameters


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
