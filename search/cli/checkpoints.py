"""Commands that export, import and profile checkpoints."""

from __future__ import annotations

import signal
from pathlib import Path

import moevolve
from moevolve.search.cli._requests import DEFAULT_STORE, JsonOption, StoreOption, takes
from moevolve.search.cli.output.console import exit_with_message, output, print_json, print_table, stages
from moevolve.search.cli.output.profile import print_profile
from moevolve.search.genomes.registry import part_names
from moevolve.search.requests.models import ExportRequest, ImportEepRequest, ProfileRequest
from moevolve.search.requests.recipes import ApplyRequest, RecipeRequest
from moevolve.workers.export.folder import check_target


@takes(ExportRequest)
def export(request: ExportRequest, store: StoreOption = DEFAULT_STORE, as_json: JsonOption = False) -> None:
    with exit_with_message("interrupted; nothing was written", moevolve.ExportError):
        check_target(Path(request.directory).expanduser().absolute())  # before torch is imported, which takes seconds
        report = moevolve.ask(store, request)
    if as_json:
        print_json(report)
        return
    parts = part_names([moevolve.show(store, request.individual).search.genome_kind])
    _print_report(report, parts)


def _print_report(report: moevolve.ExportReport, parts: str) -> None:
    """Print where a checkpoint is, what it is like and how it was verified; `parts` are what its layers consist of."""
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
    output.print(
        f"wrote {report.directory} ({report.form} checkpoint, {report.experts} {parts}, {report.active} active, "
        f"{report.parameters:,} parameters, {report.size_bytes / 2**20:.1f} MiB); read from its files, {verified}",
        soft_wrap=True,
    )
    for title, names in report.changes:
        output.print(f"{title}: {names}", soft_wrap=True)
    if report.form == "mask":
        output.print(f"{report.directory / 'README.md'} says how to apply it", soft_wrap=True)
        return
    output.print(how_to_load(report.directory, report.form), soft_wrap=True)


def how_to_load(directory: Path, form: str) -> str:
    """A line that says how an export is loaded."""
    files = sorted(file.name for file in directory.glob("*.gguf"))
    if files:
        return f"load {directory / files[0]} with llama.cpp, or as model.path"
    remote = ", trust_remote_code=True" if form == "native" else ""
    return f'load it with: AutoModelForCausalLM.from_pretrained("{directory}"{remote})'


@takes(RecipeRequest)
def recipe(request: RecipeRequest, store: StoreOption = DEFAULT_STORE) -> None:
    found = moevolve.ask(store, request)
    if request.output is None:
        print_json(found)
        return
    what = "" if request.data is None else f", and its token sequences to {request.data}"
    output.print(f"wrote the recipe of {found.individual} to {request.output}{what}", soft_wrap=True)
    output.print(f"apply it with: moevolve apply {request.output} MODEL -o DIR", soft_wrap=True)


@takes(ApplyRequest)
def apply(request: ApplyRequest, as_json: JsonOption = False) -> None:
    with exit_with_message("interrupted; nothing was written", moevolve.ExportError):
        report = moevolve.apply(**request.arguments())
    if as_json:
        print_json(report)
    else:
        _print_report(report, "experts")


@takes(ImportEepRequest)
def import_eep(request: ImportEepRequest, store: StoreOption = DEFAULT_STORE, as_json: JsonOption = False) -> None:
    imported = moevolve.ask(store, request)
    if as_json:
        print_json(imported)
        return
    rows = [[item.ref, str(item.path), str(item.experts), str(item.groups), item.summary] for item in imported]
    columns = [("individual", False), ("file", False), ("experts", True), ("groups", True), ("genome", False)]
    print_table(None, columns, rows)


@takes(ProfileRequest)
def profile(request: ProfileRequest, store: StoreOption = DEFAULT_STORE, as_json: JsonOption = False) -> None:
    # A closed terminal sends SIGHUP, which must leave as little behind as Ctrl-C does.
    signals = (signal.SIGTERM, signal.SIGHUP)
    interrupted = "interrupted; nothing was stored or left behind"
    with exit_with_message(interrupted, moevolve.ProfileError, signals=signals), stages() as on_stage:
        report = moevolve.ask(store, request, on_stage)
    if as_json:
        print_json(report)
    else:
        print_profile(report)
