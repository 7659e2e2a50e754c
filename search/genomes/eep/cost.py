"""What EEP candidates cost: fewer experts, or merged ones, behind routers over all of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import comb
from typing import TYPE_CHECKING

from moevolve.search.genomes.costs import EditTraffic, FitOutline, GenomeCosts, LayerWork, ModelWork, full_work
from moevolve.search.genomes.eep.space import EepSpace

if TYPE_CHECKING:
    from moevolve.workers.profiling.outline import LayerOutline


class EepCosts(GenomeCosts[EepSpace]):
    """Routers run over all n experts; a continuous mapping is applied to their scores, or in logits space folded in.

    Originals on the device: pruning moves nothing, merging reads n experts and writes n'. Originals on the host:
    pruning brings n' experts over, merging all n of them, and writes n'.
    """

    def work(self, phase: str) -> ModelWork:
        layers = tuple(self._layer(layer, phase) for layer in self.outline.layers)
        return replace(full_work(self.outline), layers=layers, retained=self.space.retained, active=self.space.active)

    def counts(self, phase: str) -> tuple[int, int, int, int]:
        return self.space.retained, self.space.active, *self.space.parameters(one_hot=phase == "prune")

    def different(self, phase: str) -> int | None:
        if phase != "prune":
            return None
        subsets = self.space.subsets
        size, kept = subsets.experts // subsets.parts, subsets.retained // subsets.parts
        return comb(size, kept) ** (subsets.parts * self.space.groups)

    def buffer_bytes(self, phases: Iterable[str], host: bool, repaired: bool) -> int:
        """Copies of retained experts where originals are on the host or copies fitted, merged ones if there are any."""
        return self._kept_bytes if host or repaired or "merge" in phases else 0

    def edit_traffic(self, phase: str, host: bool, repaired: bool) -> EditTraffic:
        if phase == "merge":
            return EditTraffic(self.outline.experts_bytes, self._kept_bytes, copied=False)
        kept = self._kept_bytes if host or repaired else 0
        return EditTraffic(kept, kept, copied=True)

    def fits(self) -> tuple[tuple[FitOutline, ...], ...]:
        """The output projections of all retained experts of a layer at once."""
        return tuple((self._fit(layer),) if layer.expert else () for layer in self.outline.layers)

    def _fit(self, layer: LayerOutline) -> FitOutline:
        space, neurons = self.space, self.outline.intermediate
        # Gates and ups are two of an expert's three matrices. What a neuron is worth is summed for every slot.
        chosen = space.facts.active * (2 * layer.expert // 3 + 2 * space.retained * neurons)
        made = space.active * 2 * layer.expert // 3
        share, pool = space.active / space.retained, space.experts * neurons
        return FitOutline(space.retained * neurons, space.retained, share, made, chosen, pool)

    @property
    def _kept_bytes(self) -> int:
        return self.outline.experts_bytes * self.space.retained // self.space.experts

    def _layer(self, layer: LayerOutline, phase: str) -> LayerWork:
        space, work = self.space, LayerWork.of(layer, self.space.active)
        if phase != "merge" or not layer.expert:
            return work
        folded = layer.router * space.retained // space.experts - layer.router
        mapped = 2 * space.retained * space.experts
        return replace(work, block=work.block + (folded if space.router_space == "logits" else mapped))
