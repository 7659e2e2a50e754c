"""Exporting stored individuals: as checkpoints with provenance, and as coefficient files."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
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
from moevolve.workers.checkpoints.loading import load_config, packing, placed
from moevolve.workers.contract.card import ExportCard, ExportReport, ExportScore
from moevolve.workers.contract.edits import Edit
from moevolve.workers.contract.settings import ModelConfig
from moevolve.workers.export.export import export_model
from moevolve.workers.export.mask import export_mask
from moevolve.workers.export.source import SourceExport, changes_weights, export_source, plan_source

_SOURCE_ALONE = ("mtp", "pad_experts", "requantise")
"""Options that only the source form has a use for."""


def export(store: Store, request: ExportRequest, notes: tuple[str, ...] = ()) -> ExportReport:
    """See `ExportRequest`. The export is recorded in the store; `notes` are paragraphs of its card."""
    reference = request.individual
    if reference == FULL:
        raise UserError(f"{FULL}: the full model is a checkpoint already; name an individual as SEARCH:INDEX")
    subject = bound_subject(store, reference, model=request.model)
    assert subject.detail is not None
    detail = subject.detail
    card, directory, model = replace(_card(store, detail), notes=notes), Path(request.directory), subject.config.model
    plan = _source_plan(request, model, subject.edit)
    if plan is not None:
        if changes_weights(subject.edit) is not None:
            model = placed(model, request.device, request.dtype)
        else:
            _refuse(request, "the individual is exported by copying bytes alone", "device", "dtype", "requantise")
        report = export_source(model, subject.edit, directory, card, requantise=request.requantise, plan=plan)
    elif request.form == "mask":
        _refuse(request, "a mask is written without running anything", "device", "dtype", *_SOURCE_ALONE)
        report = export_mask(model, subject.edit, directory, card)
    else:
        _refuse(request, "only the source form (--form source) has a use for it", *_SOURCE_ALONE)
        placement = placed(model, request.device, request.dtype)
        report = export_model(placement, subject.edit, directory, card, request.form)
    checks = json.dumps(_source_checks(report) if report.agreement is None else asdict(report.agreement))
    store.add_export(detail.ref, ExportRecord(str(report.directory), report.form, checks))
    return report


def _refuse(request: ExportRequest, reason: str, *options: str) -> None:
    """Raise an error that names the first of these options that is given."""
    for option in options:
        if getattr(request, option) not in (None, False):
            raise UserError(f"--{option.replace('_', '-')}: {reason}; leave it out")


def _source_checks(report: ExportReport) -> dict[str, float]:
    counts: dict[str, float] = {"copied": report.copied}
    return counts | ({"anew": report.anew, "difference": report.difference} if report.anew else {})


def needs_requantising(store: Store, individual: str) -> bool:
    """Whether an individual changes weights of a quantised checkpoint, so that only `requantise` keeps its format."""
    subject = bound_subject(store, individual)
    model = subject.config.model
    return packing(model, load_config(model)) is not None and changes_weights(subject.edit) is not None


def _source_plan(request: ExportRequest, model: ModelConfig, edit: Edit) -> SourceExport | None:
    """Plan an export that copies tensors; None for another form.

    Without a given form they are copied if an option says so, and from quantised checkpoints if nothing prevents it.
    """
    asked = request.requantise or request.mtp is not None or request.pad_experts is not None
    if request.form == "source" or (request.form is None and asked):
        return plan_source(model, edit, request.mtp or "drop", request.pad_experts or 1)
    if (request.form, request.device, request.dtype) != (None, None, None) or packing(
        model, load_config(model)
    ) is None:
        return None
    try:
        return None if changes_weights(edit) is not None else plan_source(model, edit)
    except UserError:
        return None


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
