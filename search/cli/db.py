"""Maintain stores: upgrade, check, prune, copy."""

from __future__ import annotations

import typer

import moevolve
from moevolve.search.cli._requests import DEFAULT_STORE, JsonOption, StoreOption, takes
from moevolve.search.cli.output.console import output, print_json, print_table
from moevolve.search.requests.stores import CheckRequest, CopyRequest, PruneRequest, UpgradeRequest


@takes(UpgradeRequest)
def upgrade(request: UpgradeRequest, store: StoreOption = DEFAULT_STORE, as_json: JsonOption = False) -> None:
    done = moevolve.ask(store, request)
    if as_json:
        print_json(done)
    elif done.before == done.after:
        output.print(f"nothing to do: the store has schema {done.after}")
    else:
        output.print(f"upgraded from schema {done.before} to {done.after}")


@takes(CheckRequest)
def check(request: CheckRequest, store: StoreOption = DEFAULT_STORE, as_json: JsonOption = False) -> None:
    found = moevolve.ask(store, request)
    if as_json:
        print_json(found)
    else:
        columns = [(name, name != "schema") for name in ("schema", "searches", "individuals", "evaluations")]
        counts = (found.searches, found.individuals, found.evaluations, found.calibrations)
        cells = [found.revision, *(f"{count:,}" for count in counts), f"{found.bytes / 2**20:,.1f}"]
        print_table(None, [*columns, ("calibrations", True), ("MiB", True)], [cells])
        for problem in found.problems:
            output.print(problem, soft_wrap=True)
    if found.problems:
        raise typer.Exit(1)


@takes(PruneRequest)
def prune(request: PruneRequest, store: StoreOption = DEFAULT_STORE, as_json: JsonOption = False) -> None:
    done = moevolve.ask(store, request)
    if as_json:
        print_json(done)
        return
    deleted = "would delete" if request.dry_run else "deleted"
    output.print(
        f"{deleted}: {done.searches} searches, {done.individuals:,} individuals, "
        f"{done.evaluations:,} evaluations, {done.calibrations:,} calibrations ({done.bytes:,} bytes of content)"
        f"{'; the file is smaller by that' if done.vacuumed else ''}",
        soft_wrap=True,
    )


@takes(CopyRequest)
def copy(request: CopyRequest, store: StoreOption = DEFAULT_STORE, as_json: JsonOption = False) -> None:
    done = moevolve.ask(store, request)
    if as_json:
        print_json(done)
        return
    output.print(
        f"copied {', '.join(done.searches) or 'nothing'}: {done.individuals:,} new individuals, {done.decided:,} "
        f"decided since, {done.evaluations:,} evaluations, {done.calibrations} calibrations, {done.exports} exports",
        soft_wrap=True,
    )
