"""Exporting stored individuals: as checkpoints with provenance, and as coefficient files."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from moevolve.evaluators.errors import UserError
from moevolve.search.genomes.eep.coefficients import write_coefficients
from moevolve.search.genomes.eep.genome import EepGenome
from moevolve.search.genomes.repaired import RepairedGenome
from moevolve.search.loop.scores import FULL, interval, with_outcomes
from moevolve.search.operations.subject import bound_subject, find_subject
from moevolve.search.requests.models import ExportRequest
from moevolve.store.reader import StoreReader
from moevolve.store.records import ExportRecord, IndividualDetail
from moevolve.store.repository import Store
from moevolve.workers.checkpoints.loading import placed
from moevolve.workers.contract.card import ExportCard, ExportReport, ExportScore
from moevolve.workers.export.export import export_model


def export(store: Store, request: ExportRequest) -> ExportReport:
    """See `ExportRequest`. The export is recorded in the store."""
    reference = request.individual
    if reference == FULL:
        raise UserError(f"{FULL}: the full model is a checkpoint already; name an individual as SEARCH:INDEX")
    subject = bound_subject(store, reference, model=request.model)
    assert subject.detail is not None
    detail = subject.detail
    model = placed(subject.config.model, request.device, request.dtype)
    report = export_model(model, subject.edit, Path(request.directory), _card(store, detail), request.form)
    checks = json.dumps(asdict(report.agreement))
    store.add_export(detail.ref, ExportRecord(str(report.directory), report.form, checks))
    return report


def export_coefficients(store: StoreReader, reference: str, path: Path) -> None:
    """Write an EEP individual as a coefficient file in the authors' format.

    Raises:
        UserError: the file exists, or the individual is of another kind.
    """
    subject = find_subject(store, reference, weights=False)
    if isinstance(subject.genome, RepairedGenome):
        raise UserError(f"{reference}: it is repaired, which a coefficient file can't say; export a checkpoint")
    if not isinstance(subject.genome, EepGenome):
        raise UserError(f"{reference}: only EEP individuals have coefficient files")
    if path.exists():
        raise UserError(f"{path} exists already; choose another name")
    write_coefficients(path, subject.genome)


def _card(store: StoreReader, detail: IndividualDetail) -> ExportCard:
    graph = store.ancestors(detail.ref)
    nearest_first = sorted(graph.nodes, key=lambda node: (-node.depth, node.index))
    lines = tuple(
        f"{graph.search_name}:{node.index} ({node.phase}, {node.operator}): {node.summary}" for node in nearest_first
    )
    scores = []
    for item in detail.evaluations:
        if item.score is not None:
            low, high = interval(with_outcomes(store, item))
            scores.append(ExportScore(item.task, item.split, item.score, item.examples_seen, low, high))
    return ExportCard(
        title=detail.ref,
        base_model=detail.search.model_path,
        base_fingerprint=detail.search.model_fingerprint,
        search_name=detail.search.name,
        search_id=detail.search.id,
        individual=detail.ref,
        lineage=lines,
        scores=tuple(scores),
    )
