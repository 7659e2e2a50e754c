"""Repaired edits on a resident model: the edit is made, then layer after layer is fitted, from the first."""

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
from moevolve.workers.methods.repair.ridge import Fit, Outcome, fit_ridge
from moevolve.workers.methods.repair.streams import Seen, Streams
from moevolve.workers.methods.shared.outputs import Features, LayerOutput, NeuronSelection, Recombinable, Repairable

_CHECKED = 8
"""Every so many sequences one is not fitted but checked."""
KEPT_BYTES = 512 << 20
"""Most bytes of fitted layers that are kept for candidates to come."""

_TARGETS = {
    "global": "the unedited model's residual stream behind each layer",
    "local": "what each unedited layer makes of the same input",
}
"""What recipes call a target, in words."""


class RepairApplicator:
    """Ridge fits of layers' outputs to the unedited model's (`moevolve.workers.methods.repair.ridge`).

    A layer's fit follows from the layers up to it, the recipe and the rows, so a candidate that begins like one before
    it takes its first layers over, bit for bit.

    Attributes:
        outcomes: of the edit that is on the model, output by output; None where nothing was changed.
        fillings: of its experts, by decoder layer; empty where they have their own neurons.
    """

    def __init__(self, parts: ModelParts) -> None:
        """Fit nothing yet."""
        self._parts = parts
        self._base: Applicator | None = None
        self._edit: RepairedEdit | None = None
        self._reference: _Reference | None = None
        self._kept = _KeptLayers(KEPT_BYTES)
        self.outcomes: list[Outcome | None] = []
        self.fillings: dict[int, NeuronSelection] = {}

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
        # Only now: a tensor that the base edit makes may become an exported parameter, which no inference tensor can.
        with torch.inference_mode():
            outputs = base.outputs()
            fitted = _Repair(edit, reference, self._kept).run(outputs)
        self.outcomes = [each.outcome for each in fitted]
        self.fillings = {
            output.layer: each.filling for output, each in zip(outputs, fitted, strict=True) if each.filling is not None
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
            *self._filled(),
            ("repaired outputs", f"{len(repaired)} of {len(self.outcomes)}"),
            ("fitted on", f"{len(checked) - held:,} tokens of calibration prompts, checked on {held:,} of others"),
            ("ridge lambdas", ", ".join(f"{each:g} ({count})" for each, count in sorted(ridge_lambdas.items())) or "-"),
            ("squared error on checked tokens", f"{min(left):.1%} to {max(left):.1%} of what it was"),
        )

    def arrays(self) -> dict[str, NDArray[np.int32]]:
        """See `ReportingApplicator`."""
        return {f"layers.{layer}": each.neurons.to(torch.int32).cpu().numpy() for layer, each in self.fillings.items()}

    def _filled(self) -> Iterator[tuple[str, str]]:
        """What there is to tell of slots that were filled."""
        if self.fillings:
            yield "neurons", "chosen among all experts of a layer; see neurons.npz"
        fitted = sum(each.rows is not None for each in self.fillings.values())
        if fitted:
            yield (
                "router rows",
                f"fitted to the routing of groups of experts, in {fitted} of {len(self.fillings)} layers",
            )

    @torch.inference_mode()
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
        filling: that was put in place first; None leaves the edit's own neurons.
        changes: of the weights, by columns of the features.
        state: the residual stream behind the layer, [tokens, hidden].
        outcome: how it went; None where nothing was changed.
    """

    filling: NeuronSelection | None
    changes: tuple[tuple[slice, Tensor], ...]
    state: Tensor
    outcome: Outcome | None

    @property
    def nbytes(self) -> int:
        filled = 0 if self.filling is None else self.filling.nbytes
        return self.state.nbytes + filled + sum(change.nbytes for _, change in self.changes)


@dataclass(frozen=True, slots=True, eq=False)
class _Trial:
    """Some neurons in one layer, and a fit of them.

    Attributes:
        filling: that was put in place; None for the edit's own neurons.
        seen: what was watched of the layer, each [tokens, ...].
        after: the residual stream behind the layer without the fit, [tokens, hidden].
        features: of the layer.
        missing: what the stream lacks, float32 [tokens, hidden].
        fit: None where none helps.
        error: squared, on the checked tokens, once fitted.
    """

    filling: NeuronSelection | None
    seen: Seen
    after: Tensor
    features: Features
    missing: Tensor
    fit: Fit | None
    error: float


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

    def run(self, outputs: Sequence[LayerOutput]) -> list[_Fitted]:
        """Fit all layers, output by output."""
        state, layer, found = self._reference.states[0], 0, []
        for output, name in zip(outputs, self._named(outputs), strict=True):
            for between in range(layer, output.layer):
                state, _ = self._reference.streams.through(between, state)
            layer = output.layer
            fitted = self._take_over(output, name) or self._fit(output, state, name)
            if output.next_part is None:
                state, layer = fitted.state, layer + 1
            found.append(fitted)
        return found

    def _named(self, outputs: Sequence[LayerOutput]) -> list[str]:
        """What each output's fit follows from: the layers up to it, and the parts of its own."""
        places = {layer: place for place, layer in enumerate(dict.fromkeys(output.layer for output in outputs))}
        parts = Counter[int]()
        names = []
        for output in outputs:
            names.append(f"{self._names[places[output.layer]]} {parts[output.layer]}")
            parts[output.layer] += 1
        return names

    def _take_over(self, output: LayerOutput, name: str) -> _Fitted | None:
        """What was fitted for a candidate that begins like this one."""
        fitted = self._kept.get(name)
        if fitted is not None:
            if fitted.filling is not None:
                assert isinstance(output, Recombinable)
                output.fill(fitted.filling)
            for columns, change in fitted.changes:
                output.add(columns, change)
        return fitted

    def _fit(self, output: LayerOutput, state: Tensor, name: str) -> _Fitted:
        target = self._target(output, state)
        with output.watching() as watched:
            make = self._tried if self._recipe.neurons is None else self._filled
            trial = make(output, state, watched, target)
        fitted = self._apply(trial, output)
        if trial.fit is None or fitted.changes:
            self._kept.put(name, fitted)
        return fitted

    def _filled(self, output: LayerOutput, state: Tensor, watched: list[Seen], target: Tensor) -> _Trial:
        """Neurons in place and fitted; those that their fit leads to, where these leave less error."""
        recipe = self._recipe.neurons
        assert recipe is not None
        if not isinstance(output, Recombinable):
            raise UserError("repair.neurons: only experts of a mixture can be filled with neurons of others")
        _, seen = self._reference.streams.through(output.layer, state, watched, output.next_part)
        filling = output.recombine(seen, recipe, self._memory)
        worthiest = self._tried(output, state, watched, target, filling)
        if recipe.candidates == 1:
            return worthiest
        missing = worthiest.after.float() + worthiest.missing - self._apply(worthiest, output).state.float()
        ridge_lambda = worthiest.fit.outcome.ridge_lambda if worthiest.fit else min(self._recipe.ridge_lambdas)
        fitted = ~self._reference.checked.to(missing.device)
        better = output.eliminate(worthiest.seen, filling, missing, fitted, ridge_lambda, recipe, self._memory)
        if not torch.equal(better.neurons, filling.neurons):
            output.fill(better)
            trial = self._tried(output, state, watched, target, better)
            if trial.error < worthiest.error:
                return trial
        output.fill(filling)
        return worthiest

    def _tried(
        self,
        output: LayerOutput,
        state: Tensor,
        watched: list[Seen],
        target: Tensor,
        filling: NeuronSelection | None = None,
    ) -> _Trial:
        """A fit of the neurons that are in place; not applied."""
        after, seen = self._reference.streams.through(output.layer, state, watched, output.next_part)
        missing = target.to(after.device).float() - after.float()
        features, checked = output.features(seen), self._reference.checked.to(after.device)
        fit = fit_ridge(features, missing, checked, self._recipe.ridge_lambdas, self._memory)
        error = float(missing[checked].double().square().sum()) if fit is None else fit.outcome.after
        return _Trial(filling, seen, after, features, missing, fit, error)

    def _target(self, output: LayerOutput, state: Tensor) -> Tensor:
        """What the residual stream behind an output is to be, [tokens, hidden]; nothing of the output is fitted yet."""
        reference, begins = self._reference, state
        if self._recipe.target == "global":
            if output.next_part is None:
                return reference.states[output.layer + 1]
            begins = reference.states[output.layer].to(state.device)
        with output.unedited():
            target, _ = reference.streams.through(output.layer, begins, part=output.next_part)
        return target

    def _apply(self, trial: _Trial, output: LayerOutput) -> _Fitted:
        """Change a layer's weights, and the residual stream behind it as they do."""
        features, after, fit = trial.features, trial.after, trial.fit
        if fit is None:
            return _Fitted(trial.filling, (), after, None)
        keeps = 4 * features.width * after.shape[1] + after.nbytes <= KEPT_BYTES
        changes, stream = [], after.to(torch.float32, copy=True)
        for block in fit.blocks or features.blocks(self._memory // 2):
            change = fit.change(block)
            stream[block.tokens] += block.values @ output.add(block.columns, change)
            if keeps:
                changes.append((block.columns, change))
        return _Fitted(trial.filling, tuple(changes), stream.to(after.dtype), fit.outcome)
