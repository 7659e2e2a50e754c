"""Check, export and time a search's winner."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from moevolve.evaluators.errors import UserError
from moevolve.search.interface.checkpoints.export import ExportRequest, needs_requantising
from moevolve.search.loop.final_table import FinalTable
from moevolve.search.loop.scores import FULL
from moevolve.search.running.candidates import Candidate, find_candidate
from moevolve.search.running.observer import Observer
from moevolve.search.shrink.findings import Speed, Written
from moevolve.search.shrink.goal import Goal
from moevolve.search.shrink.guard import check_winner, checks_table
from moevolve.search.shrink.record import Checks, Journal
from moevolve.store.repository import Store
from moevolve.workers.checkpoints.files import weight_bytes
from moevolve.workers.contract.capacity import release_unused_models
from moevolve.workers.contract.card import ExportError
from moevolve.workers.contract.settings import ModelConfig
from moevolve.workers.export.servers import loads_in
from moevolve.workers.profiling.report import (
    NEW_TOKENS,
    ProfiledModel,
    ProfileError,
    ProfileSettings,
    usual_prompt_tokens,
)

if TYPE_CHECKING:  # they load torch
    from moevolve.workers.model.resident import ResidentModel
    from moevolve.workers.worker import EvaluationWorker


# Timings of each model. Three of them differed by 15 % on a busy machine.
_REPEATS = 5


def finish(goal: Goal, store: Store, journal: Journal, table: FinalTable, observer: Observer) -> None:
    """Check a search's winner, write its checkpoint and time it; skip the steps that the record has.

    Raises:
        ExportError: The checkpoint is larger than requested.
    """
    if table.winner is None:
        journal.note(status="failed", failure="every candidate failed")
        return
    subject = find_candidate(store, table.winner)
    load = cache(partial(_worker, subject, goal.fits))
    checks = _checked(goal, store, journal, table, subject, load, observer)
    if checks.faults and not goal.request.force:
        journal.note(status="refused", failure="; ".join(checks.faults))
        return
    if journal.record.written is None or not goal.folder.is_dir():
        with journal.stage("export"):
            exported = _exported(goal, store, subject, checks, lambda: load().resident)
            journal.note(written=exported, speed=None)
    written = journal.record.written
    assert written is not None
    # Sizes are predicted, but a format that can't be packed anew becomes larger by a repair.
    if goal.amount.kind == "size" and written.weight_bytes > goal.amount.number:
        raise ExportError(
            f"the weight files take {written.weight_bytes:,} bytes, more than {goal.amount}", written.directory
        )
    load.cache_clear()
    release_unused_models()  # the processes that are timed need the memory
    if journal.record.speed is None:
        with journal.stage("speed"):
            speed = measured_speed(subject.config.model, written, observer)
            journal.note(speed=speed)
    journal.note(status="finished")


def _checked(
    goal: Goal,
    store: Store,
    journal: Journal,
    table: FinalTable,
    subject: Candidate,
    load: Callable[[], EvaluationWorker],
    observer: Observer,
) -> Checks:
    """Compare the winner's answers with the full model's, unless the record has that."""
    searched = 3600 * store.hours(subject.search.id)
    seconds, known = goal.guard_seconds(searched), journal.record.checks
    # Without --guard-time a continued search, which has taken longer, leaves more time.
    if known is not None and known.winner == table.winner and (goal.guard is None or known.seconds == seconds):
        return known
    with journal.stage("checks"):
        checks = check_winner(subject, table, seconds, load, observer.on_stage)
        journal.note(checks=checks)
    return checks


def _worker(subject: Candidate, fits: Path) -> EvaluationWorker:
    """Make a worker in this process, which finds the winner's fits where it was searched for on this machine."""
    from moevolve.workers.checkpoints.loading import placed
    from moevolve.workers.worker import EvaluationWorker

    engine = replace(subject.config.engine, vllm=None)
    return EvaluationWorker(placed(subject.config.model), engine, fits=fits)


def _exported(
    goal: Goal, store: Store, subject: Candidate, checks: Checks, load: Callable[[], ResidentModel]
) -> Written:
    """Export the winner; its card has the checks and tells its faults."""
    winner = subject.individual.ref
    notes = (*(f"It was exported in spite of this: {fault}." for fault in checks.faults), checks_table(checks))
    requantise, why = needs_requantising(subject), tuple[tuple[str, str], ...]()
    try:
        report = ExportRequest(winner, goal.folder, requantise=requantise).export(store, subject, notes, load)
    except UserError as error:
        if not requantise:
            raise
        # A result of hours in a larger form is better than none.
        why = (("not in the base model's format", str(error)),)
        notes += (f"It isn't in the format of the base model: {error}.",)
        report = ExportRequest(winner, goal.folder).export(store, subject, notes, load)
    programs = loads_in(report.directory, report.form)
    return Written(report.directory, report.form, weight_bytes(report.directory), programs, (*report.changes, *why))


def measured_speed(model: ModelConfig, written: Written, observer: Observer) -> Speed | None:
    """Time a new checkpoint; None where that fails, or where the full model doesn't fit on the device."""
    if model.expert_offload != "device":
        observer.on_note("speed and memory aren't measured, since the full model doesn't fit on the device")
        return None
    try:
        return _timed(model, written, observer)
    except (UserError, ProfileError) as error:
        observer.on_note(f"speed and memory aren't measured: {error}")
        return None


def _timed(model: ModelConfig, written: Written, observer: Observer) -> Speed:
    """Time a new checkpoint beside the one that it was made of, one sequence at a time, in plain `transformers`.

    The code of the new checkpoint is run only if this program has written that, for a native checkpoint.

    Raises:
        UserError: One of them can't be loaded.
        ProfileError: Its process has ended.
    """
    from moevolve.workers.checkpoints.loading import placed
    from moevolve.workers.profiling.checkpoints import position_limit
    from moevolve.workers.profiling.run import profile_models

    model, path = placed(model), str(written.directory)
    tokens, cores = usual_prompt_tokens(position_limit(model)), len(os.sched_getaffinity(0))
    settings = ProfileSettings((1,), tokens, NEW_TOKENS, _REPEATS, model.device, model.dtype, cores)
    native = written.form == "native"
    models = [ProfiledModel.full(FULL, model), ProfiledModel(path, path, None, model.device_map, native)]
    with tempfile.TemporaryDirectory(prefix="moevolve-profile-") as scratch:
        report = profile_models(models, settings, Path(scratch), observer.on_stage)
    full, new = (profile.batches[0] for profile in report.models)
    gains = [before / after for before, after in zip(full.decode_seconds, new.decode_seconds, strict=True)]
    rates = full.decode_rate, new.decode_rate, min(gains), max(gains)
    return Speed(report.reference.load.device_name, *rates, full.peak_bytes, new.peak_bytes)
