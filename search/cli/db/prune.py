"""`db prune`."""

from __future__ import annotations

from typing import Annotated

import typer

import moevolve.db
from moevolve.search.cli._console import output, print_json
from moevolve.search.cli._options import DEFAULT_STORE, JsonOption, StoreOption


def prune(
    searches: Annotated[
        list[str] | None, typer.Option("--search", metavar="NAME", help="Delete this search, for good; repeatable.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be deleted.")] = False,
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
) -> None:
    """Delete searches, and evaluations and calibrations that no other search has any use for.

    Without --search, only what is left over from others.
    """
    done = moevolve.db.prune(*(searches or ()), store=store, dry_run=dry_run)
    if as_json:
        print_json(done)
        return
    output.print(
        f"{'would delete' if dry_run else 'deleted'}: {done.searches} searches, {done.individuals:,} individuals, "
        f"{done.evaluations:,} evaluations, {done.calibrations:,} calibrations ({done.bytes:,} bytes of content)"
        f"{'; the file is smaller by that' if done.vacuumed else ''}",
        soft_wrap=True,
    )
