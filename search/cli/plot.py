"""`plot`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import moevolve
from moevolve.search.cli._console import output
from moevolve.search.cli._options import DEFAULT_STORE, SearchArgument, StoreOption


def plot(
    search: SearchArgument,
    out: Annotated[Path, typer.Option("-o", "--output", help="Picture to write (.png, .svg, .pdf).")],
    individual: Annotated[
        str | None, typer.Option("--individual", help="Whose genome to draw; default: the search's best.")
    ] = None,
    store: StoreOption = DEFAULT_STORE,
) -> None:
    """Draw a search: score over evaluations, and what was searched of the best individual (matrices, masks ...)."""
    moevolve.plot(search, out, individual=individual, store=store)
    output.print(f"wrote {out}")
