"""`evaluate`."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

import moevolve
from moevolve.search.cli._console import output, percent, print_json, print_table
from moevolve.search.cli._options import DEFAULT_STORE, JsonOption, LoadingOption, ModelOption, StoreOption


def evaluate(
    individual: Annotated[str, typer.Argument(metavar="INDIVIDUAL|full", help="SEARCH:INDEX, or the unedited model.")],
    task: Annotated[
        str, typer.Option("--task", help="Any task, or NAME@FITNESS; also one that the search did not use.")
    ],
    split: Annotated[Literal["search", "dev", "test"], typer.Option("--split", help="Which split.")] = "test",
    search: Annotated[str | None, typer.Option("--search", help="Whose full model (with `full`).")] = None,
    model: ModelOption = None,
    overrides: LoadingOption = None,
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
) -> None:
    """Score an individual, or the full model, on one split of a task, in this process. The result is stored."""
    found = moevolve.evaluate(
        individual, task, split=split, search=search, model=model, overrides=overrides or (), store=store
    )
    record, bounds = found.record, found.interval
    if as_json:
        print_json(found)
        return
    if record.score is None or bounds is None:
        output.print(f"{individual} failed on {record.task} ({record.split}): {record.failure}")
        raise typer.Exit(1)
    columns = [
        ("individual", False),
        ("task", False),
        ("split", False),
        ("score", True),
        ("95 % interval", True),
        ("examples", True),
    ]
    shown = f"{percent(bounds[0])} - {percent(bounds[1])}"
    print_table(
        None,
        columns,
        [[individual, record.task, record.split, percent(record.score), shown, str(record.examples_seen)]],
    )
