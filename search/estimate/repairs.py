"""What repairing a candidate takes: operations, layer by layer as the worker runs them, and memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from moevolve.search.config.run import RunConfig
from moevolve.search.estimate.counts import described_as
from moevolve.search.genomes.costs import FitOutline, GenomeCosts, ModelWork, full_work
from moevolve.workers.methods.eep.elimination import candidates_of, elimination_bytes, elimination_flops
from moevolve.workers.methods.fitting import NeuronRecipe
from moevolve.workers.methods.repair.apply import KEPT_BYTES
from moevolve.workers.methods.repair.edit import RepairRecipe
from moevolve.workers.methods.repair.ridge import fit_bytes, fit_flops, has_room
from moevolve.workers.profiling.outline import ModelOutline


@dataclass(frozen=True, slots=True)
class RepairWork:
    """Repairing a candidate of one phase as the phase says; those of a repair phase vary it.

    Attributes:
        phase: position of the phase.
        kind: of the phase.
        tokens: that are run and fitted.
        layer_passes: layers that are run.
        forward: operations of these passes, in the model's dtype.
        fitting: operations of features, fits and what they change, in float32 and float64.
        reference: operations of the unedited model on the tokens, once per worker.
        width: features of the largest fit.
        needed: bytes of the largest fit, beside blocks of its features.
        taken: bytes of the largest fit, these blocks and states of the tokens included.
        allowed: bytes that a fit may take.
        streams: bytes of the unedited model's states of all layers, on the host.
        kept: bytes of fitted layers that are kept for candidates to come.
    """

    phase: int
    kind: str
    tokens: int
    layer_passes: int
    forward: int
    fitting: int
    reference: int
    width: int
    needed: int
    taken: int
    allowed: int
    streams: int
    kept: int

    @property
    def flops(self) -> int:
        """Operations per candidate."""
        return self.forward + self.fitting

    @property
    def fault(self) -> str | None:
        """Why its largest fit would be refused, naming the field; None if it wouldn't."""
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
    config: RunConfig, costs: GenomeCosts[Any], outline: ModelOutline, length: float, most: int | None = None
) -> tuple[RepairWork, ...]:
    """What the repairs of a search take, phase by phase.

    Args:
        config: the search.
        costs: of its candidates.
        outline: its model.
        length: mean tokens of a sequence.
        most: tokens of all rows; None takes as many as repairs ask for.
    """
    like = described_as(config.phases)
    found = []
    for position, phase in enumerate(config.phases):
        if phase.repair is not None:
            tokens = phase.repair.tokens if most is None else min(phase.repair.tokens, most)
            counted = _Counted(phase.repair, costs, outline, costs.work(like[phase.kind]), tokens, length)
            found.append(counted.work(position, phase.kind))
    return tuple(found)


