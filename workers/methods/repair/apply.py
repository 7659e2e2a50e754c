"""Applying repaired edits to a resident model: first the edit itself, then the fits of its layers in order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from moevolve.evaluators.errors import UserError
from moevolve.workers.contract.capacity import release_freed_memory
from moevolve.workers.contract.edits import Edit
from moevolve.workers.contract.methods import Applicator, Method, ModelParts
from moevolve.workers.methods.repair.edit import RepairedEdit
from moevolve.workers.methods.repair.fit_cache import FitCache
from moevolve.workers.methods.repair.fits import LayerFits, Reference
from moevolve.workers.methods.repair.ridge import FitOutcome
from moevolve.workers.methods.repair.streams import ResidualStreams
from moevolve.workers.methods.shared.outputs import Repairable


class RepairApplicator(Applicator):
    """Ridge fits of layers' outputs to the unedited model's (`moevolve.workers.methods.repair.ridge`).

    A layer's fit depends on the layers up to it, the settings and the rows. So a candidate whose first layers equal
    those of an earlier one reuses their fits, bit for bit.

    Attributes:
        outcomes: Results of the current edit's fits, one per layer output; None if a fit changed nothing.
    """

    def __init__(self, parts: ModelParts) -> None:
        self._parts = parts
        self._base: Applicator | None = None
        self._edit: RepairedEdit | None = None
        self._reference: Reference | None = None
        self._cache = FitCache(parts.fits, states=not parts.on_host)
        self.outcomes: list[FitOutcome | None] = []

    def apply(self, edit: Edit) -> None:
        assert isinstance(edit, RepairedEdit)
        base, reference = self._begin(edit)
        base.apply(edit.base)
        fits = LayerFits(edit, base.outputs(), reference, self._cache)
        for layer in range(reference.streams.layers):
            self._fit(fits, layer)

    def by_layer(self, edit: Edit, layers: Sequence[int]) -> Iterator[int]:
        assert isinstance(edit, RepairedEdit)
        base, reference = self._begin(edit)
        fits: LayerFits | None = None
        for layer in base.by_layer(edit.base, layers):
            fits = fits or LayerFits(edit, base.outputs(), reference, self._cache)
            self._fit(fits, layer)
            yield layer

    def _begin(self, edit: RepairedEdit) -> tuple[Repairable, Reference]:
        """Check that an edit can be repaired, and run the unedited model on its rows."""
        self.revert()
        base = self._parts.applicator(type(edit.base))
        if not isinstance(base, Repairable):
            raise UserError(f"edits of kind {type(edit.base).__name__} can't be repaired")
        for layer in self._parts.moe_layers:
            if layer.unrepairable is not None:
                raise UserError(
                    f"candidates of a {layer.family.model_type} model can't be repaired: {layer.unrepairable}"
                )
        base.revert()
        reference = self._reference_for(edit)
        self._base, self._edit = base, edit
        return base, reference

    # Inference mode only here: the base edit's tensors may become exported parameters, which inference tensors can't.
    @torch.inference_mode()
    def _fit(self, fits: LayerFits, layer: int) -> None:
        fits.fit(layer)
        self.outcomes = fits.outcomes
        release_freed_memory()

    def revert(self) -> None:
        if self._base is not None:
            self._base.revert()
            self._base = None

    def report(self) -> tuple[tuple[str, str], ...]:
        assert self._edit is not None and self._reference is not None, "no edit is applied to the model"
        checked, repaired = self._reference.checked, [each for each in self.outcomes if each is not None]
        held = int(checked.sum())
        ridge_lambdas = Counter(each.ridge_lambda for each in repaired if each.ridge_lambda is not None)
        left = [each.after / each.before for each in repaired] or [1.0]
        settings = self._edit.settings
        rows = [("repair", "ridge regression of output projections toward the unedited model's residual stream")]
        if settings.neurons:
            rows.append(("neurons", "chosen among all experts of a layer"))
        if settings.input_rounds:
            rows.append(("gate and up projections", f"fitted in {settings.input_rounds} rounds of least squares"))
        prompts = "calibration prompts"
        if settings.continuations:
            prompts += " and of their continuations by the full model"
        return (
            *rows,
            ("repaired outputs", f"{len(repaired)} of {len(self.outcomes)}"),
            ("fitted on", f"{len(checked) - held:,} tokens of {prompts}, checked on {held:,} of others"),
            ("ridge lambdas", ", ".join(f"{each:g} ({count})" for each, count in sorted(ridge_lambdas.items())) or "-"),
            ("squared error on checked tokens", f"{min(left):.1%} to {max(left):.1%} of its value before"),
        )

    @torch.inference_mode()
    def _reference_for(self, edit: RepairedEdit) -> Reference:
        """Return the unedited model on an edit's rows. Call it while the model is unedited."""
        sequences = edit.rows.first(edit.settings.tokens)
        answering = torch.from_numpy(np.concatenate([edit.rows.answering(place) for place in range(len(sequences))]))
        found = self._reference
        if found is None or found.sequences != sequences or not torch.equal(found.answering, answering):
            self._reference = found = None  # free its memory before the next one is made
            found = Reference(ResidualStreams(self._parts.model, sequences), sequences, answering)
            self._reference = found
        return found


REPAIR = Method(edit=RepairedEdit, applicator=RepairApplicator)
