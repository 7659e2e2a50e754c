"""The contract of exporters: how one kind of edit becomes a checkpoint."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from torch import Tensor

from moevolve.workers.methods.base import Edit
from moevolve.workers.model.resident import ResidentModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CheckpointForm = Literal["stock", "native"]
"""`stock` loads as a model of its family anywhere; `native` brings its modelling code."""


@dataclass(frozen=True, slots=True)
class ExportSummary:
    """What a report and a model card say of an edited model.

    Attributes:
        experts: experts per layer, 0 without any.
        active: of these, per token.
        parameters_before: parameters of the unedited model.
        lead: the card's first sentence, up to where it says who found the edit.
        method: the paper's name and number.
        tag: of the card, for the kind of edit.
        form_note: a sentence on what the checkpoint needs to load.
        rows: further rows of the card's table, title and value.
    """

    experts: int
    active: int
    parameters_before: int
    lead: str
    method: str
    tag: str
    form_note: str
    rows: tuple[tuple[str, str], ...] = ()


def filled(model: PreTrainedModel, state: dict[str, Tensor], source: PreTrainedModel) -> PreTrainedModel:
    """`model`, fit for `save_pretrained`: with all its tensors, which are shared, and how `source` generates.

    Args:
        model: on the meta device.
        state: every tensor of it by name; tied ones may be left out.
        source: the resident model.
    """
    model.load_state_dict(state, strict=True, assign=True)
    model.tie_weights()
    model.requires_grad_(False)
    if source.generation_config is not None:
        model.generation_config = copy.deepcopy(source.generation_config)
    return model.eval()


class Exporter(Protocol):
    """Makes checkpoints of one kind of edit."""

    def form(self, resident: ResidentModel, edit: Edit) -> CheckpointForm:
        """Which form expresses `edit` exactly on this model, which is unedited yet.

        Raises:
            UserError: none does.
        """
        ...

    def summary(self, resident: ResidentModel, form: CheckpointForm) -> ExportSummary:
        """What is to be said of the resident model with the edit applied."""
        ...

    def build(self, resident: ResidentModel, form: CheckpointForm, directory: Path) -> PreTrainedModel:
        """The model to save, fit for `save_pretrained`.

        Args:
            resident: with the edit applied; tensors are shared with it where they can be.
            form: see `CheckpointForm`.
            directory: where the checkpoint goes; the native form's modelling code is written into it here.
        """
        ...
