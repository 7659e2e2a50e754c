"""Exports of stored individuals: checkpoints with provenance, and coefficient files."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from moevolve.evaluators.errors import UserError
from moevolve.search.genomes.eep.coefficients import write_coefficients
from moevolve.search.genomes.eep.genome import EepGenome
from moevolve.search.genomes.repaired import RepairedGenome
from moevolve.search.loop.scores import FULL, interval, with_outcomes
from moevolve.search.service.subject import bound_subject, find_subject
from moevolve.store.reader import StoreReader
from moevolve.store.records import ExportRecord, IndividualDetail
from moevolve.store.repository import Store
from moevolve.workers.config import Device, Dtype
from moevolve.workers.export.card import CheckpointForm, ExportCard, ExportReport, ExportScore
from moevolve.workers.export.export import export_model
from moevolve.workers.methods.eep.edit import EepEdit
from moevolve.workers.model.loading import placed


def export_individual(
    store: Store,
    reference: str,
    directory: Path,
    form: CheckpointForm | None = None,
    model: str | None = None,
    device: Device | None = None,
    dtype: Dtype | None = None,
) -> ExportReport:
    """Write an individual's model as a verified checkpoint and record the export.

    `form` is as `export_model` has it, `model` as `bound_subject` has it, `device` and `dtype` are as `placed` has
    them.

    Raises:
        UserError: the target is taken, the model isn't there any more, or the form can't express the individual.
        ExportError: the checkpoint failed its verification.
        StoreError: no such individual.
    """
    if reference == FULL:
        raise UserError(f"{FULL}: the full model is a checkpoint already; name an individual as SEARCH:INDEX")
    subject = bound_subject(store, reference, model=model)
    assert subject.detail is not None
    detail = subject.detail
    report = export_model(
        placed(subject.config.model, device, dtype), subject.edit, directory, _card(store, detail), form
    )
    checks = json.dumps(asdict(report.agreement))
    store.add_export(detail.ref, ExportRecord(str(report.directory), report.form, checks))
    return report


def export_coefficients(store: StoreReader, reference: str, path: Path) -> None:
    """Write an EEP individual as a coefficient file of the authors' format.

    Raises:
        UserError: the file exists, or the individual is of another kind.
    """
    subject = find_subject(store, reference, weights=False)
    if isinstance(subject.genome, RepairedGenome):
        raise UserError(f"{reference}: it is repaired, which a coefficient file can't say; export a checkpoint")
    if not isinstance(subject.genome, EepGenome):
        raise UserError(f"{reference}: only EEP individuals have coefficient files")
    edit = subject.genome.express()
    if isinstance(edit, EepEdit) and edit.alignment is not None:
        raise UserError(
            f"{reference}: its experts are merged with their neurons aligned, which a coefficient file can't say; "
            "export a checkpoint"
        )
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