def _sloped(fits: Sequence[tuple[FitOutline, ...]], neurons: NeuronRecipe | None) -> tuple[tuple[FitOutline, ...], ...]:
    """The fits of layers whose slots are as wide as a recipe says."""
    slots = [fit for layer in fits for fit in layer if fit.neurons]
    if neurons is None or not slots:
        return tuple(fits)
    own = slots[0].width // slots[0].blocks
    widths = iter(neurons.widths(len(slots), slots[0].pool // own, slots[0].blocks, own))
    return tuple(tuple(_wide(fit, next(widths)) if fit.neurons else fit for fit in layer) for layer in fits)


def _wide(fit: FitOutline, width: int) -> FitOutline:
    return replace(fit, width=fit.blocks * width, flops=fit.flops * width * fit.blocks // fit.width)


class _Counted:
    """Counts one recipe's work."""

    def __init__(
        self,
        recipe: RepairRecipe,
        costs: GenomeCosts[Any],
        outline: ModelOutline,
        edited: ModelWork,
        tokens: int,
        length: float,
    ) -> None:
        self._recipe, self._outline, self._edited, self._tokens = recipe, outline, edited, tokens
        self._full = full_work(outline)
        self._fits = _sloped(costs.fits(), recipe.neurons)
        # Of one layer, on all pairs of a sequence.
        self._attention = int(outline.attention_flops * tokens * length) // len(outline.layers)

    def work(self, position: int, kind: str) -> RepairWork:
        hidden, size, tokens = self._outline.hidden, self._outline.facts.dtype_bytes, self._tokens
        fits = [fit for layer in self._fits for fit in layer]
        passes = list(self._passes())
        largest = max(fits, key=self._needed)
        states = tokens * hidden * size
        kept = [4 * fit.width * hidden + states for fit in fits]
        return RepairWork(
            phase=position,
            kind=kind,
            tokens=tokens,
            layer_passes=len(passes),
            forward=sum(passes),
            fitting=sum(map(self._fitting, fits)),
            reference=sum(self._layer(self._full, layer) for layer in range(len(self._fits))),
            width=largest.width,
            needed=self._needed(largest),
            # Streams before and behind the layer and what goes into it, and three times in float32 what is missing.
            taken=max(map(self._taken, fits)) + 4 * states + 3 * 4 * tokens * hidden,
            allowed=self._allowed,
            streams=(len(self._fits) + 1) * states,
            kept=min(KEPT_BYTES, sum(each for each in kept if each <= KEPT_BYTES)),
        )

    @property
    def _allowed(self) -> int:
        return self._recipe.memory_mb << 20

    def _passes(self) -> Iterator[int]:
        """Operations of every layer that is run, in the order of the applicator."""
        for layer, fits in enumerate(self._fits):
            edited, full = self._layer(self._edited, layer), self._layer(self._full, layer)
            if not fits:
                yield edited
            for place, fit in enumerate(fits):
                yield edited
                yield from [edited] * self._fillings(fit)
                # The stream behind a whole layer of the unedited model is known.
                if self._recipe.target == "local" or place < len(fits) - 1:
                    yield full

    def _layer(self, work: ModelWork, layer: int) -> int:
        return (work.layers[layer].outside + work.layers[layer].block) * self._tokens + self._attention

    def _fitting(self, fit: FitOutline) -> int:
        """Features, to fit and to apply where they aren't kept; the fit; what is put on the stream; neurons, rows."""
        tokens, hidden = self._tokens, self._outline.hidden
        made = 1 if fit.width <= tokens or self._features(fit) <= (self._allowed - self._needed(fit)) // 2 else 2
        operations = made * fit.flops * tokens
        operations += fit_flops(fit.width, tokens, hidden, len(self._recipe.strengths), fit.blocks, fit.density)
        operations += int(2 * fit.density * tokens * fit.width * hidden)
        fillings = self._fillings(fit)
        if not fillings:
            return operations
        return operations * fillings + fit.neurons * tokens + self._rows(fit) + self._eliminating(fit)

    def _fillings(self, fit: FitOutline) -> int:
        """How often it is filled with neurons of all experts and fitted: by worth, and by what a fit leaves."""
        if self._recipe.neurons is None or not fit.neurons:
            return 0
        return 2 if self._candidates(fit) else 1

    def _rows(self, fit: FitOutline) -> int:
        """Fitting the router's."""
        neurons, hidden = self._recipe.neurons, self._outline.hidden
        if neurons is None or neurons.router == "kept":
            return 0
        return 2 * self._tokens * hidden * (hidden + 2 * fit.blocks) + hidden**3 // 3

    def _eliminating(self, fit: FitOutline) -> int:
        width, hidden, tokens = fit.width // fit.blocks, self._outline.hidden, int(fit.density * self._tokens)
        made = int(fit.flops / (fit.density * fit.width))
        count = self._candidates(fit)
        return fit.blocks * elimination_flops(width, count, fit.pool, tokens, hidden, made) if count else 0

    def _candidates(self, fit: FitOutline) -> int:
        """For every slot; 0 where there are no more of them than a slot has neurons, so none go."""
        neurons = self._recipe.neurons
        if neurons is None or not fit.neurons:
            return 0
        width, tokens = fit.width // fit.blocks, int(fit.density * self._tokens)
        count = candidates_of(width, neurons, tokens, self._outline.hidden, self._allowed)
        return count if count > width else 0

    def _needed(self, fit: FitOutline) -> int:
        return fit_bytes(fit.width, self._tokens, self._outline.hidden)

    def _features(self, fit: FitOutline) -> int:
        return int(4 * fit.density * self._tokens * fit.width)

    def _taken(self, fit: FitOutline) -> int:
        """With its features, and what making a block of them takes; never more than is allowed."""
        tokens, hidden = int(fit.density * self._tokens), self._outline.hidden
        fitting = self._needed(fit) + self._features(fit) + 28 * (tokens + hidden) * fit.width // fit.blocks
        return min(self._allowed, max(fitting, elimination_bytes(self._candidates(fit), tokens, hidden)))
