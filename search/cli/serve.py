"""`serve`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import moevolve
from moevolve.search.cli._console import output


def serve(
    host: Annotated[
        str | None, typer.Option("--host", help="Address to listen at; default: 127.0.0.1, for this machine only.")
    ] = None,
    port: Annotated[int | None, typer.Option("--port", help="Port to listen at; default: 8080.")] = None,
    hosts: Annotated[
        list[str] | None,
        typer.Option("--hosts", metavar="NAME", help="A further name that it is reached under; can be repeated."),
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(
            "--store", envvar="MOEVOLVE_STORE", help="SQLAlchemy URL; default: the settings', or a file here."
        ),
    ] = None,
    tokens: Annotated[
        Path | None,
        typer.Option("--tokens", help="File of tokens, its owner's alone: lines `read TOKEN` or `write TOKEN`."),
    ] = None,
    settings: Annotated[Path | None, typer.Option("--settings", help="Further settings of the server (YAML).")] = None,
) -> None:
    """Serve a store: its searches in the browser, and an HTTP API for them."""

    def on_ready(urls: tuple[str, ...]) -> None:
        output.print(f"serving at {', '.join(urls)}; Ctrl-C stops it", soft_wrap=True)

    moevolve.serve(settings, store=store, host=host, port=port, hosts=hosts or None, tokens=tokens, on_ready=on_ready)
