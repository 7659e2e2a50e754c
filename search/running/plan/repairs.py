"""Memory for repairing candidates, and which repairs are refused for lack of it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pydantic import computed_field

from moevolve.search.config.run import RunConfig
from moevolve.search.genomes.contract.costs import FitOutline, SpaceCosts
from moevolve.workers.methods.repair.edit import RepairSettings
from moevolve.workers.methods.repair.fits import FIT_CACHE_BYTES
from moevolve.workers.methods.repair.inputs import token_bytes, vector_bytes
from moevolve.workers.methods.repair.ridge import fit_bytes, has_room
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
        width: Number of features of the largest fit.
        needed: Bytes of the largest fit, without blocks of its features.
        taken: Bytes of the largest fit with blocks of its features, or of running a layer; with hidden states of the
            tokens.
        allowed: Bytes that a fit may take.
        streams: Host bytes of the unedited model's hidden states behind every layer.
        kept: Bytes of fitted layers that are kept for later candidates.
        cached: Number of candidates that are kept whole, so that another request need not repair them again.
    """

    phase: int
    kind: str
    tokens: int
    width: int
    needed: int
    taken: int
    allowed: int
    streams: int
    kept: int
    cached: int

    @computed_field  # type: ignore[prop-decorator]
    @property
    def fault(self) -> str | None:
        """Reason for which the largest fit would be refused, naming the setting; None if it has enough memory."""
        if has_room(self.needed, self.allowed):
            return None
        least = self.allowed >> 20
        while not has_room(self.needed, least << 20):
            least += max(1, least // 64)
        return (
            f"phases.{self.phase}.repair.memory_mb: fitting {self.width:,} features on {self.tokens:,} tokens takes "
            f"{self.needed / 2**20:,.0f} MiB and more, and {self.allowed >> 20:,} are allowed; allow {least:,}, or fit "
            "fewer tokens"
        )


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


def _block_width(fit: FitOutline) -> int:
    return (fit.width - fit.dense) // fit.blocks


class _RepairCounter:
    """Counts the memory of repairs with the same settings."""

    def __init__(
        self, settings: RepairSettings, fits: Sequence[tuple[FitOutline, ...]], outline: ModelOutline, tokens: int
    ) -> None:
        self._settings, self._fits, self._outline, self._tokens = settings, fits, outline, tokens

    def work(self, position: int, kind: str) -> RepairWork:
        hidden, tokens = self._outline.hidden, self._tokens
        fits = [fit for layer in self._fits for fit in layer]
        largest = max(fits, key=self._needed)
        states = tokens * hidden * self._outline.facts.dtype_bytes
        # Fits of a candidate stay while another is fitted. Of a layer's fits only the last keeps the state after it.
        changes = [(self._changed(fit), (fit is layer[-1]) * states) for layer in self._fits for fit in layer]
        kept = sum(change + state for change, state in changes if change <= FIT_CACHE_BYTES)
        taken = max(map(self._taken if self._outline.facts.dense is None else self._dense_taken, fits))
        if self._settings.input_rounds:
            taken = max(taken, *map(self._inputs_taken, fits))
        return RepairWork(
            phase=position,
            kind=kind,
            tokens=tokens,
            width=largest.width,
            needed=max(self._needed(largest), *map(self._vectors, fits)),
            taken=max(taken, self._running(max(map(_block_width, fits)))),
            allowed=self._settings.memory_mb << 20,
            streams=(len(self._fits) + 1) * states,
            kept=min(FIT_CACHE_BYTES, 2 * kept),
            cached=FIT_CACHE_BYTES // max(1, sum(change for change, _ in changes)),
        )

    def _changed(self, fit: FitOutline) -> int:
        """Bytes of a fit's changes of the output projections, one by round, and of the gate and up projections."""
        hidden, rounds = self._outline.hidden, self._settings.input_rounds
        inputs = fit.blocks * self._rows(fit) * hidden * self._outline.facts.dtype_bytes if rounds else 0
        return 4 * fit.width * hidden * (1 + rounds) + inputs

    def _inputs_taken(self, fit: FitOutline) -> int:
        """Return the bytes of fitting the gate and up projections of an expert; see `_taken`."""
        tokens = int(fit.density * self._tokens) * token_bytes(self._rows(fit), self._outline.hidden)
        room = min(self._settings.memory_mb << 20, self._vectors(fit) + tokens)
        # The target, the stream, what is left of the difference, and the stream's own dtype.
        return room + 4 * 4 * self._tokens * self._outline.hidden

    def _vectors(self, fit: FitOutline) -> int:
        return vector_bytes(self._rows(fit), self._outline.hidden) if self._settings.input_rounds else 0

    def _rows(self, fit: FitOutline) -> int:
        """Return the rows of the gate and up projections of an expert or a dense network."""
        facts = self._outline.facts
        parameters = facts.neuron_parameters if facts.dense is None else facts.dense.neuron_parameters
        return _block_width(fit) * (parameters // self._outline.hidden - 1)

    def _needed(self, fit: FitOutline) -> int:
        return fit_bytes(fit.width, self._tokens, self._outline.hidden)

    def _running(self, width: int) -> int:
        """Bytes of running a layer on batches of the tokens: its output, what is recorded, and a batch's activations.

        At most `width` neurons run at once, apart from an attention.
        """
        outline, size = self._outline, self._outline.facts.dtype_bytes
        network = (STREAMS * outline.hidden + 3 * width) * size
        batch = min(self._tokens, BATCH_COLUMNS) * max(network, outline.attention_bytes)
        return 2 * self._tokens * outline.hidden * size + batch

    def _dense_taken(self, fit: FitOutline) -> int:
        """Return the bytes of fitting a network or an attention of a dense model; see `_taken`.

        With the features there are the state after the layer, also in float32, and its input; in a fit the residual and
        this times the tokens' weights, and later the state with the fit. The state before the layer is a kept one.
        """
        hidden, size, width = self._outline.hidden, self._outline.facts.dtype_bytes, _block_width(fit)
        tokens, state = int(fit.density * self._tokens), 4 * self._tokens * hidden
        block = 4 * tokens * width
        # Inputs, then gate, up and an activation, or the product before and after it is widened, and a mask.
        making = size * tokens * hidden + tokens * width * (max(3 * size, size + 4) + 1)
        fitting = self._needed(fit) + (1 + (self._settings.answer_weight != 1)) * state
        changes = 4 * hidden * fit.width
        if fit.width <= self._tokens:
            held = 4 * self._tokens * fit.width
            # A block is made before there is room for the first one, and beside the one before it.
            features = max(making, held + block) if fit.blocks == 1 else held + block + making
            taken = max(features, fitting, held + state + 2 * changes + 16 * hidden * width)
        else:
            applying = max(making, block + 8 * tokens * hidden, 16 * hidden * width)
            taken = max(fitting + making, state + changes + applying)
        states = self._tokens * hidden * (2 * size + (4 if size < 4 else 0))
        return min(self._settings.memory_mb << 20, taken) + states

    def _taken(self, fit: FitOutline) -> int:
        """Bytes of a fit with its features, of making the largest block of them, or of applying the fitted change.

        With it there are states before and behind the layer and its input, and in float32 the residual to fit, three
        times, and times the tokens' weights.
        """
        tokens, hidden = int(fit.density * self._tokens), self._outline.hidden
        size, width = self._outline.facts.dtype_bytes, _block_width(fit)
        # Rows of gate and up; gate, up and their product, which is widened to float32, weighted and sorted by token.
        making = 2 * size * hidden * width + (3 * size + 12) * tokens * width
        # The block's change, its weights before and after in float32, and what the change came to in their dtype.
        adding = 16 * hidden * width
        change = 4 * fit.width * hidden
        kept = change if change <= FIT_CACHE_BYTES else 0
        applying = 4 * hidden * min(fit.width, self._tokens) + kept + adding
        if fit.width <= self._tokens:
            # One matrix, which is a part of the system.
            features = 4 * self._tokens * fit.width
            fitting = max(features + max(making, applying), self._needed(fit))
        else:
            features = int(4 * self._tokens * (fit.density * fit.blocks * width + fit.dense))
            fitting = features + max(self._needed(fit) + making, applying)
        states = self._tokens * hidden * (4 * size + 4 * (3 + (self._settings.answer_weight != 1)))
        return min(self._settings.memory_mb << 20, fitting) + states
