"""The winner's checkpoint once more in fewer bits, checked as the winner was."""

from __future__ import annotations

import gc
import shutil
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.fitness.scoring import Answer
from moevolve.evaluators.metrics import confidence_interval
from moevolve.evaluators.scales import SCALES
from moevolve.evaluators.types import PreparedSplit
from moevolve.search.loop.final_table import FinalTable, Score
from moevolve.search.running.candidates import Candidate, prepared_split
from moevolve.search.shrink.guard import OnStage, check_winner, checks_table
from moevolve.search.shrink.options import ShrinkOptions
from moevolve.search.shrink.page import QuantisedCheckpoint, Written
from moevolve.workers.checkpoints.files import config_file, read_json, weight_bytes
from moevolve.workers.contract.edits import Edit, IdentityEdit
from moevolve.workers.contract.messages import EvaluationReply, EvaluationRequest
from moevolve.workers.contract.settings import EngineConfig, ModelConfig

if TYPE_CHECKING:
    from moevolve.workers.model.resident import ResidentModel
    from moevolve.workers.worker import EvaluationWorker


def check_quantisable(request: ShrinkOptions) -> None:
    """Refuse a request to quantise what can't be, before anything is searched.

    Raises:
        UserError: the library isn't installed, the model's weights have few bits already or may get code of their own,
            or GGUF has no form of it.
    """
    option, is_gguf = f"--quantise {request.quantise}", request.quantise == "gguf-q8_0"
    library = "gguf" if is_gguf else "compressed-tensors"
    if find_spec(library.replace("-", "_")) is None:
        raise UserError(f"{option} needs the library {library}: pip install 'moevolve[quantised]'")
    if request.custom_code or request.active is not None:
        raise UserError(f"{option}: only checkpoints without code of their own are quantised; leave --custom-code out")
    if request.model.endswith(".gguf") or "quantization_config" in read_json(config_file(ModelConfig(request.model))):
        raise UserError(f"{option}: {request.model} is quantised already; the new checkpoint keeps its format")
    if is_gguf:
        from moevolve.workers.export.quantise_gguf import check_gguf

        try:
            check_gguf(ModelConfig(request.model))
        except UserError as error:
            raise UserError(f"{option}: {error}; leave it out, and give the new checkpoint to a converter") from None


def quantised_folder(folder: Path, kind: str) -> Path:
    """The folder beside a checkpoint's for the same in fewer bits."""
    return folder.with_name(f"{folder.name}-{kind}")


def quantised_winner(
    request: ShrinkOptions, subject: Candidate, table: FinalTable, written: Written, path: Path, on_stage: OnStage
) -> QuantisedCheckpoint:
    """Quantise a winner's checkpoint into a folder beside it, and check that like the winner.

    If the checks refuse it and the request doesn't force it, the folder is removed again.

    Args:
        request: The request.
        subject: The winner.
        table: Final table of the search.
        written: The winner's checkpoint.
        path: Run file; the checks are kept beside it.
        on_stage: It is told every step.

    Raises:
        UserError: the checkpoint isn't a stock one, or can't be quantised.
        ExportError: what was written isn't what was to be written.
    """
    from moevolve.workers.checkpoints.loading import dtype_of, load_config
    from moevolve.workers.export.quantise import GGUF_FILE, quantise

    kind = request.quantise
    assert kind is not None
    if written.form != "stock":
        raise UserError(
            f"--quantise {kind}: {written.directory} is a {written.form} checkpoint, and only stock ones are quantised"
        )
    folder = quantised_folder(written.directory, kind)
    if not folder.is_dir():
        on_stage(f"quantising the checkpoint to {kind}")
        quantise(written.directory, folder, kind)
    model = subject.config.model
    dtype = dtype_of(model, load_config(model))
    weights = folder / GGUF_FILE if kind == "gguf-q8_0" else folder
    other = ModelConfig(str(weights), device=model.device, device_map=model.device_map, dtype=dtype)
    worker = _TwoModels(replace(model, dtype=dtype), other, subject.config.engine)
    on_stage("checking the quantised checkpoint's answers")
    scores = _test_scores(worker, subject, table)
    assert table.best is not None
    best = replace(table.best, label=f"{table.best.label}, {kind}", scores=scores)
    entries = (*table.entries[:-1], best)
    kept = path.with_name(f"checks-{kind}.json")
    checks, loops = check_winner(subject, replace(table, entries=entries), request, kept, lambda: worker, on_stage)
    refused = any(check.faults for check in checks) or loops.fault is not None
    found = QuantisedCheckpoint(
        kind, folder, weight_bytes(folder), best, checks, loops, kept=not refused or request.force
    )
    if found.kept:
        _add_checks(folder / "README.md", found)
    else:
        shutil.rmtree(folder)
    return found


