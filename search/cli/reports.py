"""`report`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from moevolve.search.cli._console import DEFAULT_STORE, StoreOption, output


def register(app: typer.Typer) -> None:
    app.command()(report)


def report(
    search: Annotated[str, typer.Argument(help="Name or id of the search.")],
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

    from moevolve.search.report.contents import gather
    from moevolve.search.report.page import write_page
    from moevolve.search.service.analyse import read_analysis
    from moevolve.store.repository import Store

    found = None if analysis is None else read_analysis(analysis)
    with Store.open(store, create=False) as opened:
        contents = gather(opened, search, limit, found)
    write_page(contents, out)
    output.print(f"wrote {out}", highlight=False, soft_wrap=True)
    for gap in contents.standings.gaps if contents.standings.tasks else ():
        output.print(f"not measured: {gap.what}; {gap.command}", highlight=False, markup=False, soft_wrap=True)
