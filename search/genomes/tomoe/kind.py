"""The genome kind `tomoe`, with the costs of its candidates."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from moevolve.search.genomes.contract.base import GenomeKind
from moevolve.search.genomes.contract.costs import FitOutline, GenomeCosts, down_projection_bytes, network_flops
from moevolve.search.genomes.tomoe.baselines import BASELINES
from moevolve.search.genomes.tomoe.figures import ToMoeFigures
from moevolve.search.genomes.tomoe.space import ToMoeSection, ToMoeSpace


class ToMoeCosts(GenomeCosts[ToMoeSpace]):
    """Costs of ToMoE candidates at the start's widths, whose total is the same in all candidates.

    Value dimensions are counted as in a search's children, whose masks differ between tokens. The start's are the same
    for all tokens and cost less.
    """

    def token_flops(self, phase: str) -> int:
        return self.outline.token_flops + sum(self._changes())

    def buffer_bytes(self, phases: Iterable[str], host: bool, repaired: bool) -> int:
        """See `GenomeCosts.buffer_bytes`: repaired output projections, also of attention with masked heads."""
        if not repaired:
            return 0
        dense, attended = self.space.dense, self._masked * self.space.dense.heads * self.space.dense.head_dim
        return down_projection_bytes(self.outline, dense) * (dense.width + attended) // dense.width

    def calibration_bytes(self, longest: int) -> int:
        from moevolve.workers.methods.shared.input_statistics import directions_bytes

        dense = self.space.dense
        # Squared output weights and their norms are float64.
        squares = 2 * 8 * dense.hidden * dense.width
        return max(squares, directions_bytes(dense.hidden, dense.layers * (2 if self._masked else 1)))

    def fitted_maps(self, phase: str) -> tuple[tuple[FitOutline, ...], ...]:
        return tuple(map(self._fits, self.space.even_widths.tolist()))

    def _fits(self, widths: list[int]) -> tuple[FitOutline, ...]:
        dense, width = self.space.dense, widths[0]
        network = FitOutline(dense.width, 1, width / dense.width)
        attention = FitOutline(dense.heads * dense.head_dim, 1, 1.0)
        return (attention, network) if self._masked else (network,)

    @property
    def _masked(self) -> bool:
        return self.space.even_widths.shape[1] > 1

    def counts(self, phase: str) -> tuple[int, int, None, int]:
        space = self.space
        return space.section.experts, 1, None, space.active_parameters(space.even_widths)

    def _changes(self) -> Iterator[int]:
        """Change of FLOPs per token in each layer; masks on the result of a product save nothing."""
        space, dense, network = self.space, self.space.dense, network_flops(self.space.dense)
        for width, *heads in space.even_widths.tolist():
            routed = 2 * space.section.experts * dense.hidden if width < dense.width else 0
            scores = 2 * space.section.components * (dense.hidden + dense.head_dim)
            masked = scores if heads and heads[1] < dense.head_dim else 0
            yield network * width // dense.width - network + routed + masked


TOMOE = GenomeKind(
    section=ToMoeSection,
    make_space=lambda section, facts, phases: ToMoeSpace.of(section, facts),
    costs=ToMoeCosts,
    figures=ToMoeFigures(),
    baselines=BASELINES,
    repairable=True,
)
