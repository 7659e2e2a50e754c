"""What ToMoE candidates cost: widths under one budget."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from moevolve.search.genomes.costs import GenomeCosts, ModelWork, full_work, network_flops
from moevolve.search.genomes.tomoe.space import ToMoeSpace


class ToMoeCosts(GenomeCosts[ToMoeSpace]):
    """With the widths of the start, since they sum up alike in all candidates; how much some mask keeps differs."""

    def work(self, phase: str) -> ModelWork:
        full = full_work(self.outline)
        pairs = zip(full.layers, self._changes(), strict=True)
        return replace(full, layers=tuple(layer.with_network(change) for layer, change in pairs))

    def counts(self, phase: str) -> tuple[int, int, None, int]:
        space = self.space
        return space.section.experts, 1, None, space.active_parameters(space.even_widths)

    def _changes(self) -> Iterator[int]:
        """Operations that each layer has more; masks on a finished product save nothing."""
        space, dense, network = self.space, self.space.dense, network_flops(self.space.dense)
        for width, *heads in space.even_widths.tolist():
            routed = 2 * space.section.experts * dense.hidden if width < dense.width else 0
            scores = 2 * space.section.components * (dense.hidden + dense.head_dim)
            masked = scores if heads and heads[1] < dense.head_dim else 0
            yield network * width // dense.width - network + routed + masked
