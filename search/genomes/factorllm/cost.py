"""What FactorLLM candidates cost: K of N experts, and routers."""

from __future__ import annotations

from dataclasses import replace

from moevolve.search.genomes.costs import GenomeCosts, ModelWork, full_work, network_flops
from moevolve.search.genomes.factorllm.space import FactorLlmSpace


class FactorLlmCosts(GenomeCosts[FactorLlmSpace]):
    """The same for all candidates: they differ in which neurons an expert has, not in how many."""

    def work(self, phase: str) -> ModelWork:
        space, full = self.space, full_work(self.outline)
        network, routers = network_flops(space.dense), 2 * space.routers * space.n * space.dense.hidden
        change = network * space.active // space.n - network + routers
        return replace(full, layers=tuple(layer.with_network(change) for layer in full.layers))

    def counts(self, phase: str) -> tuple[int, int, int, int]:
        return self.space.n, self.space.active, self.space.parameters, self.space.active_parameters
