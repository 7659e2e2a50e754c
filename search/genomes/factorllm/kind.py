"""The genome kind `factorllm`, with the costs of its candidates."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from moevolve.search.genomes.contract.base import GenomeKind
from moevolve.search.genomes.contract.costs import FitOutline, GenomeCosts, down_projection_bytes, network_flops
from moevolve.search.genomes.factorllm.baselines import BASELINES, baselines_recipe
from moevolve.search.genomes.factorllm.figures import FactorLlmFigures
from moevolve.search.genomes.factorllm.space import FactorLlmSection, FactorLlmSpace
from moevolve.search.settings.phases import PhaseConfig
from moevolve.workers.contract.edits import ROW_TOKENS, recipe_parts
from moevolve.workers.contract.facts import ModelFacts


class FactorLlmCosts(GenomeCosts[FactorLlmSpace]):
    """Costs of FactorLLM candidates, the same for all."""

    def token_flops(self, phase: str) -> int:
        space, network = self.space, network_flops(self.space.dense)
        routers = 2 * space.routers * space.experts * space.dense.hidden
        change = network * space.active // space.experts - network + routers
        return self.outline.token_flops + len(self.outline.layers) * change

    def buffer_bytes(self, phases: Iterable[str], host: bool, repaired: bool) -> int:
        return down_projection_bytes(self.outline, self.space.dense) if repaired else 0

    def calibration_bytes(self, longest: int) -> int:
        """See `GenomeCosts.calibration_bytes`: routers, and for `coactivation` the counts of common activations."""
        from moevolve.workers.methods.shared.input_statistics import STATISTICS_MEMORY, directions_bytes

        dense, counts = self.space.dense, 4 * self.space.dense.width**2
        firing = counts * (min(dense.layers, max(1, STATISTICS_MEMORY // counts)) + 1)
        coactive = any(getattr(part, "partition", "") == "coactivation" for part in recipe_parts(self.space.recipe))
        row = 8 * max(longest, ROW_TOKENS) * dense.hidden  # float64 inputs; short sequences share a row of the batch
        return max(firing if coactive else 0, directions_bytes(dense.hidden, dense.layers)) + row

    def calibration_host_bytes(self) -> int:
        """See `GenomeCosts.calibration_host_bytes`: k-means keeps three float32 copies of a network's input weights."""
        partitions = [getattr(part, "partition", "kmeans") for part in recipe_parts(self.space.recipe)]
        return 3 * 4 * self.space.dense.hidden * self.space.dense.width if "kmeans" in partitions else 0

    def fitted_maps(self, phase: str) -> tuple[tuple[FitOutline, ...], ...]:
        space = self.space
        return ((FitOutline(space.dense.width, space.experts, space.active / space.experts),),) * space.dense.layers

    def counts(self, phase: str) -> tuple[int, int, int, int]:
        return self.space.experts, self.space.active, self.space.parameters, self.space.active_parameters


def _space(section: FactorLlmSection, facts: ModelFacts, phases: Sequence[PhaseConfig]) -> FactorLlmSpace:
    """Make a space whose recipe includes the measurements for the phases' baselines."""
    space = FactorLlmSpace.of(section, facts)
    return replace(space, baseline_recipe=baselines_recipe(space, phases))


FACTORLLM = GenomeKind(
    section=FactorLlmSection,
    make_space=_space,
    costs=FactorLlmCosts,
    figures=FactorLlmFigures(),
    baselines=BASELINES,
    repairable=True,
)
