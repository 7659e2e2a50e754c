"""Repaired edits on a resident model: the edit is made, then layer after layer is fitted, from the first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moevolve.evaluators.errors import UserError
from moevolve.workers.methods.base import Edit, Tokens
from moevolve.workers.methods.contract import Applicator, ModelParts
from moevolve.workers.methods.outputs import Features, LayerOutput, Recombinable, Repairable
from moevolve.workers.methods.repair.edit import RepairedEdit
from moevolve.workers.methods.repair.ridge import Fit, fit_ridge
from moevolve.workers.methods.repair.streams import Seen, Streams

_CHECKED = 8
"""Every so many sequences one is not fitted but checked."""
_KEPT_BYTES = 512 << 20
"""Most bytes of fitted layers that are kept for candidates to come."""


class RepairApplicator:
    """Ridge fits of layers' outputs to the unedited model's (`moevolve.workers.methods.repair.ridge`).

    A layer's fit follows from the layers up to it, the recipe and the rows, so a candidate that begins like one before
    it takes its first layers over, bit for bit.

    Attributes:
        fits: of the edit that is on the model, output by output; None where nothing was changed.
    """

    def __init__(self, parts: ModelParts) -> None:
        """Fit nothing yet."""
        self._parts = parts
        self._base: Applicator | None = None
        self._reference: _Reference | None = None
        self._kept = _KeptLayers(_KEPT_BYTES)
        self.fits: list[Fit | None] = []

    @torch.inference_mode()
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
        self.fits = _Repair(edit, reference, self._kept).run(base.outputs())

    def revert(self) -> None:
        """See `Applicator.revert`."""
        if self._base is not None:
            self._base.revert()
            self._base = None

    def _reference_for(self, edit: RepairedEdit) -> _Reference:
        """What the unedited model makes of the rows; it is unedited now."""
        sequences = edit.rows.first(edit.recipe.tokens)
        if self._reference is None or self._reference.sequences != sequences:
            self._reference = None  # not two at a time
            self._reference = _Reference(Streams(self._parts.model, sequences), sequences)
        return self._reference


class _Reference:
    """The unedited model's residual stream before every layer and behind the last, on the host.

    Attributes:
        streams: runs the sequences.
        sequences: their tokens.
        states: [layers + 1], each [tokens, hidden].
    """

    def __init__(self, streams: Streams, sequences: Sequence[Tokens]) -> None:
        self.streams, self.sequences = streams, sequences
        state = streams.embedded()
        self.states = [state.cpu()]
        for layer in range(streams.layers):
            state, _ = streams.through(layer, state)
            self.states.append(state.cpu())
        self.checked = _checked(sequences)


def _checked(sequences: Sequence[Tokens]) -> Tensor:
    """Which tokens are checked: bool [tokens]."""
    count = len(sequences)
    marks = [each % _CHECKED == _CHECKED - 1 for each in range(count)] if count >= _CHECKED else [False] * count
    marks[-1] |= count < _CHECKED
    return torch.tensor([mark for mark, tokens in zip(marks, sequences, strict=True) for _ in tokens])


@dataclass(frozen=True, slots=True, eq=False)
class _Fitted:
    """One layer, fitted.

    Attributes:
        neurons: that were put in place first; None leaves the edit's own.
        changes: of the weights, by columns of the features.
        state: the residual stream behind the layer, [tokens, hidden].
        fit: how it went; None where nothing was changed.
    """

    neurons: Tensor | None
    changes: tuple[tuple[slice, Tensor], ...]
    state: Tensor
    fit: Fit | None

    @property
    def nbytes(self) -> int:
        return self.state.nbytes + sum(change.nbytes for _, change in self.changes)


class _KeptLayers:
    """Fitted layers by name, the last used ones within a bound of bytes."""

    def __init__(self, limit: int) -> None:
        self._limit, self._nbytes = limit, 0
        self._layers: OrderedDict[str, _Fitted] = OrderedDict()

    def get(self, name: str) -> _Fitted | None:
        found = self._layers.get(name)
        if found is not None:
            self._layers.move_to_end(name)
        return found

    def put(self, name: str, fitted: _Fitted) -> None:
        if fitted.nbytes > self._limit:
            return
        self._layers[name] = fitted
        self._nbytes += fitted.nbytes
        while self._nbytes > self._limit:
            self._nbytes -= self._layers.popitem(last=False)[1].nbytes


class _Repair:
    """One edit's fits, from the first layer to the last."""

    def __init__(self, edit: RepairedEdit, reference: _Reference, kept: _KeptLayers) -> None:
        self._recipe, self._reference, self._kept = edit.recipe, reference, kept
        self._names = edit.layer_hashes
        self._memory = edit.recipe.memory_mb << 20

    def run(self, outputs: Sequence[LayerOutput]) -> list[Fit | None]:
        """Fit all layers; how it went, output by output."""
        state, layer, fits = self._reference.states[0], 0, []
        for ordinal, output in enumerate(outputs):
            for between in range(layer, output.layer):
                state, _ = self._reference.streams.through(between, state)
            fitted = self._take_over(output, self._names[ordinal]) or self._fit(output, state, self._names[ordinal])
            state, layer = fitted.state, output.layer + 1
            fits.append(fitted.fit)
        return fits

    def _take_over(self, output: LayerOutput, name: str) -> _Fitted | None:
        """What was fitted for a candidate that begins like this one."""
        fitted = self._kept.get(name)
        if fitted is not None:
            if fitted.neurons is not None:
                assert isinstance(output, Recombinable)
                output.fill(fitted.neurons)
            for columns, change in fitted.changes:
                output.add(columns, change)
        return fitted

    def _fit(self, output: LayerOutput, state: Tensor, name: str) -> _Fitted:
        streams, recipe = self._reference.streams, self._recipe
        with output.watching() as watched:
            after, seen = streams.through(output.layer, state, watched)
            neurons = self._recombine(output, seen)
            if neurons is not None:
                after, seen = streams.through(output.layer, state, watched)
        if recipe.target == "global":
            target = self._reference.states[output.layer + 1].to(after.device)
        else:
            with output.unedited():
                target, _ = streams.through(output.layer, state)
        features = output.features(seen, self._memory)
        checked = self._reference.checked.to(after.device)
        fit = fit_ridge(features, target.float() - after.float(), checked, recipe.strengths, self._memory)
        changes = () if fit is None else _apply(fit, features, output, after)
        fitted = _Fitted(neurons, changes, after, fit)
        self._kept.put(name, fitted)
        return fitted

    def _recombine(self, output: LayerOutput, seen: Seen) -> Tensor | None:
        if self._recipe.neurons is None:
            return None
        if not isinstance(output, Recombinable):
            raise UserError("repair.neurons: only experts of a mixture can be filled with neurons of others")
        return output.recombine(seen, self._recipe.neurons, self._memory)


def _apply(fit: Fit, features: Features, output: LayerOutput, after: Tensor) -> tuple[tuple[slice, Tensor], ...]:
    """Change a layer's weights, and the residual stream `after` it as they do; what was changed."""
    changes, stream = [], after.float()
    for block in features.blocks():
        change = fit.change(block)
        stream[block.tokens] += block.values @ output.add(block.columns, change)
        changes.append((block.columns, change))
    after.copy_(stream)
    return tuple(changes)
