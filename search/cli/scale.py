"""`scale`."""

from __future__ import annotations

from typing import Annotated

import typer

import moevolve
from moevolve.search.cli._options import DEFAULT_STORE, JsonOption, SearchArgument, StoreOption
from moevolve.search.cli._steering import tell


def scale(
    search: SearchArgument,
    workers: Annotated[int, typer.Argument(help="How many workers it is to have.")],
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
) -> None:
    """Ask a running search to have more or fewer workers from now on; no individual changes by that."""
    control = moevolve.scale(search, workers, store=store)
    tell(search, control, f"have {workers} workers", as_json)
