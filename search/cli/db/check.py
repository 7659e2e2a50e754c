"""`db check`."""

from __future__ import annotations

import typer

import moevolve.db
from moevolve.search.cli._console import errors, output, print_json, print_table
from moevolve.search.cli._options import DEFAULT_STORE, JsonOption, StoreOption


def check(store: StoreOption = DEFAULT_STORE, as_json: JsonOption = False) -> None:
    """Look a store through for damage, and for changes by hand; exit code 1 if there is any."""
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
        if found.found > len(found.problems):
            output.print(f"... and {found.found - len(found.problems):,} more")
        if found.unread:
            names = ", ".join(found.unread)
            errors.print(
                f"genomes were not compared with their hashes, since their models' configurations aren't here: {names}",
                soft_wrap=True,
            )
    if found.found:
        raise typer.Exit(1)
