"""Applying repaired edits to a resident model: first the edit itself, then the fits of its layers in order.

Squared errors of layers can fall while the model gets worse: they count directions that no later layer reads as much as
those that decide an answer, and shrink what is useful but uncertain. So a gate compares strengths of a fit by the
predictions of the whole model on sequences that nothing is fitted on.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moevolve.evaluators.errors import UserError
from moevolve.workers.contract.capacity import release_freed_memory
from moevolve.workers.contract.edits import Edit, Tokens
from moevolve.workers.contract.fitting import FitRows
from moevolve.workers.contract.methods import Applicator, Method, ModelParts
from moevolve.workers.methods.repair.edit import STRENGTHS, RepairedEdit, Strength
from moevolve.workers.methods.repair.fits import FitCache, LayerFits, Reference
from moevolve.workers.methods.repair.ridge import FitOutcome
from moevolve.workers.methods.repair.streams import ResidualStreams
from moevolve.workers.methods.shared.outputs import NeuronSelectingOutput, NeuronSelection, Repairable

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# One sequence in this many is the gate's: as many as the fits hold out.
_GATE_SHARE = 8
# Descriptions of strengths.
_FITS: dict[Strength, str] = {
    "none": "no fit",
    "scalar": "fit of one factor per layer",
    "ridge": "ridge regression of output projections",
    "matched": "ridge regression of output projections, scaled to the target's energy,",
}
# Descriptions of targets.
_TARGETS = {
    "global": "the unedited model's residual stream behind each layer",
    "local": "what each unedited layer makes of the same input",
}


class RepairApplicator(Applicator):
    """Ridge fits of layers' outputs to the unedited model's (`moevolve.workers.methods.repair.ridge`).

    A layer's fit depends on the layers up to it, the settings and the rows. So a candidate whose first layers equal
    those of an earlier one reuses their fits, bit for bit.

    Attributes:
        outcomes: Results of the current edit's fits, one per layer output; None if a fit changed nothing.
        selections: Neurons of its kept experts by decoder layer; empty if they keep their own.
        divergences: Divergence of the model from the unedited one, by the strengths that the gate compared; empty
            without a gate.
    """

    def __init__(self, parts: ModelParts) -> None:
        self._parts = parts
        self._base: Applicator | None = None
        self._edit: RepairedEdit | None = None
        self._reference: Reference | None = None
        self._gate: Gate | None = None
        self._cache = FitCache()
        self.outcomes: list[FitOutcome | None] = []
        self.selections: dict[int, NeuronSelection] = {}
        self.divergences: dict[Strength, float] = {}

    def apply(self, edit: Edit) -> None:
        assert isinstance(edit, RepairedEdit)
        self.revert()
        base = self._parts.applicator(type(edit.base))
        if not isinstance(base, Repairable):
            raise UserError(f"edits of kind {type(edit.base).__name__} can't be repaired")
        for layer in self._parts.moe_layers:
            if layer.unrepairable is not None:
                raise UserError(
                    f"candidates of a {layer.family.model_type} model can't be repaired: {layer.unrepairable}"
                )
        reference, gate = self._references_for(edit)
        self._base, self._edit = base, edit
        self.divergences = {}
        strength = edit.settings.strength
        if gate is not None:
            tried = STRENGTHS[: STRENGTHS.index(strength) + 1]
            for each in tried:
                self._fit(base, edit, each, reference)
                self.divergences[each] = gate.divergence()
            strength = self._taken(edit)
            if strength == tried[-1]:
                return
        self._fit(base, edit, strength, reference)

    def _taken(self, edit: RepairedEdit) -> Strength:
        """The strength of the fit: the gate's choice, of equally good ones the weaker; without a gate the settings'."""
        return min(self.divergences, key=self.divergences.__getitem__, default=edit.settings.strength)

    def _fit(self, base: Repairable, edit: RepairedEdit, strength: Strength, reference: Reference) -> None:
        """Apply the base edit, and fit its layers at a strength."""
        base.revert()
        base.apply(edit.base)
        # Inference mode only from here on: the base edit's tensors may become exported parameters, which inference
        # tensors can't.
        with torch.inference_mode():
            outputs = base.outputs()
            for output in outputs:
                if edit.settings.shared_expert == "kept" and isinstance(output, NeuronSelectingOutput):
                    output.keep_shared_expert()
            fitted = LayerFits(edit, strength, reference, self._cache).run(outputs)
        release_freed_memory()
        self.outcomes = [outcome for outcome, _ in fitted]
        self.selections = {
            output.layer: selection
            for output, (_, selection) in zip(outputs, fitted, strict=True)
            if selection is not None
        }

    def revert(self) -> None:
        if self._base is not None:
            self._base.revert()
            self._base = None

    def report(self) -> tuple[tuple[str, str], ...]:
        assert self._edit is not None and self._reference is not None, "there is no edit on the model"
        checked, repaired = self._reference.checked, [each for each in self.outcomes if each is not None]
        held = int(checked.sum())
        ridge_lambdas = Counter(each.ridge_lambda for each in repaired if each.ridge_lambda is not None)
        left = [each.after / each.before for each in repaired] or [1.0]
        settings = self._edit.settings
        rows = [("repair", f"{_FITS[self._taken(self._edit)]} toward {_TARGETS[settings.target]}")]
        if self._gate is not None:
            tried = ", ".join(f"{strength} {value:.3g}" for strength, value in self.divergences.items())
            where = f"behind {int(self._gate.compared.sum()):,} tokens of other prompts"
            rows.append(("gate", f"divergence from the unedited model {where}, in nats: {tried}"))
        if self.selections:
            rows.append(("neurons", "chosen among all experts of a layer; see neurons.npz"))
        if settings.input_rounds:
            rows.append(("gate and up projections", f"fitted in {settings.input_rounds} rounds of least squares"))
        routed = sum(each.rows is not None for each in self.selections.values())
        if routed:
            where = f"{routed} of {len(self.selections)} layers"
            rows.append(("router rows", f"fitted to the routing of groups of experts, in {where}"))
        return (
            *rows,
            ("repaired outputs", f"{len(repaired)} of {len(self.outcomes)}"),
            ("fitted on", f"{len(checked) - held:,} tokens of calibration prompts, checked on {held:,} of others"),
            ("ridge lambdas", ", ".join(f"{each:g} ({count})" for each, count in sorted(ridge_lambdas.items())) or "-"),
            ("squared error on checked tokens", f"{min(left):.1%} to {max(left):.1%} of what it was"),
        )

    def arrays(self) -> dict[str, NDArray[np.int32]]:
        return {
            f"layers.{layer}": each.neurons.to(torch.int32).cpu().numpy() for layer, each in self.selections.items()
        }

    @torch.inference_mode()
    def _references_for(self, edit: RepairedEdit) -> tuple[Reference, Gate | None]:
        """The unedited model on an edit's rows, and on its gate's. Call it while the model is unedited."""
        found = edit.rows.first(edit.settings.tokens)
        fitted, gated = split_places(len(found)) if edit.settings.gate else (range(len(found)), range(0))
        sequences, answering = _chosen(edit.rows, found, fitted)
        reference = self._reference
        if reference is None or reference.sequences != sequences or not torch.equal(reference.answering, answering):
            self._reference = reference = None  # free its memory before the next one is made
            reference = Reference(ResidualStreams(self._parts.model, sequences), sequences, answering)
            self._reference = reference
        if not gated:
            self._gate = None
            return reference, None
        sequences, answering = _chosen(edit.rows, found, gated)
        if self._gate is None or self._gate.sequences != sequences:
            self._gate = None
            self._gate = Gate(self._parts.model, sequences, answering)
        return reference, self._gate


def split_places(count: int) -> tuple[Sequence[int], Sequence[int]]:
    """Split the places of sequences into those to fit and those of the gate: every eighth, from the second on."""
    fitted = [place for place in range(count) if place % _GATE_SHARE != 1]
    # A single sequence serves both, and is held out of the fit.
    return fitted, range(1, count, _GATE_SHARE) or range(count)


class Gate:
    """Measures how far a model's predictions are from the unedited model's, which it has when the gate is made.

    Attributes:
        compared: Mask of the tokens behind which predictions are compared, bool [tokens]: those that predict an
            answer's tokens, or all tokens if there are no answers.
    """

    def __init__(self, model: PreTrainedModel, sequences: Sequence[Tokens], answering: Tensor) -> None:
        self.sequences = sequences
        self.compared = answering if answering.any() else ~answering
        self._streams = ResidualStreams(model, sequences)
        self._expected = self._streams.predictions(self.compared).cpu()

    @torch.inference_mode()
    def divergence(self) -> float:
        """Mean Kullback-Leibler divergence over compared tokens in nats; infinite if a prediction isn't finite."""
        found = self._streams.predictions(self.compared)
        expected = self._expected.to(found.device)
        divergence = float((expected.exp() * (expected - found)).double().sum(dim=1).mean())
        return divergence if math.isfinite(divergence) else math.inf


def _chosen(rows: FitRows, sequences: Sequence[Tokens], places: Sequence[int]) -> tuple[list[Tokens], Tensor]:
    """Some of the first sequences of rows, and the mask of their tokens that predict answers."""
    answering = torch.from_numpy(np.concatenate([rows.answering(place) for place in places]))
    return [sequences[place] for place in places], answering


REPAIR = Method(edit=RepairedEdit, applicator=RepairApplicator)
