"""What ToMoE candidates cost: widths under one budget."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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
from moevolve.search.genomes.tomoe.space import ToMoeSpace


class ToMoeCosts(GenomeCosts[ToMoeSpace]):
    """With the widths of the start, since they sum up alike in all candidates; how much some mask keeps differs.

    Values are as in a search's children, whose tokens differ in them: those of the start, all the same, take less.
    """

    def work(self, phase: str) -> ModelWork:
        full = full_work(self.outline)
        pairs = zip(full.layers, self._changes(), strict=True)
        return replace(full, layers=tuple(layer.with_network(change) for layer, change in pairs))

    def buffer_bytes(self, phases: Iterable[str], host: bool, repaired: bool) -> int:
        """Of networks' output projections, and of attentions' where heads are masked."""
        if not repaired:
            return 0
        dense, attended = self.space.dense, self._masked * self.space.dense.heads * self.space.dense.head_dim
        return down_bytes(self.outline, dense) * (dense.width + attended) // dense.width

    def fits(self) -> tuple[tuple[FitOutline, ...], ...]:
        return tuple(map(self._fits, self.space.even_widths.tolist()))

    def _fits(self, widths: list[int]) -> tuple[FitOutline, ...]:
        dense, width = self.space.dense, widths[0]
        made = activation_flops(dense) * width // dense.width
        network = FitOutline(dense.width, 1, width / dense.width, made)
        attention = FitOutline(dense.heads * dense.head_dim, 1, 1.0, 0)
        return (attention, network) if self._masked else (network,)

    @property
    def _masked(self) -> bool:
        return self.space.even_widths.shape[1] > 1

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
