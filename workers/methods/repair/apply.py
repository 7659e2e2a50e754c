"""Applying repaired edits to a resident model: first the edit itself, then the fits of its layers in order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moevolve.evaluators.errors import UserError
from moevolve.workers.contract.edits import Edit, Tokens
from moevolve.workers.contract.fitting import FitRows
from moevolve.workers.contract.methods import Applicator, ModelParts
from moevolve.workers.methods.repair.edit import STRENGTHS, RepairedEdit, Strength
from moevolve.workers.methods.repair.fits import FitCache, LayerFits, Reference
from moevolve.workers.methods.repair.gate import Gate, split_places
from moevolve.workers.methods.repair.ridge import FitOutcome
from moevolve.workers.methods.repair.streams import ResidualStreams
from moevolve.workers.methods.shared.outputs import NeuronSelectingOutput, NeuronSelection, Repairable

_FITS: dict[Strength, str] = {
    "none": "no fit",
    "scalar": "fit of one factor per layer",
    "ridge": "ridge regression of output projections",
    "matched": "ridge regression of output projections, scaled to the target's energy,",
}
"""Descriptions of a recipe's strengths."""
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
        divergences: Divergence of the model from the unedited one, by the strengths that the gate compared; empty
            without a gate.
    """

    def __init__(self, parts: ModelParts) -> None:
        """Fit nothing yet."""
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
        strength = edit.recipe.strength
        if gate is not None:
            tried = STRENGTHS[: STRENGTHS.index(strength) + 1]
            self.divergences = {each: self._divergence(base, edit, each, reference, gate) for each in tried}
            strength = self._taken(edit)
            if strength == tried[-1]:
                return
        self._fit(base, edit, strength, reference)

    def _taken(self, edit: RepairedEdit) -> Strength:
        """The strength of the fit: the gate's choice, of equally good ones the weaker; without a gate the recipe's."""
        return min(self.divergences, key=self.divergences.__getitem__, default=edit.recipe.strength)

    def _divergence(
        self, base: Repairable, edit: RepairedEdit, strength: Strength, reference: Reference, gate: Gate
    ) -> float:
        """Divergence of the model that is repaired at a strength."""
        self._fit(base, edit, strength, reference)
        with torch.inference_mode():
            return gate.divergence()

    def _fit(self, base: Repairable, edit: RepairedEdit, strength: Strength, reference: Reference) -> None:
        """Apply the base edit, and fit its layers at a strength."""
        base.revert()
        base.apply(edit.base)
        # Inference mode only from here on: the base edit's tensors may become exported parameters, which inference
        # tensors can't.
        with torch.inference_mode():
            outputs = base.outputs()
            for output in outputs:
                if edit.recipe.shared_expert == "kept" and isinstance(output, NeuronSelectingOutput):
                    output.keep_shared_expert()
            fitted = LayerFits(edit, strength, reference, self._cache).run(outputs)
        self.outcomes = [each.outcome for each in fitted]
        self.selections = {
            output.layer: each.selection
            for output, each in zip(outputs, fitted, strict=True)
            if each.selection is not None
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
        recipe = self._edit.recipe
        return (
            ("repair", f"{_FITS[self._taken(self._edit)]} toward {_TARGETS[recipe.target]}"),
            *self._gate_rows(),
            *self._selection_rows(),
            ("repaired outputs", f"{len(repaired)} of {len(self.outcomes)}"),
            ("fitted on", f"{len(checked) - held:,} tokens of calibration prompts, checked on {held:,} of others"),
            ("ridge lambdas", ", ".join(f"{each:g} ({count})" for each, count in sorted(ridge_lambdas.items())) or "-"),
            ("squared error on checked tokens", f"{min(left):.1%} to {max(left):.1%} of what it was"),
        )

    def arrays(self) -> dict[str, NDArray[np.int32]]:
        return {
            f"layers.{layer}": each.neurons.to(torch.int32).cpu().numpy() for layer, each in self.selections.items()
        }

    def _gate_rows(self) -> Iterator[tuple[str, str]]:
        if self._gate is None:
            return
        tried = ", ".join(f"{strength} {value:.3g}" for strength, value in self.divergences.items())
        count = int(self._gate.compared.sum())
        yield "gate", f"divergence from the unedited model behind {count:,} tokens of other prompts, in nats: {tried}"

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
    def _references_for(self, edit: RepairedEdit) -> tuple[Reference, Gate | None]:
        """The unedited model on an edit's rows, and on its gate's. Call it while the model is unedited."""
        found = edit.rows.first(edit.recipe.tokens)
        fitted, gated = split_places(len(found)) if edit.recipe.gate else (range(len(found)), range(0))
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


def _chosen(rows: FitRows, sequences: Sequence[Tokens], places: Sequence[int]) -> tuple[list[Tokens], Tensor]:
    """Some of the first sequences of rows, and the mask of their tokens that predict answers."""
    answering = torch.from_numpy(np.concatenate([rows.answering(place) for place in places]))
    return [sequences[place] for place in places], answering
