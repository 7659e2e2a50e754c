"""Which exporter makes checkpoints of which kind of edit."""

from __future__ import annotations

from moevolve.evaluators.errors import UserError
from moevolve.workers.edits.base import Edit, IdentityEdit
from moevolve.workers.edits.eep import EepEdit
from moevolve.workers.edits.factorllm import FactorLlmEdit
from moevolve.workers.edits.nanomoe import NanoMoeEdit
from moevolve.workers.edits.tomoe import ToMoeEdit
from moevolve.workers.export_base import Exporter
from moevolve.workers.export_eep import EepExporter
from moevolve.workers.export_factorllm import FactorLlmExporter
from moevolve.workers.export_nanomoe import NanoMoeExporter
from moevolve.workers.export_tomoe import ToMoeExporter

EXPORTERS: dict[type, Exporter] = {
    EepEdit: EepExporter(),
    IdentityEdit: EepExporter(),
    NanoMoeEdit: NanoMoeExporter(),
    FactorLlmEdit: FactorLlmExporter(),
    ToMoeEdit: ToMoeExporter(),
}
"""Exporters by the type of edit."""


def exporter_of(edit: Edit) -> Exporter:
    """The exporter of an edit.

    Raises:
        UserError: there is none for its kind.
    """
    exporter = EXPORTERS.get(type(edit))
    if exporter is None:
        known = ", ".join(sorted(each.__name__ for each in EXPORTERS))
        raise UserError(f"edits of kind {type(edit).__name__} can't be exported; export one of {known}")
    return exporter
