"""`scale`."""

from __future__ import annotations

from typing import Annotated

import typer

import moevolve
from moevolve.search.cli._options import DEFAULT_STORE, JsonOption, SearchArgument, StoreOption
from moevolve.search.cli._steering import tell


def scale(
    search: SearchArgument,
    workers: Annotated[int | None, typer.Argument(help="How many workers it is to have.")] = None,
    priority: Annotated[
        int | None,
        typer.Option("--priority", help="Searches that share its cluster get more workers if theirs is higher."),
    ] = None,
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
) -> None:
    """Ask a running search to have more or fewer workers, or another priority; no individual changes by that."""
    control = moevolve.scale(search, workers, store=store, priority=priority)
    asked = [] if workers is None else [f"have {workers} workers"]
    asked += [] if priority is None else [f"run with priority {priority}"]
    tell(search, control, " and ".join(asked), as_json)
