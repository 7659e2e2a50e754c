"""The fits of one edit's layers, one layer output after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby

import torch
from torch import Tensor

from moevolve.evaluators.errors import UserError
from moevolve.workers.contract.capacity import release_freed_memory
from moevolve.workers.contract.edits import Tokens
from moevolve.workers.methods.repair.edit import RepairedEdit
from moevolve.workers.methods.repair.fit_cache import FitCache, FittedLayer
from moevolve.workers.methods.repair.inputs import fit_inputs
from moevolve.workers.methods.repair.ridge import Fit, FitOutcome, LayerSystem, fit_ridge
from moevolve.workers.methods.repair.streams import ResidualStreams
from moevolve.workers.methods.shared.outputs import (
    Features,
    LayerOutput,
    NetworksOutput,
    NeuronSelectingOutput,
    PartOutput,
    Recorded,
)

# One sequence in this many is held out: it isn't fitted, but used to check fits.
_CHECKED = 8


class Reference:
    """The unedited model's residual stream before every layer and after the last, on the host.

    Attributes:
        answering: Mask of the tokens that predict an answer's tokens, bool [tokens].
        states: Residual streams, layers + 1 tensors [tokens, hidden].
        checked: Mask of held-out tokens, bool [tokens].
    """

    def __init__(self, streams: ResidualStreams, sequences: Sequence[Tokens], answering: Tensor) -> None:
        self.streams, self.sequences, self.answering = streams, sequences, answering
        state = streams.embeddings()
        self.states = [state.cpu()]
        for layer in range(streams.layers):
            state, _ = streams.run_layer(layer, state)
            self.states.append(state.cpu())
        # With fewer sequences than `_CHECKED`, the last one is held out.
        held_out = range(_CHECKED - 1, len(sequences), _CHECKED) or (len(sequences) - 1,)
        self.checked = torch.tensor([place in held_out for place, tokens in enumerate(sequences) for _ in tokens])

    def token_weights(self, answer_weight: float) -> Tensor | None:
        """Return the weights of tokens in a fit, float32 [tokens] of mean 1; None if all are 1."""
        if answer_weight == 1 or not self.answering.any():
            return None
        weights = torch.where(self.answering, answer_weight, 1.0)
        return weights / weights.mean()


@dataclass(frozen=True, slots=True, eq=False)
class _Tokens:
    """What the fits of a layer need to know of the tokens.

    Attributes:
        recorded: Tensors recorded in a pass through the layer.
        after: Residual stream after the layer, [tokens, hidden]; without the routed experts if neurons are selected.
        target: Target of that stream, [tokens, hidden].
        checked: Mask of held-out tokens, bool [tokens].
        weights: Weights of tokens, float32 [tokens]; None for 1.
    """

    recorded: Recorded
    after: Tensor
    target: Tensor
    checked: Tensor
    weights: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class _Trial:
    """A fit of a layer with some neurons, not yet applied.

    Attributes:
        selection: See `FittedLayer`.
        features: Features that are fitted.
        after: Residual stream after the layer, without the fit, [tokens, hidden].
        fit: The fit; None if none reduces the error.
        error: Squared error on held-out tokens with the fit.
    """

    selection: Tensor | None
    features: Features
    after: Tensor
    fit: Fit | None
    error: float


class LayerFits:
    """The fits of one edit, from the first layer to the last; `cache` has those of other candidates.

    Attributes:
        outcomes: Results so far, one per layer output; None if a fit changed nothing.
    """

    def __init__(
        self, edit: RepairedEdit, outputs: Sequence[LayerOutput], reference: Reference, cache: FitCache
    ) -> None:
        self._settings, self._reference, self._cache = edit.settings, reference, cache
        self._layer_hashes = edit.layer_hashes
        self._weights = reference.token_weights(edit.settings.answer_weight)
        self.outcomes: list[FitOutcome | None] = []
        self._outputs, self._keys = outputs, self._keys_of(outputs)
        self._reused = self._reusable()
        # The residual stream before a layer.
        self._state, self._layer = reference.states[0], 0

    def fit(self, layer: int) -> None:
        """Fit the outputs of one decoder layer; those before must be fitted."""
        while len(self.outcomes) < len(self._outputs) and self._outputs[len(self.outcomes)].layer == layer:
            place = len(self.outcomes)
            output = self._outputs[place]
            output.prepare(self._settings.neurons)
            if place < len(self._reused):
                fitted = self._reused[place]
                self._reuse(output, fitted)
            else:
                for between in range(self._layer, layer):
                    self._state, _ = self._reference.streams.run_layer(between, self._state)
                self._layer = layer
                fitted = self._fit(output, self._state)
                if output.next_part is not None:
                    fitted = replace(fitted, state=self._behind(place))
                self._cache.put(self._keys[place], fitted)
            if fitted.state is not None:
                # On the host, where those of other candidates wait for their turns, too.
                self._state, self._layer = fitted.state.cpu(), layer + 1
            self.outcomes.append(fitted.outcome)

    def _behind(self, place: int) -> Tensor | None:
        """Return the stream behind the layer of an output whose own stream isn't that; None if others follow in it."""
        layer = self._outputs[place].layer
        if any(each.layer == layer for each in self._outputs[place + 1 :]):
            return None
        return self._reference.streams.run_layer(layer, self._state)[0]

    def _reusable(self) -> list[FittedLayer]:
        """Cached fits of the first outputs: of all, or up to one with the state that the next layer begins with."""
        found: list[FittedLayer] = []
        for key in self._keys:
            fitted = self._cache.get(key)
            if fitted is None:
                while found and found[-1].state is None:
                    found.pop()
                break
            found.append(fitted)
        return found

    def _keys_of(self, outputs: Sequence[LayerOutput]) -> list[str]:
        """Cache keys: hash of the layers up to an output's, and the number of the output in its layer."""
        keys: list[str] = []
        by_layer = groupby(outputs, key=lambda output: output.layer)
        for (_, parts), layer_hash in zip(by_layer, self._layer_hashes, strict=True):
            keys.extend(f"{layer_hash}-{part}" for part, _ in enumerate(parts))
        return keys

    def _reuse(self, output: LayerOutput, fitted: FittedLayer) -> None:
        """Apply a cached fit."""
        device = self._reference.streams.device
        if fitted.selection is not None:
            assert isinstance(output, NeuronSelectingOutput)
            output.use_neurons(fitted.selection.to(device))
        if fitted.inputs:
            assert isinstance(output, NetworksOutput)
            output.use_inputs(fitted.inputs)
        for columns, weights in fitted.weights:
            output.use(columns, weights.to(device))

    def _fit(self, output: LayerOutput, state: Tensor) -> FittedLayer:
        target = self._target(output)
        selection, recorded, after = self._run(output, state)
        checked, weights = self._reference.checked.to(after.device), self._weights
        weights, target = None if weights is None else weights.to(after.device), target.to(after.device)
        gains = output.gains(target) if isinstance(output, PartOutput) else None
        if gains is not None:
            weights = gains if weights is None else gains * weights
        tokens = _Tokens(recorded, after, target, checked, weights)
        if self._settings.input_rounds and isinstance(output, NetworksOutput):
            return self._fit_inputs(output, tokens, selection, state.dtype)
        return self._apply(self._try_fit(output, tokens, selection), output, state.dtype)

    def _fit_inputs(
        self, output: NetworksOutput, tokens: _Tokens, selection: Tensor | None, dtype: torch.dtype
    ) -> FittedLayer:
        """Fit and apply outputs, then inputs and outputs in turn."""
        trial, target = self._try_fit(output, tokens, selection), tokens.target.float()
        before = trial.error if trial.fit is None else trial.fit.outcome.before
        for _ in range(self._settings.input_rounds):
            state = self._apply(trial, output, torch.float32).state
            del trial  # its features go before others are made
            assert state is not None
            residual = target - state
            fit_inputs(output.networks(tokens.recorded), residual, tokens.checked, tokens.weights)
            trial = self._try_fit(output, replace(tokens, after=target - residual), None)
        fitted = self._apply(trial, output, dtype)
        outcome = FitOutcome(None if fitted.outcome is None else fitted.outcome.ridge_lambda, before, trial.error)
        weights = _weights(output, trial.features)
        return FittedLayer(selection, weights, fitted.state, outcome, tuple(output.inputs()))

    def _run(self, output: LayerOutput, state: Tensor) -> tuple[Tensor | None, Recorded, Tensor]:
        """Run the layer, and put the neurons of largest importance in place, unless the experts keep their own."""
        run_layer = partial(self._reference.streams.run_layer, output.layer, state, part=output.next_part)
        if not self._settings.neurons:
            with output.recording() as records:
                after, recorded = run_layer(records=records)
            return None, recorded, after
        if not isinstance(output, NeuronSelectingOutput):
            raise UserError("repair.neurons: only experts of a mixture can be filled with neurons of others")
        with output.recording() as records, output.without_experts():
            after, recorded = run_layer(records=records)
        return output.select_neurons(recorded, self._weights), recorded, after

    def _try_fit(self, output: LayerOutput, tokens: _Tokens, selection: Tensor | None) -> _Trial:
        """Fit the neurons in place without changing them."""
        features, after = output.features(tokens.recorded), tokens.after.float()
        release_freed_memory()  # so that the fit can use the memory that making the features took
        if selection is not None:
            assert isinstance(output, NeuronSelectingOutput)
            after = after + output.experts_output(tokens.recorded, features)
        layer = LayerSystem(features, tokens.target.float() - after, tokens.checked, tokens.weights)
        fit = fit_ridge(layer, self._settings.ridge_lambdas)
        error = layer.held_out_error() if fit is None else fit.outcome.after
        return _Trial(selection, features, after, fit, error)

    def _target(self, output: LayerOutput) -> Tensor:
        """Target of the residual stream after an output, [tokens, hidden]; call it before the output is fitted."""
        reference, layer = self._reference, output.layer
        if not isinstance(output, PartOutput):
            return reference.states[layer + 1]
        with output.unedited():
            target, _ = reference.streams.run_layer(layer, reference.states[layer], part=output.next_part)
        return target

    def _apply(self, trial: _Trial, output: LayerOutput, dtype: torch.dtype) -> FittedLayer:
        """Change the layer's weights, and compute the residual stream, in a dtype, with the rounded change."""
        after, fit, features = trial.after, trial.fit, trial.features
        if fit is None:
            return FittedLayer(trial.selection, (), after.to(dtype), None)
        stream = after.clone()
        for block in features.blocks:
            block.add_to(stream, output.add(block.columns, fit.change[block.columns]))
        return FittedLayer(trial.selection, _weights(output, features), stream.to(dtype), fit.outcome)


def _weights(output: LayerOutput, features: Features) -> tuple[tuple[slice, Tensor], ...]:
    """Return views of the weights of all features that aren't zero for all tokens, by columns."""
    return tuple((block.columns, output.weights(block.columns)) for block in features.blocks)
