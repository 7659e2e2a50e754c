"""Applying repaired edits to a resident model: first the edit itself, then the fits of its layers in order."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moevolve.evaluators.errors import UserError
from moevolve.workers.contract.edits import Edit, Tokens
from moevolve.workers.contract.methods import Applicator, ModelParts
from moevolve.workers.methods.repair.edit import RepairedEdit
from moevolve.workers.methods.repair.ridge import Fit, FitOutcome, fit_ridge
from moevolve.workers.methods.repair.streams import ResidualStreams
from moevolve.workers.methods.shared.outputs import (
    Features,
    LayerOutput,
    NeuronSelectingOutput,
    NeuronSelection,
    Recorded,
    Repairable,
)

_CHECKED = 8
"""One sequence in this many is held out: it isn't fitted, but used to check fits."""
FIT_CACHE_BYTES = 512 << 20
"""Limit on the bytes of fitted layers that are cached for later candidates."""

_TARGETS = {
    "global": "the unedited model's residual stream behind each layer",
    "local": "what each unedited layer makes of the same input",
}
"""Descriptions of a recipe's targets."""


class RepairApplicator:
    """Ridge fits of layers' outputs to the unedited model's (`moevolve.workers.methods.repair.ridge`).

    A layer's fit depends on the layers up to it, the recipe and the rows. So a candidate whose first layers equal those
    of an earlier one reuses their fits, bit for bit.

    Attributes:
        outcomes: Results of the current edit's fits, one per layer output; None if a fit changed nothing.
        selections: Neurons of its kept experts by decoder layer; empty if they keep their own.
    """

    def __init__(self, parts: ModelParts) -> None:
        """Fit nothing yet."""
        self._parts = parts
        self._base: Applicator | None = None
        self._edit: RepairedEdit | None = None
        self._reference: _Reference | None = None
        self._cache = _FitCache(FIT_CACHE_BYTES)
        self.outcomes: list[FitOutcome | None] = []
        self.selections: dict[int, NeuronSelection] = {}

    def apply(self, edit: Edit) -> None:
        """See `Applicator.apply`."""
        assert isinstance(edit, RepairedEdit)
        self.revert()
        base = self._parts.applicator(type(edit.base))
        if not isinstance(base, Repairable):
            raise UserError(f"edits of kind {type(edit.base).__name__} can't be repaired")
        reference = self._reference_for(edit)
        self._base = base
        base.apply(edit.base)
        # Inference mode only from here on: the base edit's tensors may become exported parameters, which inference
        # tensors can't.
        with torch.inference_mode():
            outputs = base.outputs()
            fitted = _LayerFits(edit, reference, self._cache).run(outputs)
        self.outcomes = [each.outcome for each in fitted]
        self.selections = {
            output.layer: each.selection
            for output, each in zip(outputs, fitted, strict=True)
            if each.selection is not None
        }
        self._edit = edit

    def revert(self) -> None:
        """See `Applicator.revert`."""
        if self._base is not None:
            self._base.revert()
            self._base = None

    def report(self) -> tuple[tuple[str, str], ...]:
        """See `ReportingApplicator`."""
        assert self._edit is not None and self._reference is not None, "there is no edit on the model"
        checked, repaired = self._reference.checked, [each for each in self.outcomes if each is not None]
        held = int(checked.sum())
        ridge_lambdas = Counter(each.ridge_lambda for each in repaired)
        left = [each.after / each.before for each in repaired] or [1.0]
        return (
            ("repair", f"ridge regression of output projections toward {_TARGETS[self._edit.recipe.target]}"),
            *self._selection_rows(),
            ("repaired outputs", f"{len(repaired)} of {len(self.outcomes)}"),
            ("fitted on", f"{len(checked) - held:,} tokens of calibration prompts, checked on {held:,} of others"),
            ("ridge lambdas", ", ".join(f"{each:g} ({count})" for each, count in sorted(ridge_lambdas.items())) or "-"),
            ("squared error on checked tokens", f"{min(left):.1%} to {max(left):.1%} of what it was"),
        )

    def arrays(self) -> dict[str, NDArray[np.int32]]:
        """See `ReportingApplicator`."""
        return {
            f"layers.{layer}": each.neurons.to(torch.int32).cpu().numpy() for layer, each in self.selections.items()
        }

    def _selection_rows(self) -> Iterator[tuple[str, str]]:
        if self.selections:
            yield "neurons", "chosen among all experts of a layer; see neurons.npz"
        fitted = sum(each.rows is not None for each in self.selections.values())
        if fitted:
            yield (
                "router rows",
                f"fitted to the routing of groups of experts, in {fitted} of {len(self.selections)} layers",
            )

    @torch.inference_mode()
    def _reference_for(self, edit: RepairedEdit) -> _Reference:
        """The unedited model's residual streams on an edit's rows. Call it while the model is unedited."""
        sequences = edit.rows.first(edit.recipe.tokens)
        if self._reference is None or self._reference.sequences != sequences:
            self._reference = None  # free its memory before the next one is made
            self._reference = _Reference(ResidualStreams(self._parts.model, sequences), sequences)
        return self._reference


class _Reference:
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
class _FittedLayer:
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


