"""From a request to a smaller checkpoint: tasks and settings, the search, the export and the page."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter

from moevolve.evaluators.errors import UserError
from moevolve.search.config.run import RunConfig
from moevolve.search.loop.final_table import FinalTable
from moevolve.search.operations.opening import opened_store, refuse_server
from moevolve.search.operations.subject import Subject, bound_subject
from moevolve.search.pools.ray_actor import FirstWorker
from moevolve.search.requests.models import ExportRequest
from moevolve.search.requests.shrink import ShrinkRequest
from moevolve.search.running.launch import launch, set_up_new
from moevolve.search.running.observer import Observer
from moevolve.search.shrink.budget import Budget, SpeedBudget, budget_of
from moevolve.search.shrink.choosing import choices_of, folder_of, has_run_file, read_run, run_file
from moevolve.search.shrink.guard import check_winner, checks_table
from moevolve.search.shrink.page import RetainedMass, ShrinkPlan, Shrunk, Speed, TaskCheck, Written
from moevolve.search.shrink.speed import measured_speed, slower_than_asked
from moevolve.search.shrink.timing import seconds_of
from moevolve.store.reader import StoreReader
from moevolve.store.repository import Store
from moevolve.workers.contract.card import ExportError
from moevolve.workers.contract.edits import IdentityEdit
from moevolve.workers.contract.settings import ModelConfig

_TOKENS = 4096
"""Tokens of a task that are routed: shares of an expert are then known within a percent or two."""
_ROUTING = TypeAdapter(tuple[RetainedMass, ...])


def shrink(request: ShrinkRequest, observer: Observer) -> Shrunk | ShrinkPlan:
    """See `ShrinkRequest`."""
    budget = _checked(request)
    seconds: dict[str, float] = {}
    with FirstWorker() as first:
        with _timed("settings", seconds):
            path = run_file(request, first, observer.on_stage)
        if request.dry_run:
            return ShrinkPlan(path, path.read_text(encoding="utf-8"))
        config = read_run(request, path)
        with opened_store(config.store if request.store is None else request.store, create=True) as store:
            _check_same(request, store, config)
            routing: tuple[RetainedMass, ...] = ()
            experts = config.genome.model_dump()["experts"]
            if request.speed is None and experts is not None:  # else all are kept, or their number is searched
                with _timed("routing", seconds):
                    observer.on_stage("measuring the routing of every task")
                    routing = retained_mass(config, experts, first, path.with_name("routing.json"))
                    for each in routing:
                        observer.on_note(str(each))
            with _timed("search", seconds):
                setup = set_up_new(config, None, first.call)
                table = launch(setup, store, observer, or_resume=True, source=str(path), first=first)
            checks, written = _shipped(request, store, table, path, observer, seconds)
            speed = None
            if written is not None and isinstance(budget, SpeedBudget):
                with _timed("speed", seconds):
                    speed = measured_speed(setup.config.model, written, budget, observer.on_stage)
            if written is not None:
                _check_budget(request, budget, written, speed)
            return Shrunk(
                model=setup.config.model.path,
                run_file=path,
                choices=choices_of(path),
                store=store.url,
                table=table,
                experts_full=setup.facts.experts,
                experts=None if table.winner is None else store.individual(table.winner).individual.experts,
                layers=len(setup.facts.moe_layers),
                weight_bytes=_source_bytes(setup.config.model),
                routing=routing,
                checks=checks,
                speed=speed,
                written=written,
                seconds=seconds,
            )


def _checked(request: ShrinkRequest) -> Budget | SpeedBudget | None:
    """The budget of a request, after refusing what would fail after hours of searching."""
    if isinstance(request.store, str):
        refuse_server(request.store)
    if not request.data and not request.tasks:
        raise UserError("say what the model is for: --data PATH, or --task NAME")
    budget = budget_of(request)
    if request.time is not None:
        if request.evaluations is not None:
            raise UserError("--time and --evaluations both set the number of candidates; give one of them")
        seconds_of(request.time)
    folder = folder_of(request)
    taken = (folder.exists() or folder.is_symlink()) and not (folder.is_dir() and not any(folder.iterdir()))
    if taken and not has_run_file(request):  # the same request may have written it
        raise UserError(f"--output {folder}: there is something already; choose another folder, or remove it")
    return budget


def _check_same(request: ShrinkRequest, store: StoreReader, config: RunConfig) -> None:
    """Refuse a search of the same name with other settings, in terms of this request rather than of a launch."""
    found = next((one.search for one in store.searches() if one.search.name == config.name), None)
    if found is not None and found.config_hash != config.config_hash:
        raise UserError(
            f"--output {folder_of(request)}: the store has a search {config.name} with other settings; choose another "
            "folder, or another store with --store"
        )


def _check_budget(
    request: ShrinkRequest, budget: Budget | SpeedBudget | None, written: Written, speed: Speed | None
) -> None:
    """Raise an error if a checkpoint is larger or slower than was asked for.

    Sizes are predicted, but a format that can't be packed anew becomes larger by a repair.
    """
    if isinstance(budget, Budget) and written.weight_bytes > budget.size:
        raise ExportError(
            f"the weight files take {written.weight_bytes:,} bytes, more than --size {budget.text}", written.directory
        )
    if isinstance(budget, SpeedBudget) and speed is not None:
        slower = slower_than_asked(budget, speed)
        if slower is not None and not request.force:
            raise ExportError(f"{slower}; give the same command again to time it again, or --force", written.directory)


def retained_mass(config: RunConfig, experts: int, first: FirstWorker, path: Path) -> tuple[RetainedMass, ...]:
    """Measure the full model's routing on the calibration rows of every task, once for a search: `path` keeps it."""
    if path.is_file():
        return _ROUTING.validate_json(path.read_bytes())
    shares = first.call(routing_shares, config)
    names = [section.task().name for section in config.tasks]
    weights = np.array([section.weight for section in config.tasks])
    found = retained(names, shares, weights, experts)
    path.write_bytes(_ROUTING.dump_json(found))
    return found


