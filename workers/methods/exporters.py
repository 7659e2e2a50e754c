"""Which exporter makes checkpoints of which kind of edit."""

from __future__ import annotations

from moevolve.evaluators.errors import UserError
from moevolve.workers.export.base import Exporter
from moevolve.workers.methods.base import Edit, IdentityEdit
from moevolve.workers.methods.eep.edit import EepEdit
from moevolve.workers.methods.eep.export import EepExporter
from moevolve.workers.methods.factorllm.edit import FactorLlmEdit
from moevolve.workers.methods.factorllm.export import FactorLlmExporter
from moevolve.workers.methods.nanomoe.edit import NanoMoeEdit
from moevolve.workers.methods.nanomoe.export import NanoMoeExporter
from moevolve.workers.methods.tomoe.edit import ToMoeEdit
from moevolve.workers.methods.tomoe.export import ToMoeExporter

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
