"""Maintain stores: upgrade, check, prune, copy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

import moevolve
from moevolve.search.cli._requests import DEFAULT_STORE, JsonOption, StoreOption, shows, takes
from moevolve.search.cli.output.console import output, print_json, print_table
from moevolve.search.interface.stores import CopyRequest, PruneRequest, UpgradeRequest
from moevolve.search.shrink.check import CheckRequest

if TYPE_CHECKING:
    from moevolve.store.records import Upgrade
    from moevolve.store.upkeep.copy import CopyReport
    from moevolve.store.upkeep.prune import PruneReport


@shows(UpgradeRequest)
def upgrade(done: Upgrade, _: UpgradeRequest) -> None:
    if done.before == done.after:
        output.print(f"nothing to do: the store has schema {done.after}", soft_wrap=True)
    else:
        output.print(f"upgraded from schema {done.before} to {done.after}", soft_wrap=True)


@takes(CheckRequest)
def check(request: CheckRequest, store: StoreOption = DEFAULT_STORE, as_json: JsonOption = False) -> None:
    found = moevolve.ask(store, request)
    if as_json:
        print_json(found)
    else:
        counts = (found.searches, found.individuals, found.evaluations, found.calibrations)
        cells = [found.revision, *(f"{count:,}" for count in counts), f"{found.bytes / 2**20:,.1f}"]
        print_table(None, "schema | >searches | >individuals | >evaluations | >calibrations | >MiB", [cells])
        for problem in found.problems:
            output.print(problem, soft_wrap=True)
    if found.problems:
        raise typer.Exit(1)


@shows(PruneRequest)
def prune(done: PruneReport, request: PruneRequest) -> None:
    deleted = "would delete" if request.dry_run else "deleted"
    output.print(
        f"{deleted}: {done.searches} searches, {done.individuals:,} individuals, "
        f"{done.evaluations:,} evaluations, {done.calibrations:,} calibrations ({done.bytes:,} bytes of content)"
        f"{'; the file is smaller by that' if done.vacuumed else ''}",
        soft_wrap=True,
    )


@shows(CopyRequest)
def copy(done: CopyReport, _: CopyRequest) -> None:
    output.print(
        f"copied {', '.join(done.searches) or 'nothing'}: {done.individuals:,} new individuals, {done.decided:,} "
        f"decided since, {done.evaluations:,} evaluations, {done.calibrations} calibrations, {done.exports} exports",
        soft_wrap=True,
    )
