"""`db copy`."""

from __future__ import annotations

from typing import Annotated

import typer

import moevolve.db
from moevolve.search.cli._console import output, print_json
from moevolve.search.cli._options import DEFAULT_STORE, JsonOption, StoreOption


def copy(
    to: Annotated[str, typer.Option("--to", metavar="URL", help="Store to copy to, made if need be.")],
    searches: Annotated[
        list[str] | None, typer.Argument(metavar="[SEARCH]...", help="Names or ids; none copies all.")
    ] = None,
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
) -> None:
    """Copy searches with all that belongs to them to another store, SQLite or PostgreSQL.

    There they rank and resume as they would here. Repeating it brings the copy up to date.
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
