"""`plot`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moevolve.search.cli._console import DEFAULT_STORE, StoreOption, output


def register(app: typer.Typer) -> None:
    app.command()(plot)


def plot(
    search: Annotated[str, typer.Argument(help="Name or id of the search.")],
    out: Annotated[Path, typer.Option("-o", "--output", help="Picture to write (.png, .svg, .pdf).")],
    individual: Annotated[
        str | None, typer.Option("--individual", help="Whose genome to draw; default: the search's best.")
    ] = None,
    store: StoreOption = DEFAULT_STORE,
) -> None:
    """Draw a search: score over evaluations, and what was searched of the best individual (matrices, masks ...)."""
    from moevolve.search.config.files import parse_stored_config
    from moevolve.search.config.run import RunConfig
    from moevolve.search.loop.scores import full_fitness
    from moevolve.search.loop.standings import standings
    from moevolve.search.service.evaluate import find_subject, start_of
    from moevolve.search.service.plot import plot_search
    from moevolve.store.repository import Store

    with Store.open(store, create=False) as opened:
        record = opened.search(search)
        history = opened.history(record.id)
        imported = None if isinstance(parse_stored_config(record.config), RunConfig) else f"{record.name}:0"
        reference = individual or imported or standings(opened, record, history).winner
        subject = None if reference is None else find_subject(opened, reference, weights=False)
        genome, start = (None, None) if subject is None else (subject.genome, start_of(subject, history))
        plot_search(out, record.name, history, full_fitness(opened, record), genome, reference or "", start)
    output.print(f"wrote {out}", highlight=False)
