"""`report`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

import moevolve
from moevolve.search.cli._console import output
from moevolve.search.cli._options import DEFAULT_STORE, SearchArgument, StoreOption


def report(
    search: SearchArgument,
    out: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="HTML file to write.")],
    limit: Annotated[int, typer.Option("--limit", min=1, help="How many of the best are listed.")] = 5,
    analysis: Annotated[
        Path | None, typer.Option("--analysis", metavar="DIR", help="What `analyse -o` wrote, to be shown too.")
    ] = None,
    store: StoreOption = DEFAULT_STORE,
) -> None:
    """Write a page about a search: scores, figures, lineage, cost, how to do it again. Evaluates nothing."""
    # A report needs a model's config at most, for the searched matrices, and must not go online for it.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")

    found = moevolve.report(search, out, limit=limit, analysis=analysis, store=store)
    output.print(f"wrote {out}", soft_wrap=True)
    for gap in found.gaps if found.tasks else ():
        output.print(f"not measured: {gap.what}; {gap.command}", soft_wrap=True)
