"""A stored individual as a checkpoint with provenance."""

from __future__ import annotations

import json
from dataclasses import KW_ONLY, asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from moevolve.evaluators.errors import UserError
from moevolve.search.interface.parameters import (
    ExportForm,
    IndividualRef,
    ModelDevice,
    ModelDtype,
    ModelPath,
    Mtp,
    PadExperts,
    Requantise,
)
from moevolve.search.interface.request import Flag, Request, about, record
from moevolve.search.loop.scores import FULL, interval, with_outcomes
from moevolve.search.running.candidates import Candidate, bound_candidate
from moevolve.store.reader import StoreReader
from moevolve.store.records import ExportRecord, IndividualDetail
from moevolve.store.repository import Store
from moevolve.workers.contract.card import ExportCard, ExportReport, ExportScore
from moevolve.workers.contract.edits import Edit
from moevolve.workers.contract.settings import ModelConfig
from moevolve.workers.families.registry import only_inside

if TYPE_CHECKING:  # it loads torch
    from moevolve.workers.export.source import SourceExport

_SOURCE_ALONE = ("mtp", "pad_experts", "requantise")
"""Options that only the source form has a use for."""


@record
class CheckpointRequest(Request):
    """What the requests that write a checkpoint have in common."""

    _: KW_ONLY
    form: ExportForm = None
    mtp: Mtp = None
    requantise: Requantise = False
    pad_experts: PadExperts = None
    device: ModelDevice = None
    dtype: ModelDtype = None


@record
class ExportRequest(CheckpointRequest):
    """Write an individual as a checkpoint, and verify its files: copied ones byte by byte, others layer by layer.

    Raises:
        ExportError: the checkpoint failed its verification; its files are kept as `DIRECTORY.unverified`.
        UserError: the folder exists, the model can't be loaded, or the form can't express the individual.
        StoreError: there is no such store or individual.
    """

    writes = True
    individual: IndividualRef
    directory: Annotated[str | Path, about("New folder of the checkpoint."), Flag(metavar="DIR", kind=Path)]
    _: KW_ONLY
    model: ModelPath = None

    def answer(self, store: Store) -> ExportReport:
        if self.individual == FULL:
            raise UserError(f"{FULL}: the full model is a checkpoint already; name an individual as SEARCH:INDEX")
        return export_candidate(store, bound_candidate(store, self.individual, model=self.model), self)


def export_candidate(
    store: Store, candidate: Candidate, request: ExportRequest, notes: tuple[str, ...] = ()
) -> ExportReport:
    """Do as `export` with an individual that is restored already; `notes` are paragraphs of the model card."""
    detail = candidate.detail
    assert detail is not None
    report = written(
        candidate.config.model,
        candidate.edit,
        replace(_card(store, detail), notes=notes),
        Path(request.directory),
        request,
    )
    checks: dict[str, float] = {"copied": report.copied}
    if report.agreement is not None:
        checks = asdict(report.agreement)
    elif report.anew:
        checks |= {"anew": report.anew, "difference": report.difference}
    store.add_export(detail.ref, ExportRecord(str(report.directory), report.form, json.dumps(checks)))
    return report


def written(
    model: ModelConfig, edit: Edit, card: ExportCard, directory: Path, options: CheckpointRequest
) -> ExportReport:
    """Write an edited model as a checkpoint.

    Raises:
        UserError, ExportError: See `ExportRequest`.
    """
    from moevolve.workers.checkpoints.loading import placed
    from moevolve.workers.export.export import export_model
    from moevolve.workers.export.mask import export_mask
    from moevolve.workers.export.source import changes_weights, export_source

    plan = _source_plan(options, model, edit)
    if plan is not None:
        if changes_weights(edit) is not None:
            model = placed(model, options.device, options.dtype)
        else:
            _refuse(options, "the individual is exported by copying bytes alone", "device", "dtype", "requantise")
        return export_source(model, edit, plan, directory, card, options.requantise)
    if options.form == "mask":
        _refuse(options, "a mask is written without running anything", "device", "dtype", *_SOURCE_ALONE)
        return export_mask(model, edit, directory, card)
    _refuse(options, "only the source form (--form source) has a use for it", *_SOURCE_ALONE)
    return export_model(placed(model, options.device, options.dtype), edit, directory, card, options.form)


def _refuse(options: CheckpointRequest, reason: str, *names: str) -> None:
    """Raise an error that names the first of these options that is given."""
    for name in names:
        if getattr(options, name) not in (None, False):
            raise UserError(f"--{name.replace('_', '-')}: {reason}; leave it out")


def needs_requantising(candidate: Candidate) -> bool:
    """Whether an individual changes weights of a quantised checkpoint, so that only `requantise` keeps its format."""
    from moevolve.workers.checkpoints.loading import load_config, packing
    from moevolve.workers.export.source import changes_weights

    model = candidate.config.model
    return packing(model, load_config(model)) is not None and changes_weights(candidate.edit) is not None


def _source_plan(options: CheckpointRequest, model: ModelConfig, edit: Edit) -> SourceExport | None:
    """Plan an export that copies tensors; None for another form.

    Without a given form they are copied if an option says so, and from quantised checkpoints if nothing prevents it.
    """
    from moevolve.workers.checkpoints.loading import load_config, packing
    from moevolve.workers.export.source import changes_weights, plan_source

    settings = load_config(model)
    asked = options.requantise or options.mtp is not None or options.pad_experts is not None
    asked = asked or only_inside(settings.model_type)
    if options.form == "source" or (options.form is None and asked):
        return plan_source(model, edit, options.mtp or "drop", options.pad_experts or 1)
    changed = options.form, options.device, options.dtype
    if any(changed) or packing(model, settings) is None:
        return None
    try:
        return None if changes_weights(edit) is not None else plan_source(model, edit)
    except UserError:
        return None


def _card(store: StoreReader, detail: IndividualDetail) -> ExportCard:
    graph = store.ancestors(detail.ref)
    nearest_first = sorted(graph.nodes, key=lambda node: (-node.depth, node.index))
    lines = tuple(
        f"{graph.search_name}:{node.index} ({node.phase}, {node.operator}): {node.summary}" for node in nearest_first
    )
    return ExportCard(
        title=detail.ref,
        base_model=detail.search.model_path,
        base_fingerprint=detail.search.model_fingerprint,
        search_name=detail.search.name,
        search_id=detail.search.id,
        individual=detail.ref,
        lineage=lines,
        scores=scores_of(store, detail),
    )


def scores_of(store: StoreReader, detail: IndividualDetail) -> tuple[ExportScore, ...]:
    """The scores of an individual with their intervals."""
    found = []
    for item in detail.evaluations:
        if item.score is not None:
            low, high = interval(with_outcomes(store, item))
            found.append(ExportScore(item.task, item.split, item.score, item.examples_seen, low, high))
    return tuple(found)