def _add_checks(card: Path, found: QuantisedCheckpoint) -> None:
    """Add the scores and checks of a quantised checkpoint to its card, unless an earlier command has."""
    text, title = card.read_text(encoding="utf-8"), "Its own scores on `test`: "
    if title not in text:
        scores = ", ".join(f"{each.task} {SCALES[each.scale].phrase(each.score)}" for each in found.entry.scores)
        card.write_text(f"{text}\n{title}{scores}.\n\n{checks_table(found.checks, found.loops)}\n", encoding="utf-8")


def _test_scores(worker: _TwoModels, subject: Candidate, table: FinalTable) -> tuple[Score, ...]:
    """The quantised checkpoint's scores on `test`, which the full model has in the table."""
    sections = zip(subject.config.tasks, table.tasks, strict=True)
    splits = {task: prepared_split(subject, section.name, "test") for section, task in sections}
    refs = tuple(split.ref for split in splits.values())
    for edit in (IdentityEdit(), subject.edit):  # what is compared with the full model needs that first
        reply = worker.evaluate(EvaluationRequest(edit, refs), tuple(splits.values()))
        if reply.failure is not None:
            raise UserError(f"the quantised checkpoint of {table.winner} can't be run: {reply.failure}")
    found = []
    for task, split in splits.items():
        result = reply.results[split.fingerprint]
        low, high = confidence_interval(result.outcomes, metric=split.metric)
        scale = next(each.scale for each in table.full.scores if each.task == task)
        found.append(Score(task, "test", result.score, low, high, scale=scale))
    return tuple(found)


class _TwoModels:
    """A worker that has the quantised checkpoint where others apply an edit. One of both is in memory at a time.

    What is remembered of the full model's predictions serves the other one, whose output head is the same.
    """

    def __init__(self, full: ModelConfig, quantised: ModelConfig, engine: EngineConfig) -> None:
        self._full, self._quantised, self._engine = full, quantised, replace(engine, vllm=None)
        self._model: ModelConfig | None = None
        self._worker: EvaluationWorker | None = None

    @property
    def resident(self) -> ResidentModel:
        return (self._worker or self._loaded(IdentityEdit())).resident

    def evaluate(self, request: EvaluationRequest, splits: tuple[PreparedSplit, ...]) -> EvaluationReply:
        return self._loaded(request.edit).evaluate(replace(request, edit=IdentityEdit()), splits)

    def answer(self, edit: Edit, *splits: PreparedSplit) -> tuple[tuple[Answer, ...], ...]:
        return self._loaded(edit).answer(IdentityEdit(), *splits)

    def has(self, edit: Edit) -> bool:
        return self._model == self._model_of(edit)

    def _model_of(self, edit: Edit) -> ModelConfig:
        return self._full if isinstance(edit, IdentityEdit) else self._quantised

    def _loaded(self, edit: Edit) -> EvaluationWorker:
        from moevolve.workers.checkpoints.loading import placed
        from moevolve.workers.contract.capacity import release_freed_memory
        from moevolve.workers.worker import EvaluationWorker

        model = self._model_of(edit)
        if self._worker is None or self._model != model:
            memory = {} if self._worker is None else self._worker.memory
            self._worker = None
            gc.collect()
            release_freed_memory()
            self._worker, self._model = EvaluationWorker(placed(model), self._engine), model
            self._worker.memory.update(memory)
        return self._worker
