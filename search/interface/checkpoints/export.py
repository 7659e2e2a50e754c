"""A stored individual as a checkpoint with provenance."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
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
    Requantise,
    Threads,
)
from moevolve.search.interface.request import Flag, Request, about, record
from moevolve.search.loop.scores import interval, with_outcomes
from moevolve.search.running.candidates import Candidate, find_individual
from moevolve.search.running.observer import SILENT, Observer
from moevolve.store.reader import StoreReader
from moevolve.store.records import FULL_MODEL, EvaluationRecord, ExportRecord, IndividualDetail
from moevolve.store.repository import Store
from moevolve.workers.contract.card import ExportCard, ExportReport, ExportScore
from moevolve.workers.contract.edits import Edit
from moevolve.workers.contract.settings import ModelConfig
from moevolve.workers.families.registry import only_inside

if TYPE_CHECKING:  # it loads torch
    from moevolve.workers.export.source import SourceExport
    from moevolve.workers.model.resident import ResidentModel

# Options that only the source form has a use for.
_SOURCE_ALONE = ("mtp", "requantise")


@record
class CheckpointRequest(Request):
    """What the requests that write a checkpoint have in common."""

    _: KW_ONLY
    form: ExportForm = None
    mtp: Mtp = None
    requantise: Requantise = False
    device: ModelDevice = None
    dtype: ModelDtype = None

    def write(
        self,
        model: ModelConfig,
        edit: Edit,
        card: ExportCard,
        directory: Path,
        load: Callable[[], ResidentModel] | None = None,
    ) -> ExportReport:
        """Write an edited model as a checkpoint; `load` returns the unedited one, if it is loaded already.

        Raises:
            UserError, ExportError: as `ExportRequest`.
        """
        from moevolve.workers.checkpoints.loading import placed
        from moevolve.workers.export.export import export_model
        from moevolve.workers.export.lists import export_list
        from moevolve.workers.export.source import changes_weights, export_source

        if self.form in ("list", "vllm-ascend", "easy-ep"):
            self._refuse("a list of experts has no tensors", "device", "dtype", *_SOURCE_ALONE)
            return export_list(model, edit, directory, self.form, card)
        plan = self._source_plan(model, edit)
        if plan is not None:
            if changes_weights(edit) is not None:
                model = placed(model, self.device, self.dtype)
            else:
                self._refuse("the individual is exported by copying bytes alone", "device", "dtype", "requantise")
            return export_source(model, edit, plan, directory, card, self.requantise, load)
        self._refuse("only the source form (--form source) has a use for it", *_SOURCE_ALONE)
        loaded = placed(model, self.device, self.dtype) if load is None else load()
        return export_model(loaded, edit, directory, card, self.form if self.form in ("stock", "native") else None)

    def _refuse(self, reason: str, *names: str) -> None:
        """Raise an error that names the first of these options that is given."""
        for name in names:
            if getattr(self, name) not in (None, False):
                raise UserError(f"--{name.replace('_', '-')}: {reason}; leave it out")

    def _source_plan(self, model: ModelConfig, edit: Edit) -> SourceExport | None:
        """Plan an export that copies tensors; None for another form.

        Without a given form they are copied if an option says so, or of quantised checkpoints if nothing prevents it.
        """
        from moevolve.workers.checkpoints.loading import load_config, packing
        from moevolve.workers.export.source import changes_weights, plan_source

        settings = load_config(model)
        asked = self.requantise or self.mtp is not None or only_inside(settings.model_type)
        if self.form == "source" or (self.form is None and asked):
            return plan_source(model, edit, self.mtp or "drop")
        changed = self.form, self.device, self.dtype
        if any(changed) or packing(model, settings) is None:
            return None
        try:
            return None if changes_weights(edit) is not None else plan_source(model, edit)
        except UserError:
            return None


@record
class ExportRequest(CheckpointRequest):
    """Write an individual as a checkpoint, and verify its files: copied ones byte by byte, others layer by layer.

    Or write the list of the experts that it keeps.

    Raises:
        ExportError: the checkpoint failed its verification; its files are kept as `DIRECTORY.unverified`.
        UserError: the folder or file exists, the model can't be loaded, or the form can't express the individual.
        StoreError: the store or individual doesn't exist.
    """

    writes = True
    individual: IndividualRef
    directory: Annotated[
        str | Path, about("New folder of the checkpoint, or file of a list."), Flag(metavar="DIR", kind=Path)
    ]
    _: KW_ONLY
    model: ModelPath = None
    threads: Threads = None

    def answer(self, store: Store, *, observer: Observer = SILENT) -> ExportReport:
        observer.on_stage("reading the search and the checkpoint")
        candidate = find_individual(store, self.individual, self.model)
        observer.on_stage("writing the checkpoint, and comparing it with the model")
        return self.export(store, candidate)

    def export(
        self,
        store: Store,
        candidate: Candidate,
        notes: tuple[str, ...] = (),
        load: Callable[[], ResidentModel] | None = None,
    ) -> ExportReport:
        """Export an individual that is restored already; `notes` are paragraphs of the card, for `load` see `write`."""
        from moevolve.workers.checkpoints.loading import use_threads

        detail = candidate.individual
        use_threads(self.threads or candidate.config.engine.threads)
        card = replace(_card(store, detail), notes=notes)
        report = self.write(candidate.config.model, candidate.edit, card, Path(self.directory), load)
        checks: dict[str, float] = {"copied": report.copied} if report.copied else {}
        if report.agreement is not None:
            checks = asdict(report.agreement)
        elif report.anew:
            checks |= {"anew": report.anew, "difference": report.difference}
        store.add_export(detail.ref, ExportRecord(str(report.directory), report.form, json.dumps(checks)))
        return report


def needs_requantising(candidate: Candidate) -> bool:
    """Whether an individual changes weights of a quantised checkpoint, so that only `requantise` keeps its format."""
    from moevolve.workers.checkpoints.loading import load_config, packing
    from moevolve.workers.export.source import changes_weights

    model = candidate.config.model
    return packing(model, load_config(model)) is not None and changes_weights(candidate.edit) is not None


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
        scores=scores_of(store, detail.evaluations),
        full_scores=scores_of(store, _of_full(store, detail)),
    )


def _of_full(store: StoreReader, detail: IndividualDetail) -> list[EvaluationRecord]:
    """Return the full model's evaluations on the individual's rows."""
    rows = [one.task_fingerprint for one in detail.evaluations]
    search = detail.search
    found = store.evaluations(FULL_MODEL, search.model_fingerprint, search.engine_fingerprint, rows)
    return sorted(found, key=lambda one: rows.index(one.task_fingerprint))


def scores_of(store: StoreReader, evaluations: Sequence[EvaluationRecord]) -> tuple[ExportScore, ...]:
    """Return the scores of an individual's evaluations with their intervals."""
    found = []
    for item in evaluations:
        if item.score is not None:
            low, high = interval(with_outcomes(store, item))
            score = ExportScore(item.task, item.split, item.score, item.examples_seen, low, high)
            found.append(replace(score, scale=item.scale, metric=item.metric))
    return tuple(found)