class _FitCache:
    """Fitted layers by key, the least recently used ones evicted beyond a limit of bytes."""

    def __init__(self, limit: int) -> None:
        self._limit, self._nbytes = limit, 0
        self._layers: OrderedDict[str, _FittedLayer] = OrderedDict()

    def get(self, key: str) -> _FittedLayer | None:
        found = self._layers.get(key)
        if found is not None:
            self._layers.move_to_end(key)
        return found

    def put(self, key: str, fitted: _FittedLayer) -> None:
        if fitted.nbytes > self._limit:
            return
        self._layers[key] = fitted
        self._nbytes += fitted.nbytes
        while self._nbytes > self._limit:
            self._nbytes -= self._layers.popitem(last=False)[1].nbytes


class _LayerFits:
    """The fits of one edit, from the first layer to the last."""

    def __init__(self, edit: RepairedEdit, reference: _Reference, cache: _FitCache) -> None:
        self._recipe, self._reference, self._cache = edit.recipe, reference, cache
        self._layer_hashes = edit.layer_hashes
        self._memory = edit.recipe.memory_mb << 20

    def run(self, outputs: Sequence[LayerOutput]) -> list[_FittedLayer]:
        state, layer, fits = self._reference.states[0], 0, []
        for output, key in zip(outputs, self._keys(outputs), strict=True):
            for between in range(layer, output.layer):
                state, _ = self._reference.streams.run_layer(between, state)
            layer = output.layer
            fitted = self._reuse(output, key) or self._fit(output, state, key)
            if output.next_part is None:
                state, layer = fitted.state, layer + 1
            fits.append(fitted)
        return fits

    def _keys(self, outputs: Sequence[LayerOutput]) -> list[str]:
        """Cache keys: the hash of the layers up to an output's layer, and the number of the output in its layer."""
        places = {layer: place for place, layer in enumerate(dict.fromkeys(output.layer for output in outputs))}
        parts = Counter[int]()
        keys = []
        for output in outputs:
            keys.append(f"{self._layer_hashes[places[output.layer]]} {parts[output.layer]}")
            parts[output.layer] += 1
        return keys

    def _reuse(self, output: LayerOutput, key: str) -> _FittedLayer | None:
        """Apply a cached fit, if there is one."""
        fitted = self._cache.get(key)
        if fitted is not None:
            if fitted.selection is not None:
                assert isinstance(output, NeuronSelectingOutput)
                output.use_neurons(fitted.selection)
            for columns, change in fitted.changes:
                output.add(columns, change)
        return fitted

    def _fit(self, output: LayerOutput, state: Tensor, key: str) -> _FittedLayer:
        target = self._target(output, state)
        with output.recording() as records:
            make = self._try_fit if self._recipe.neurons is None else self._try_selections
            trial = make(output, state, records, target)
        fitted = self._apply(trial, output)
        if trial.fit is None or fitted.changes:
            self._cache.put(key, fitted)
        return fitted

    def _try_selections(self, output: LayerOutput, state: Tensor, records: list[Recorded], target: Tensor) -> _Trial:
        """Fit the neurons of largest importance, then those that pruning leads to. Keep what has the smaller error."""
        recipe = self._recipe.neurons
        assert recipe is not None
        if not isinstance(output, NeuronSelectingOutput):
            raise UserError("repair.neurons: only experts of a mixture can be filled with neurons of others")
        _, recorded = self._reference.streams.run_layer(output.layer, state, records, output.next_part)
        important = output.select_neurons(recorded, recipe, self._memory)
        first = self._try_fit(output, state, records, target, important)
        if recipe.candidates == 1:
            return first
        residual = first.after.float() + first.residual - self._apply(first, output).state.float()
        ridge_lambda = first.fit.outcome.ridge_lambda if first.fit else min(self._recipe.ridge_lambdas)
        fitted = ~self._reference.checked.to(residual.device)
        pruned = output.prune_neurons(first.recorded, important, residual, fitted, ridge_lambda, recipe, self._memory)
        if not torch.equal(pruned.neurons, important.neurons):
            output.use_neurons(pruned)
            trial = self._try_fit(output, state, records, target, pruned)
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
        selection: NeuronSelection | None = None,
    ) -> _Trial:
        """Fit the neurons in place without changing them."""
        after, recorded = self._reference.streams.run_layer(output.layer, state, records, output.next_part)
        residual = target.to(after.device).float() - after.float()
        features, checked = output.features(recorded), self._reference.checked.to(after.device)
        fit = fit_ridge(features, residual, checked, self._recipe.ridge_lambdas, self._memory)
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

    def _apply(self, trial: _Trial, output: LayerOutput) -> _FittedLayer:
        """Change the layer's weights, and compute the residual stream with the rounded change."""
        features, after, fit = trial.features, trial.after, trial.fit
        if fit is None:
            return _FittedLayer(trial.selection, (), after, None)
        cacheable = 4 * features.width * after.shape[1] + after.nbytes <= FIT_CACHE_BYTES
        changes, stream = [], after.to(torch.float32, copy=True)
        for block in fit.blocks or features.blocks(self._memory // 2):
            change = fit.change(block)
            stream[block.tokens] += block.values @ output.add(block.columns, change)
            if cacheable:
                changes.append((block.columns, change))
        return _FittedLayer(trial.selection, tuple(changes), stream.to(after.dtype), fit.outcome)
