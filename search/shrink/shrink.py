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
from moevolve.search.shrink.budget import SizeBudget, SpeedBudget, budget_of
from moevolve.search.shrink.choosing import folder_of, planned_bytes, source_bytes
from moevolve.search.shrink.first_look import first_look, wrong_task
from moevolve.search.shrink.guard import Checks, check_winner, checks_table
from moevolve.search.shrink.keeping import refuse_other_settings
from moevolve.search.shrink.options import ShrinkOptions
from moevolve.search.shrink.page import FirstLook, QuantisedCheckpoint, ShrinkPlan, ShrinkResult, Speed, Written
from moevolve.search.shrink.quantising import check_quantisable, quantised_folder, quantised_winner
from moevolve.search.shrink.run_file import choices_of, files_of, has_run_file, read_run, run_file
from moevolve.search.shrink.speed import measured_speed, slower_than_asked
from moevolve.search.shrink.timing import guard_plan, guard_seconds
from moevolve.store.repository import Store
from moevolve.workers.checkpoints.files import weight_bytes
from moevolve.workers.contract.card import ExportError
from moevolve.workers.contract.settings import ModelConfig
from moevolve.workers.export.folder import check_room
from moevolve.workers.export.push import check_login, push
from moevolve.workers.export.servers import loads_in
from moevolve.workers.profiling.report import ProfileError

if TYPE_CHECKING:  # they load torch
    from moevolve.workers.model.resident import ResidentModel
    from moevolve.workers.worker import EvaluationWorker

_FIRST_LOOK, _PUSHED = "first_look.json", "pushed.json"
_SAMPLING = {"do_sample": True, "min_p": 0.05, "repetition_penalty": 1.1}
"""What brought a pruned GLM-5.2's loops from 7.2 to 2.3 % of long answers."""


def shrink(request: ShrinkOptions, observer: Observer, begun: float) -> ShrinkResult | ShrinkPlan:
    """Search for the smaller checkpoint that a request describes, check it and write it.

    Args:
        request: The request.
        observer: It is told every step, and the plan.
        begun: When the request was made, in seconds of `time.monotonic`.

    Raises:
        UserError: the request is wrong, or the full model doesn't know a task; nothing has been searched then.
        ExportError: the checkpoint is larger or slower than requested.
    """
    budget = checked(request)
    seconds: dict[str, float] = {}
    looks: list[FirstLook] = []
    with ModelProbe() as probe, ExitStack() as opened:
        workers = SharedWorkers(partial(ray_pool, probe=probe, on_avoided=observer.on_note))
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
            setup = recorded(set_up_new(config, None, probe.call), store, str(path), call=probe.call)
            observer.on_begin(setup.config)
            table = execute(setup, store, observer, workers.lend)
            workers.close()  # the checks need the memory
        searched = 3600 * store.course(store.search(table.search).id).hours
        request = replace(request, guard_time=f"{guard_seconds(request, searched):.3f}s")
        found = _searched(request, store, setup, table, path, looks[0], seconds)
        if table.winner is not None:
            found = _shipped(request, store, table.winner, found, observer, seconds)
        if found.written is not None:
            speed = _checked_speed(request, setup.config.model, found.written, budget, observer, seconds)
            quantised = _quantised(request, store, found, observer, seconds)
            pushed = _pushed(request, found.written, quantised, path, observer, seconds)
            found = replace(found, speed=speed, quantised=quantised, pushed=pushed)
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


