"""Maintain stores: upgrade, check, prune, copy."""

from __future__ import annotations

from typing import Annotated

import typer

import moevolve.db
from moevolve.search.cli._requests import DEFAULT_STORE, JsonOption, StoreOption
from moevolve.search.cli.output.console import output, print_json, print_table


def upgrade(store: StoreOption = DEFAULT_STORE, as_json: JsonOption = False) -> None:
    """Migrate a store to this version's schema; refused while one of its searches is running."""
    done = moevolve.db.upgrade(store)
    if as_json:
        print_json(done)
    elif done.before == done.after:
        output.print(f"nothing to do: the store has schema {done.after}")
    else:
        output.print(f"upgraded from schema {done.before} to {done.after}")


def check(store: StoreOption = DEFAULT_STORE, as_json: JsonOption = False) -> None:
    """Check a store for damage; exit code 1 if there is any."""
    found = moevolve.db.check(store)
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


def prune(
    searches: Annotated[
        list[str] | None, typer.Option("--search", metavar="NAME", help="Delete this search, for good; repeatable.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be deleted.")] = False,
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
) -> None:
    """Delete searches, and evaluations and calibrations that no other search needs.

    Without --search, only unneeded evaluations and calibrations are deleted.
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


def copy(
    to: Annotated[str, typer.Option("--to", metavar="URL", help="Store to copy to, made if need be.")],
    searches: Annotated[
        list[str] | None, typer.Argument(metavar="[SEARCH]...", help="Names or ids; none copies all.")
    ] = None,
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
) -> None:
    """Copy searches with everything that belongs to them to another store, SQLite or PostgreSQL.

    The copies rank and resume like the originals. Repeating it brings them up to date.
    """
    done = moevolve.db.copy(*(searches or ()), store=store, to=to)
    if as_json:
        print_json(done)
        return
    output.print(
        f"copied {', '.join(done.searches) or 'nothing'}: {done.individuals:,} new individuals, {done.decided:,} "
        f"decided since, {done.evaluations:,} evaluations, {done.calibrations} calibrations, {done.exports} exports",
        soft_wrap=True,
    )
