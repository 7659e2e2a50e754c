"""EEP edits as checkpoints of fewer experts."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from moevolve.evaluators.errors import UserError
from moevolve.workers.export.base import CheckpointForm, ExportSummary
from moevolve.workers.export.native import write_native_code
from moevolve.workers.export.state import build_model, checkpoint_form, exported_shape, loaded_parameters
from moevolve.workers.families.registry import family_of
from moevolve.workers.methods.base import Edit
from moevolve.workers.methods.eep.edit import EepEdit
from moevolve.workers.model.resident import ResidentModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class EepExporter:
    """See `Exporter`; also for models of experts that aren't edited."""

    def form(self, resident: ResidentModel, edit: Edit) -> CheckpointForm:
        if not resident.layers:
            raise UserError("only an edited dense model can be exported; the full one is a checkpoint already")
        return checkpoint_form(edit, resident.layers[0].rule)

    def summary(self, resident: ResidentModel, form: CheckpointForm) -> ExportSummary:
        edit, count = resident.applied, resident.layers[0].count
        retained, active = exported_shape(resident)
        title = family_of(resident.model.config, resident.config.path).title
        rows: list[tuple[str, str]] = [("router space", edit.router_space if isinstance(edit, EepEdit) else "-")]
        if isinstance(edit, EepEdit) and edit.alignment is not None:
            rows.append(("merged experts", "their neurons were aligned first"))
        return ExportSummary(
            experts=retained,
            active=active,
            parameters_before=loaded_parameters(resident),
            lead=(
                f"{title} reduced from {count} to {retained} experts per MoE layer ({active} active per token,\n"
                f"{resident.model.config.num_experts_per_tok} before)"
            ),
            method="Efficient Expert Pruning (arXiv 2407.00945)",
            tag="expert-pruning",
            form_note=(
                "The modelling code beside this card keeps the whole router and maps its scores onto the experts that "
                "are left; it needs\n`transformers` only."
                if form == "native"
                else "A stock checkpoint of its family: no custom code."
            ),
            rows=tuple(rows),
        )

    def build(self, resident: ResidentModel, form: CheckpointForm, directory: Path) -> PreTrainedModel:
        if form == "native":
            retained, _ = exported_shape(resident)
            write_native_code(directory, resident.model, resident.layers[0], retained, version("moevolve"))
        return build_model(resident, form, directory)
