"""Commands that export, import and profile checkpoints."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import moevolve
from moevolve.search.cli._requests import DEFAULT_STORE, JsonOption, StoreOption, asked, shows, takes
from moevolve.search.cli.output.console import exit_with_message, output, print_json, print_table
from moevolve.search.genomes.registry import stored_section
from moevolve.search.interface.checkpoints.export import ExportRequest
from moevolve.search.interface.checkpoints.import_eep import ImportEepRequest
from moevolve.search.interface.checkpoints.profile import ProfileRequest
from moevolve.search.interface.checkpoints.recipe import ApplyRequest, RecipeRequest
from moevolve.search.text import memory_size, parameter_count
from moevolve.workers.contract.card import ListForm
from moevolve.workers.export.folder import check_target, how_to_load

if TYPE_CHECKING:
    from moevolve import Imported
    from moevolve.workers.profiling.report import ModelProfile, ProfileReport


@takes(ExportRequest)
def export(request: ExportRequest, store: StoreOption = DEFAULT_STORE, as_json: JsonOption = False) -> None:
    interrupted = "interrupted; nothing was written"
    with exit_with_message(interrupted, moevolve.ExportError):
        if request.form not in get_args(ListForm):  # before torch is imported, which takes seconds
            check_target(Path(request.directory).expanduser().absolute())
        report = asked(store, request)
    if as_json:
        print_json(report)
        return
    parts = stored_section(moevolve.show(store, request.individual).search.genome_kind).parts
    _print_report(report, parts)


def _print_report(report: moevolve.ExportReport, parts: str) -> None:
    """Print a checkpoint's folder, shape and verification; `parts` names the parts of its layers."""
    if report.form in get_args(ListForm):
        output.print(f"wrote {report.directory} ({report.form}): the {report.experts} experts that each layer keeps")
        for title, command in report.changes:
            output.print(f"{title}: {command}", soft_wrap=True)
        return
    verified = f"all {report.copied} tensors are equal to the source's, byte for byte"
    if report.anew:
        verified = (
            f"{report.copied} tensors are equal to the source's, byte for byte, and {report.anew} were written anew"
            + (f", up to {report.difference:.1%} from the evaluated model's" if report.difference else "")
        )
    if report.agreement is not None:
        verified = (
            f"all {report.agreement.parts} parts agree with the model within "
            f"{report.agreement.accepted_difference:.2g} (most differs: {report.agreement.worst_part})"
        )
    kept = f"{report.experts} {parts}, {report.active} active, " if report.experts > 1 else ""  # else it is dense
    output.print(
        f"wrote {report.directory} ({report.form} checkpoint, {kept}"
        f"{report.parameters:,} parameters, {report.size_bytes / 2**20:.1f} MiB); read from its files, {verified}",
        soft_wrap=True,
    )
    for title, names in report.changes:
        output.print(f"{title}: {names}", soft_wrap=True)
    output.print(how_to_load(report.directory, report.form), soft_wrap=True)


@takes(RecipeRequest)
def recipe(request: RecipeRequest, store: StoreOption = DEFAULT_STORE) -> None:
    found = moevolve.ask(store, request)
    if request.output is None:
        print_json(found)
        return
    output.print(f"wrote the recipe of {found.individual} to {request.output}", soft_wrap=True)
    output.print(f"apply it with: moevolve apply {request.output} MODEL DIR", soft_wrap=True)


@takes(ApplyRequest)
def apply(request: ApplyRequest, as_json: JsonOption = False) -> None:
    with exit_with_message("interrupted; nothing was written", moevolve.ExportError):
        report = asked(None, request)
    if as_json:
        print_json(report)
    else:
        _print_report(report, "experts")


@shows(ImportEepRequest)
def import_eep(found: list[Imported], _: ImportEepRequest) -> None:
    rows = [[item.ref, str(item.path), str(item.experts), str(item.groups), item.summary] for item in found]
    print_table(None, "individual | file | >experts | >groups | genome", rows)


@takes(ProfileRequest)
def profile(request: ProfileRequest, store: StoreOption = DEFAULT_STORE, as_json: JsonOption = False) -> None:
    # A closed terminal sends SIGHUP, which must leave as little behind as Ctrl-C does.
    signals = (signal.SIGTERM, signal.SIGHUP)
    interrupted = "interrupted; nothing was stored or left behind"
    with exit_with_message(interrupted, moevolve.ProfileError, signals=signals):
        report = asked(store, request)
    if as_json:
        print_json(report)
    else:
        _print_profile(report)


def _print_profile(report: ProfileReport) -> None:
    settings, reference = report.settings, report.reference
    ran, task = reference.load, settings.prompts
    machine = ran.device_name if ran.device == "cuda" else f"CPU, {ran.threads} thread{'s' if ran.threads > 1 else ''}"
    prompts = f"{settings.prompt_tokens} prompt"
    if task is not None:
        lengths = f"{task.shortest} to {task.longest} tokens, {task.mean} on average"
        prompts = f"prompts of {task.task} ({task.split}), {lengths},"
    print_table(
        f"{machine}, {ran.dtype}, {prompts} and {settings.new_tokens} new tokens, "
        f"medians of {settings.timed_runs}; ratios to {reference.label}",
        "model | >parameters | >active | >weights | >batch | >peak memory | >prefill tokens/s | >decode tokens/s | "
        ">answers/s",
        [row for model in report.models for row in _profile_rows(model, reference)],
    )
    output.print(f"peak memory: {report.peak_memory}", soft_wrap=True)
    for note in report.notes:
        output.print(note, soft_wrap=True)


def _profile_rows(model: ModelProfile, reference: ModelProfile) -> Iterator[list[str]]:
    """Return a line per batch size; cells that don't depend on it are in the first line only."""
    load, other = model.load, reference.load
    head = [
        model.label,
        f"{parameter_count(load.parameters)}\n{_share(load.parameters, other.parameters)}",
        f"{parameter_count(load.active_parameters)}\n{_share(load.active_parameters, other.active_parameters)}",
        f"{memory_size(load.weight_bytes)}\n{_share(load.weight_bytes, other.weight_bytes)}",
    ]
    for mine, theirs in zip(model.batches, reference.batches, strict=True):
        peak = "-" if mine.peak_bytes is None else memory_size(mine.peak_bytes)
        share = f"\n{_share(mine.peak_bytes, theirs.peak_bytes)}" if mine.peak_bytes and theirs.peak_bytes else ""
        yield [
            *head,
            str(mine.batch_size),
            peak + share,
            f"{mine.prefill_rate:,.0f}\n{mine.prefill_rate / theirs.prefill_rate:.2f}x",
            f"{mine.decode_rate:,.0f}\n{mine.decode_rate / theirs.decode_rate:.2f}x",
            f"{mine.answer_rate:,.1f}\n{mine.answer_rate / theirs.answer_rate:.2f}x",
        ]
        head = [""] * len(head)


def _share(mine: int, theirs: int) -> str:
    return f"{100 * mine / theirs:.0f} %"
