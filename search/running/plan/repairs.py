"""Memory for repairing candidates."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from moevolve.search.config.run import RunConfig
from moevolve.search.genomes.contract.costs import FitOutline, SpaceCosts
from moevolve.workers.methods.repair.edit import RepairSettings
from moevolve.workers.methods.repair.fits import FIT_CACHE_BYTES
from moevolve.workers.methods.repair.inputs import inputs_bytes
from moevolve.workers.methods.repair.ridge import fit_bytes
from moevolve.workers.methods.shared.passes import BATCH_COLUMNS
from moevolve.workers.profiling.activations import STREAMS
from moevolve.workers.profiling.outline import ModelOutline


@dataclass(frozen=True, slots=True)
class RepairWork:
    """Memory for repairing a candidate of one phase by the phase's settings.

    Attributes:
        phase: Position of the phase in the run.
        kind: Kind of the phase.
        tokens: Number of calibration tokens that are run and fitted on.
        taken: Bytes of the largest fit, or of running a layer, with hidden states of the tokens.
        streams: Host bytes of the unedited model's hidden states behind every layer.
        kept: Bytes of fitted layers that are kept for later candidates.
        cached: Number of candidates that are kept whole, so that another request need not repair them again.
    """

    phase: int
    kind: str
    tokens: int
    taken: int
    streams: int
    kept: int
    cached: int


def repair_works(
    config: RunConfig, costs: SpaceCosts, outline: ModelOutline, most: int | None = None
) -> tuple[RepairWork, ...]:
    """Count the memory of a search's repairs, phase by phase.

    Args:
        config, costs, outline: The search, the costs of its candidates, and its model.
        most: Number of tokens in all calibration rows; None takes as many as the repairs ask for.
    """
    found = []
    for position, phase in enumerate(config.phases):
        if phase.repair is not None:
            tokens = phase.repair.tokens if most is None else min(phase.repair.tokens, most)
            found.append(_RepairCounter(phase.repair, costs.fitted_maps(), outline, tokens).work(position, phase.kind))
    return tuple(found)


def candidates_kept(works: Iterable[RepairWork]) -> int:
    """Return the number of candidates that a worker need not repair again in another request; many without repairs."""
    return min((work.cached for work in works), default=sys.maxsize)


class _RepairCounter:
    """Counts the memory of repairs with the same settings."""

    def __init__(
        self, settings: RepairSettings, fits: Sequence[tuple[FitOutline, ...]], outline: ModelOutline, tokens: int
    ) -> None:
        self._settings, self._fits, self._outline, self._tokens = settings, fits, outline, tokens

    def work(self, position: int, kind: str) -> RepairWork:
        tokens, fits = self._tokens, [fit for layer in self._fits for fit in layer]
        states = tokens * self._outline.hidden * self._outline.facts.dtype_bytes
        # Fits of a candidate stay while another is fitted. Of a layer's fits only the last keeps the state after it.
        changes = [(self._changed(fit), (fit is layer[-1]) * states) for layer in self._fits for fit in layer]
        kept = sum(change + state for change, state in changes if change <= FIT_CACHE_BYTES)
        return RepairWork(
            phase=position,
            kind=kind,
            tokens=tokens,
            taken=max(*map(self._taken, fits), self._running(max(fit.block for fit in fits))),
            streams=(len(self._fits) + 1) * states,
            kept=min(FIT_CACHE_BYTES, 2 * kept),
            cached=FIT_CACHE_BYTES // max(1, sum(change for change, _ in changes)),
        )

    def _changed(self, fit: FitOutline) -> int:
        """Bytes of the output projections that a fit changes, and of the gate and up projections."""
        rows = fit.blocks * self._rows(fit) if self._settings.input_rounds else 0
        return (fit.width + rows) * self._outline.hidden * self._outline.facts.dtype_bytes

    def _rows(self, fit: FitOutline) -> int:
        """Return the rows of the gate and up projections of an expert or a dense network."""
        facts = self._outline.facts
        parameters = facts.neuron_parameters if facts.dense is None else facts.dense.neuron_parameters
        return fit.block * (parameters // self._outline.hidden - 1)

    def _running(self, width: int) -> int:
        """Bytes of running a layer on batches of the tokens: its output, what is recorded, and a batch's activations.

        At most `width` neurons run at once, apart from an attention.
        """
        outline, size = self._outline, self._outline.facts.dtype_bytes
        network = (STREAMS * outline.hidden + 3 * width) * size
        batch = min(self._tokens, BATCH_COLUMNS) * max(network, outline.attention_bytes)
        return 2 * self._tokens * outline.hidden * size + batch

    def _taken(self, fit: FitOutline) -> int:
        """Bytes of a fit with its features, and of the states before and behind the layer.

        Of the states there are the network's input and the stream behind it, also in float32, and the residual.
        """
        tokens, hidden, size = self._tokens, self._outline.hidden, self._outline.facts.dtype_bytes
        features = int(size * tokens * (fit.density * (fit.width - fit.dense) + fit.dense))
        lambdas = len(self._settings.ridge_lambdas)
        fitting = fit_bytes(fit.width, int(fit.density * tokens), fit.block, tokens, hidden, lambdas)
        if self._settings.input_rounds:
            rows, own = self._rows(fit), int(fit.density * tokens)
            fitting = max(fitting, inputs_bytes(rows, own, hidden))
        return features + fitting + tokens * hidden * (2 * size + (4 if size < 4 else 0) + 4)
