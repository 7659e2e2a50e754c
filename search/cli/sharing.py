"""Commands that show searches to others: as a picture, as a page, or as a site."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

import moevolve
from moevolve.search.cli._requests import DEFAULT_STORE, StoreOption, takes
from moevolve.search.cli.output.console import output
from moevolve.search.requests.searches import PlotRequest, ReportRequest


@takes(PlotRequest, "form")
def plot(
    request: PlotRequest,
    out: Annotated[Path, typer.Option("-o", "--output", help="Picture to write (.png, .svg, .pdf).")],
    store: StoreOption = DEFAULT_STORE,
) -> None:
    moevolve.plot(store, request.search, out, individual=request.individual)
    output.print(f"wrote {out}")


@takes(ReportRequest)
def report(
    request: ReportRequest,
    out: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="HTML file to write.")],
    analysis: Annotated[
        Path | None, typer.Option("--analysis", metavar="DIR", help="Folder that `analyse -o` wrote, to show too.")
    ] = None,
    store: StoreOption = DEFAULT_STORE,
) -> None:
    # A report needs at most a model's config, for the searched matrices, and must not download it.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")

    found = moevolve.report(store, request.search, out, limit=request.limit, analysis=analysis)
    output.print(f"wrote {out}", soft_wrap=True)
    for gap in found.gaps if found.tasks else ():
        output.print(f"not measured: {gap.what}; {gap.command}", soft_wrap=True)


def serve(
    host: Annotated[
        str | None, typer.Option("--host", help="Address to listen at; default: 127.0.0.1, for this machine only.")
    ] = None,
    port: Annotated[int | None, typer.Option("--port", help="Port to listen at; default: 8080.")] = None,
    hosts: Annotated[
        list[str] | None,
        typer.Option("--hosts", metavar="NAME", help="A further host name of the server; repeatable."),
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(
            "--store", envvar="MOEVOLVE_STORE", help="SQLAlchemy URL; default: the settings', or a file here."
        ),
    ] = None,
    tokens: Annotated[
        Path | None,
        typer.Option(
            "--tokens", help="File of tokens, readable by its owner only: lines `read TOKEN` or `write TOKEN`."
        ),
    ] = None,
    settings: Annotated[Path | None, typer.Option("--settings", help="Further settings of the server (YAML).")] = None,
) -> None:
    """Serve a store: its searches in the browser, and an HTTP API for them."""

    def on_ready(urls: tuple[str, ...]) -> None:
        output.print(f"serving at {', '.join(urls)}; Ctrl-C stops it", soft_wrap=True)

    moevolve.serve(settings, store=store, host=host, port=port, hosts=hosts or None, tokens=tokens, on_ready=on_ready)
