"""What FactorLLM candidates cost: K of N experts, and routers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from moevolve.search.genomes.costs import (
    FitOutline,
    GenomeCosts,
    ModelWork,
    activation_flops,
    down_bytes,
    full_work,
    network_flops,
)
from moevolve.search.genomes.factorllm.space import FactorLlmSpace


class FactorLlmCosts(GenomeCosts[FactorLlmSpace]):
    """The same for all candidates: they differ in which neurons an expert has, not in how many."""

    def work(self, phase: str) -> ModelWork:
        space, full = self.space, full_work(self.outline)
        network, routers = network_flops(space.dense), 2 * space.routers * space.n * space.dense.hidden
        change = network * space.active // space.n - network + routers
        return replace(full, layers=tuple(layer.with_network(change) for layer in full.layers))

    def buffer_bytes(self, phases: Iterable[str], host: bool, repaired: bool) -> int:
        return down_bytes(self.outline, self.space.dense) if repaired else 0

    def fits(self) -> tuple[tuple[FitOutline, ...], ...]:
        space, share = self.space, self.space.active / self.space.n
        made = activation_flops(space.dense) * space.active // space.n
        return ((FitOutline(space.dense.width, space.n, share, made),),) * space.dense.layers

    def counts(self, phase: str) -> tuple[int, int, int, int]:
        return self.space.n, self.space.active, self.space.parameters, self.space.active_parameters