def routing_shares(config: RunConfig) -> NDArray[np.float64]:
    """Load the model and measure each expert's share of the routing weights.

    Returns:
        Shares, float64 [tasks, MoE layers, experts]; those of a layer sum to 1.
    """
    from moevolve.workers.checkpoints.loading import placed
    from moevolve.workers.worker import EvaluationWorker

    worker = EvaluationWorker(placed(config.model), config.engine)
    splits = [section.prepared("calibration", calibrating=True) for section in config.tasks]
    usages = [worker.analyse(IdentityEdit(), split, _TOKENS) for split in splits]
    sums = np.array([[layer.weights for layer in usage.routed] for usage in usages])
    shares: NDArray[np.float64] = sums / np.maximum(sums.sum(axis=2, keepdims=True), np.finfo(float).tiny)
    return shares


def retained(
    names: list[str], shares: NDArray[np.float64], weights: NDArray[np.float64], experts: int
) -> tuple[RetainedMass, ...]:
    """The shares of routing weights that the most used experts have.

    Args:
        names: Names of the tasks.
        shares: See `routing_shares`.
        weights: Weights of the tasks, [tasks].
        experts: Experts per layer to keep.
    """
    together = np.average(shares, axis=0, weights=weights)
    kept = np.argsort(-together, axis=1, kind="stable")[:, :experts]
    best = -np.sort(-shares, axis=2)[:, :, :experts]
    return tuple(
        RetainedMass(
            name, float(np.take_along_axis(own, kept, axis=1).sum(axis=1).mean()), float(top.sum(axis=1).mean())
        )
        for name, own, top in zip(names, shares, best, strict=True)
    )


def _shipped(
    request: ShrinkRequest, store: Store, table: FinalTable, path: Path, observer: Observer, seconds: dict[str, float]
) -> tuple[tuple[TaskCheck, ...], Written | None]:
    """Check the winner, and export it if it stays within the limits or the request forces it.

    The run file at `path` has the checks beside it.
    """
    if table.winner is None:
        return (), None
    with _timed("checks", seconds):
        observer.on_stage("checking the winner's answers")
        subject = bound_subject(store, table.winner)
        checks = check_winner(subject, table, request, path.with_name("checks.json"))
    faults = [f"{check.task}: {fault}" for check in checks for fault in check.faults]
    if faults and not request.force:
        return checks, None
    with _timed("export", seconds):
        observer.on_stage("exporting")
        return checks, _export(store, subject, folder_of(request), faults, checks)


@contextmanager
def _timed(stage: str, seconds: dict[str, float]) -> Iterator[None]:
    begun = time.monotonic()
    yield
    seconds[stage] = time.monotonic() - begun


def _export(
    store: Store, subject: Subject, folder: Path, faults: Sequence[str], checks: Sequence[TaskCheck]
) -> Written:
    """Export the winner, unless the folder has it already; its card has the checks and tells its faults."""
    from moevolve.search.operations.export import export_subject, needs_requantising

    assert subject.detail is not None
    winner = subject.detail.ref
    found = next((one for one in subject.detail.exports if Path(one.path).resolve() == folder.resolve()), None)
    if found is not None and folder.is_dir():
        return Written(folder, found.form, _weight_bytes(folder))
    notes = (*(f"It was exported in spite of this: {fault}." for fault in faults), checks_table(checks))
    requantise, why = needs_requantising(subject), tuple[tuple[str, str], ...]()
    try:
        report = export_subject(store, subject, ExportRequest(winner, folder, requantise=requantise), notes)
    except UserError as error:
        if not requantise:
            raise
        # A result of hours in a larger form is better than none.
        why = (("not in the base model's format", str(error)),)
        notes += (f"It isn't in the format of the base model: {error}.",)
        report = export_subject(store, subject, ExportRequest(winner, folder), notes)
    return Written(report.directory, report.form, _weight_bytes(report.directory), (*report.changes, *why))


def _source_bytes(model: ModelConfig) -> int:
    from moevolve.workers.checkpoints.files import gguf_file, gguf_parts
    from moevolve.workers.checkpoints.loading import checkpoint_folder

    file = gguf_file(model)
    if file is not None:
        return sum(part.stat().st_size for part in gguf_parts(file))
    return _weight_bytes(checkpoint_folder(model))


def _weight_bytes(folder: Path) -> int:
    """Size of the weight files in a checkpoint's folder."""
    return sum(file.stat().st_size for suffix in ("safetensors", "gguf") for file in folder.glob(f"*.{suffix}"))
