"""The costs that kinds share whose candidates keep some of a model's experts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from moevolve.search.genomes.contract.costs import FitOutline, GenomeCosts
from moevolve.search.genomes.experts.space import ExpertsSpace
from moevolve.workers.contract.edits import ROW_TOKENS, PerTaskMeasurement, measurement_parts
from moevolve.workers.methods.eep.edit import ExpertsMeasurement

S = TypeVar("S", bound=ExpertsSpace[Any])


class ExpertsCosts(GenomeCosts[S]):
    """Memory that candidates, their calibration and their repairs take."""

    def buffer_bytes(self, phases: Iterable[str], host: bool, repaired: bool) -> int:
        """Kept experts are copied if merged, repaired, or on the host; of shared experts, repairs copy one matrix."""
        facts, total = self.outline.facts, 0
        if repaired:
            total += len(facts.moe_layers) * facts.shared_neurons * self.outline.hidden * facts.dtype_bytes
        if host or repaired or "merge" in phases:
            total += self.outline.experts_bytes * self.space.retained // self.space.experts
        return total

    def calibration_bytes(self, longest: int) -> int:
        """Measuring experts needs more memory than the thresholds of dynamic skipping."""
        # Imported here because it imports torch, which most users of genomes don't need.
        from moevolve.workers.methods.eep.calibrate_experts import measuring_bytes
        from moevolve.workers.profiling.activations import expert_row_bytes

        outline, facts = self.outline, self.outline.facts
        row_bytes = expert_row_bytes(outline.hidden, outline.intermediate, facts.dtype_bytes)
        tokens = max(longest, ROW_TOKENS)  # short sequences share a row of the batch
        parts = measurement_parts(self.space.measurement)
        found = [part.inner if isinstance(part, PerTaskMeasurement) else part for part in parts]
        measured = [part for part in found if isinstance(part, ExpertsMeasurement)]
        return max((measuring_bytes(each, facts, outline.hidden, row_bytes, tokens) for each in measured), default=0)

    def fitted_maps(self) -> tuple[tuple[FitOutline, ...], ...]:
        """The output projections of a layer's experts are fitted together."""
        width, active = self.largest_layer()
        space, dense = self.space, self.outline.facts.shared_neurons
        fit = FitOutline(space.retained * width + dense, space.retained, active / space.retained, dense)
        routed = self.outline.facts.moe_layers
        return tuple((fit,) if layer in routed else () for layer in range(self.outline.layers))

    def largest_layer(self) -> tuple[int, int]:
        """Return the most neurons of a kept expert, and the most active experts of a layer; see `fitted_maps`."""
        return self.outline.intermediate, self.space.active
