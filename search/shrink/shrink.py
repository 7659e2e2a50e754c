"""From a request to a smaller checkpoint: tasks and settings, the search, the export and the page."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from moevolve.evaluators.errors import UserError
from moevolve.search.config.run import RunConfig
from moevolve.search.drawing import save
from moevolve.search.interface.export import ExportRequest
from moevolve.search.interface.opening import opened_store
from moevolve.search.loop.final_table import FinalTable
from moevolve.search.loop.setup import SearchSetup
from moevolve.search.pools.ray_actor import ModelProbe
from moevolve.search.report.fitness import kept_figure
from moevolve.search.results.gain import code_gain, search_gain
from moevolve.search.results.kept import kept_by_size
from moevolve.search.running.candidates import Candidate, bound_candidate
from moevolve.search.running.execute import execute, ray_pool
from moevolve.search.running.launch import recorded, set_up_new
from moevolve.search.running.observer import Observer
from moevolve.search.running.study import SharedWorkers
from moevolve.search.shrink.budget import SizeBudget, budget_of
from moevolve.search.shrink.choosing import folder_of, planned_bytes, source_bytes
from moevolve.search.shrink.first_look import first_look, wrong_task
from moevolve.search.shrink.guard import Checks, check_winner, checks_table
from moevolve.search.shrink.keeping import refuse_other_settings, refuse_too_little
from moevolve.search.shrink.options import ShrinkOptions
from moevolve.search.shrink.page import FirstLook, ShrinkPlan, ShrinkResult, Written, faults_found
from moevolve.search.shrink.run_file import choices_of, files_of, has_run_file, read_run, run_file
from moevolve.search.shrink.speed import measured_speed
from moevolve.search.shrink.timing import guard_plan, guard_seconds
from moevolve.store.repository import Store
from moevolve.workers.checkpoints.files import weight_bytes
from moevolve.workers.contract.card import ExportError
from moevolve.workers.export.folder import check_room
from moevolve.workers.export.push import check_login, push
from moevolve.workers.export.servers import loads_in

if TYPE_CHECKING:  # they load torch
    from moevolve.workers.model.resident import ResidentModel
    from moevolve.workers.worker import EvaluationWorker

_FIRST_LOOK, _PUSHED = "first_look.json", "pushed.json"


def shrink(request: ShrinkOptions, observer: Observer, begun: float) -> ShrinkResult | ShrinkPlan:
    """Search for the smaller checkpoint that a request describes, check it and write it.

    Args:
        request: The request.
        observer: It is told every step, and the plan.
        begun: When the request was made, in seconds of `time.monotonic`.

    Raises:
        UserError: the request is wrong, or the full model doesn't know a task; nothing has been searched then.
        ExportError: the checkpoint is larger than requested.
    """
    budget = checked(request)
    seconds: dict[str, float] = {}
    looks: list[FirstLook] = []
    with ModelProbe() as probe, ExitStack() as opened:
        workers = SharedWorkers(partial(ray_pool, probe=probe))
        opened.callback(workers.close)

        def look(config: RunConfig) -> None:
            if not looks:  # before a time or a score is planned for, or else after
                if not folder_of(request).exists():  # the same request may have written it
                    check_room(folder_of(request), probe.call(planned_bytes, config))
                looks.append(_first_look(request, config, probe, observer))

        with _removed_if_refused(files_of(request)):
            with _timed("settings" if request.keep_score is None else "sizes", seconds):
                path = run_file(request, probe, workers, observer, begun, look)
            if request.dry_run:
                return ShrinkPlan(path, path.read_text(encoding="utf-8"))
            config = read_run(request, path)
            with _timed("first look", seconds):
                look(config)
            url = config.store if request.store is None else request.store
            store = opened.enter_context(opened_store(url, create=True))
            refuse_other_settings(store, config, folder_of(request))
        observer.on_note(guard_plan(request))
        with _timed("search", seconds):
            setup = recorded(set_up_new(config, probe.call), store, str(path), call=probe.call)
            observer.on_begin(setup.config)
            table = execute(setup, store, observer, workers.lend)
            workers.close()  # the checks need the memory
        if request.keep_score is not None:
            refuse_too_little(request, store, setup)
        found = _searched(request, store, setup, table, path, looks[0], seconds)
        if table.winner is not None:
            found = _shipped(request, store, table.winner, found, observer, seconds)
        if found.written is not None:
            with _timed("speed", seconds):
                speed = measured_speed(setup.config.model, found.written, observer)
            # Sizes are predicted, but a format that can't be packed anew becomes larger by a repair.
            if budget is not None and found.written.weight_bytes > budget.size:
                raise ExportError(
                    f"the weight files take {found.written.weight_bytes:,} bytes, more than --size {budget.text}",
                    found.written.directory,
                )
            pushed = _pushed(request, found.written, path, observer, seconds)
            found = replace(found, speed=speed, pushed=pushed)
        return found


def _searched(
    request: ShrinkOptions,
    store: Store,
    setup: SearchSetup,
    table: FinalTable,
    path: Path,
    look: FirstLook,
    seconds: dict[str, float],
) -> ShrinkResult:
    """The result of the search alone; of --keep-score with a figure beside the run file of what the sizes keep."""
    dense, winner = setup.facts.dense, table.winner
    sizes = () if request.keep_score is None else kept_by_size(store, store.search(table.search))
    if sizes:
        save(kept_figure(sizes), path.with_name("sizes.svg"))
    return ShrinkResult(
        model=setup.config.model.path,
        run_file=path,
        choices=choices_of(path),
        store=store.url,
        table=table,
        experts_full=setup.facts.experts,
        experts=None if winner is None else store.individual(winner).individual.experts,
        layers=len(setup.facts.moe_layers) if dense is None else dense.layers,
        weight_bytes=source_bytes(setup.config.model),
        first_look=look,
        gain=search_gain(store, table),
        code_gain=code_gain(store, table),
        sizes=sizes,
        seconds=seconds,
    )


def checked(request: ShrinkOptions) -> SizeBudget | None:
    """The size that a request asks for, after refusing what would fail after hours of searching.

    Raises:
        UserError: The request is wrong, whatever the model and the data are.
    """
    if not request.data and not request.tasks:
        raise UserError("say what the model is for: --data PATH, or --task NAME")
    if request.metric is not None and not request.data:
        raise UserError(
            f"--metric {request.metric} is for --data; a task names its own: matching: {{function: FILE.py:NAME}}"
        )
    budget = budget_of(request)
    if request.time is not None and request.evaluations is not None:
        raise UserError("--time and --evaluations both set the number of candidates; give one of them")
    guard_seconds(request)
    if request.push is not None:
        check_login(request.push)
    folder = folder_of(request)
    taken = (folder.exists() or folder.is_symlink()) and not (folder.is_dir() and not any(folder.iterdir()))
    if taken and not has_run_file(request):  # the same request may have written it
        raise UserError(f"--output {folder} exists and isn't empty; choose another folder, or remove it")
    return budget


def _shipped(
    request: ShrinkOptions,
    store: Store,
    winner: str,
    found: ShrinkResult,
    observer: Observer,
    seconds: dict[str, float],
) -> ShrinkResult:
    """Check the winner, and export it if it stays within the limits or the request forces it.

    The run file has the checks beside it.
    """
    with _timed("checks", seconds):
        observer.on_stage("checking the winner's answers")
        subject, path = bound_candidate(store, winner), found.run_file.with_name("checks.json")
        load = cache(partial(_worker, subject))
        limit = guard_seconds(request, 3600 * store.hours(subject.search.id))
        tasks, loops = check_winner(subject, found.table, limit, path, load, observer.on_stage)
    found = replace(found, checks=tasks, loops=loops)
    faults = faults_found(tasks, loops)
    if faults and not request.force:
        return found
    with _timed("export", seconds):
        observer.on_stage("writing the checkpoint, and comparing it with the model")
        written = _export(store, subject, lambda: load().resident, folder_of(request), faults, (tasks, loops))
        return replace(found, written=written)


@contextmanager
def _removed_if_refused(folder: Path) -> Iterator[None]:
    """Remove a folder again that a request has made, if the request is refused."""
    was_there = folder.exists()
    try:
        yield
    except UserError:
        if not was_there:
            shutil.rmtree(folder, ignore_errors=True)
        raise


@contextmanager
def _timed(stage: str, seconds: dict[str, float]) -> Iterator[None]:
    begun = time.monotonic()
    yield
    seconds[stage] = time.monotonic() - begun


def _worker(subject: Candidate) -> EvaluationWorker:
    """A worker in this process."""
    from moevolve.workers.checkpoints.loading import placed
    from moevolve.workers.worker import EvaluationWorker

    return EvaluationWorker(placed(subject.config.model), replace(subject.config.engine, vllm=None))


def _export(
    store: Store,
    subject: Candidate,
    load: Callable[[], ResidentModel],
    folder: Path,
    faults: Sequence[str],
    checks: Checks,
) -> Written:
    """Export the winner, unless the folder has it already; its card has the checks and tells its faults."""
    from moevolve.search.interface.export import needs_requantising

    assert subject.detail is not None
    winner = subject.detail.ref
    found = next((one for one in subject.detail.exports if Path(one.path).resolve() == folder.resolve()), None)
    if found is not None and folder.is_dir():
        return Written(folder, found.form, weight_bytes(folder), loads_in(folder, found.form))
    notes = (*(f"It was exported in spite of this: {fault}." for fault in faults), checks_table(*checks))
    requantise, why = needs_requantising(subject), tuple[tuple[str, str], ...]()
    try:
        report = ExportRequest(winner, folder, requantise=requantise).export(store, subject, notes, load)
    except UserError as error:
        if not requantise:
            raise
        # A result of hours in a larger form is better than none.
        why = (("not in the base model's format", str(error)),)
        notes += (f"It isn't in the format of the base model: {error}.",)
        report = ExportRequest(winner, folder).export(store, subject, notes, load)
    programs = loads_in(report.directory, report.form)
    return Written(report.directory, report.form, weight_bytes(report.directory), programs, (*report.changes, *why))


def _pushed(
    request: ShrinkOptions, written: Written, path: Path, observer: Observer, seconds: dict[str, float]
) -> str | None:
    """Upload a checkpoint to the repository that is asked for, and return its URL.

    A file beside the run file `path` keeps it, so that a repeated request uploads nothing again.
    """
    if request.push is None:
        return None
    kept = path.with_name(_PUSHED)
    done = json.loads(kept.read_text(encoding="utf-8")) if kept.is_file() else {}
    if request.push not in done:
        with _timed("upload", seconds):
            observer.on_stage(f"uploading to {request.push}")
            done[request.push] = push(written.directory, request.push)
        kept.write_text(json.dumps(done), encoding="utf-8")
    return str(done[request.push])


def _first_look(request: ShrinkOptions, config: RunConfig, probe: ModelProbe, observer: Observer) -> FirstLook:
    """Look at the full model, and refuse to search for what it can't do itself, unless the request forces that."""
    observer.on_stage("asking the full model")
    counted = request.experts is not None or request.size is not None
    # Where their number is searched or the model is dense, there is none.
    experts = config.genome.model_dump()["experts"] if counted else None
    found = first_look(config, experts, probe, files_of(request) / _FIRST_LOOK)
    for line in found.lines():
        observer.on_note(line)
    wrong = wrong_task(found)
    if wrong is not None and not request.force:
        raise UserError(wrong)
    return found