def checked(request: ShrinkOptions) -> SizeBudget | SpeedBudget | None:
    """The budget of a request, after refusing what would fail after hours of searching.

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
    elif request.public:
        raise UserError("--public: it is of --push, which isn't given")
    if request.quantise is not None:
        check_quantisable(request)
    if request.sampling and request.model.endswith(".gguf"):
        raise UserError("--sampling: programs that run GGUF files read no generation_config.json; leave it out")
    folder = folder_of(request)
    folders = [folder] if request.quantise is None else [folder, quantised_folder(folder, request.quantise)]
    for each in folders:
        taken = (each.exists() or each.is_symlink()) and not (each.is_dir() and not any(each.iterdir()))
        if taken and not has_run_file(request):  # the same request may have written it
            raise UserError(f"--output {each}: there is something already; choose another folder, or remove it")
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
        tasks, loops = check_winner(subject, found.table, request, path, load, observer.on_stage)
    found = replace(found, checks=tasks, loops=loops)
    faults = [f"{check.task}: {fault}" for check in tasks for fault in check.faults]
    faults += [] if loops.fault is None else [f"all prompts: {loops.fault}"]
    if faults and not request.force:
        return found
    with _timed("export", seconds):
        observer.on_stage("writing the checkpoint, and comparing it with the model")
        written = _export(store, subject, lambda: load().resident, folder_of(request), faults, (tasks, loops))
        return replace(found, written=_with_sampling(written) if request.sampling else written)


def _checked_speed(
    request: ShrinkOptions,
    model: ModelConfig,
    written: Written,
    budget: SizeBudget | SpeedBudget | None,
    observer: Observer,
    seconds: dict[str, float],
) -> Speed | None:
    """Time a new checkpoint.

    Raises:
        ExportError: It is larger or slower than was asked for.
    """
    with _timed("speed", seconds):
        speed = _speed(model, written, budget, observer)
    # Sizes are predicted, but a format that can't be packed anew becomes larger by a repair.
    if isinstance(budget, SizeBudget) and written.weight_bytes > budget.size:
        raise ExportError(
            f"the weight files take {written.weight_bytes:,} bytes, more than --size {budget.text}", written.directory
        )
    if isinstance(budget, SpeedBudget) and speed is not None and not request.force:
        slower = slower_than_asked(budget, speed)
        if slower is not None:
            raise ExportError(f"{slower}; give the same command again to time it again, or --force", written.directory)
    return speed


def _quantised(
    request: ShrinkOptions, store: Store, found: ShrinkResult, observer: Observer, seconds: dict[str, float]
) -> QuantisedCheckpoint | None:
    """Write a new checkpoint once more in fewer bits, if that is asked for."""
    if request.quantise is None:
        return None
    assert found.table.winner is not None and found.written is not None
    with _timed("quantising", seconds):
        subject = bound_candidate(store, found.table.winner)
        return quantised_winner(request, subject, found.table, found.written, found.run_file, observer.on_stage)


def _speed(
    model: ModelConfig, written: Written, budget: SizeBudget | SpeedBudget | None, observer: Observer
) -> Speed | None:
    """Time a new checkpoint; None where that fails and no speed was asked for, or where the full model doesn't fit."""
    if isinstance(budget, SpeedBudget):
        return measured_speed(model, written, budget.sequences, budget.prompt_tokens, observer.on_stage)
    if model.expert_offload != "device":
        observer.on_note("speed and memory aren't measured, since the full model doesn't fit on the device")
        return None
    try:
        return measured_speed(model, written, 1, None, observer.on_stage)
    except (UserError, ProfileError) as error:
        observer.on_note(f"speed and memory aren't measured: {error}")
        return None


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


def _with_sampling(written: Written) -> Written:
    """Ask for sampling that breaks loops in a checkpoint's generation config, which servers read, and say so."""
    path = written.directory / "generation_config.json"
    settings = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    path.write_text(json.dumps(settings | _SAMPLING, indent=2) + "\n", encoding="utf-8")
    sentence = f"`{path.name}` asks for sampling with {', '.join(f'{key} {value}' for key, value in _SAMPLING.items())}"
    card = written.directory / "README.md"
    text = card.read_text(encoding="utf-8")
    if sentence not in text:
        card.write_text(
            f"{text.rstrip()}\n\n{sentence}, which keeps answers from repeating themselves.\n", encoding="utf-8"
        )
    return replace(written, changes=(*written.changes, ("sampling", sentence)))


def _pushed(
    request: ShrinkOptions,
    written: Written,
    quantised: QuantisedCheckpoint | None,
    path: Path,
    observer: Observer,
    seconds: dict[str, float],
) -> tuple[str, ...]:
    """Upload a checkpoint to the repository that is asked for, and a quantised one to another; returns the URLs.

    A file beside the run file `path` keeps them, so that a repeated request uploads nothing again. One that has since
    changed the checkpoint by --sampling doesn't pass for uploaded: the hub refuses the name.
    """
    if request.push is None:
        return ()
    folders = {request.push: written.directory}
    if quantised is not None and quantised.kept:
        folders[f"{request.push}-{quantised.kind}"] = quantised.directory
    kept = path.with_name(_PUSHED)
    done, found = json.loads(kept.read_text(encoding="utf-8")) if kept.is_file() else {}, list[str]()
    with _timed("upload", seconds):
        for repository, folder in folders.items():
            key = f"{repository} --sampling" if request.sampling else repository
            if key not in done:
                observer.on_stage(f"uploading to {repository}")
                done[key] = push(folder, repository, request.public)
                kept.write_text(json.dumps(done), encoding="utf-8")
            found.append(done[key])
    return tuple(found)


def _first_look(request: ShrinkOptions, config: RunConfig, probe: ModelProbe, observer: Observer) -> FirstLook:
    """Look at the full model, and refuse to search for what it can't do itself, unless the request forces that."""
    observer.on_stage("asking the full model")
    counted = request.experts is not None or request.size is not None
    # With --speed all are kept, and where their number is searched or the model is dense, there is none.
    experts = config.genome.model_dump()["experts"] if counted else None
    found = first_look(config, experts, probe, files_of(request) / _FIRST_LOOK)
    for line in found.lines():
        observer.on_note(line)
    wrong = wrong_task(found)
    if wrong is not None and not request.force:
        raise UserError(wrong)
    return found
