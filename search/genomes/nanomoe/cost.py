"""What NanoMoE candidates cost: factors in the place of the chosen linear layers."""

from __future__ import annotations

from dataclasses import replace

from moevolve.search.genomes.costs import GenomeCosts, ModelWork, full_work
from moevolve.search.genomes.nanomoe.space import NanoMoeSpace


class NanoMoeCosts(GenomeCosts[NanoMoeSpace]):
    """The same for all candidates; plain low rank has one only."""

    def work(self, phase: str) -> ModelWork:
        full, form = full_work(self.outline), self.space.form
        found = list(full.layers)
        for linear in self.space.layers:
            _, index, rest = linear.name.split(".", 2)
            change = form.flops(linear.outputs, linear.inputs) - 2 * linear.outputs * linear.inputs
            layer = found[int(index)]
            if rest.startswith("mlp."):
                found[int(index)] = replace(layer, block=layer.block + change)
            else:
                found[int(index)] = replace(layer, outside=layer.outside + change)
        return replace(full, layers=tuple(found))

    def counts(self, phase: str) -> tuple[int, int, int, int]:
        blocks = self.space.form.blocks
        return blocks, blocks, self.space.parameters, self.space.active_parameters

    def different(self, phase: str) -> int | None:
        return 1 if self.space.form.variant == "low_rank" else None
