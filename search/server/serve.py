"""Serving a store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY
from pathlib import Path
from typing import Annotated

from moevolve.search.interface.parameters import STORE_VARIABLE
from moevolve.search.interface.request import Flag, Request, about, record

OnReady = Annotated[Callable[[tuple[str, ...]], None], about("Called with the server's URLs once it can be reached.")]


@record
class ServeRequest(Request):
    """Serve a store: its searches in the browser, and an HTTP API for them, until the process is stopped.

    Raises:
        UserError: a setting is wrong, the address can't be listened at, or tokens are needed and there are none.
        StoreError: the store can't be opened.
    """

    settings: Annotated[Path | None, about("Further settings of the server (YAML)."), Flag("--settings")] = None
    _: KW_ONLY
    host: Annotated[str | None, about("Address to listen at; default: 127.0.0.1, for this machine only.")] = None
    port: Annotated[int | None, about("Port to listen at; default: 8080. 0 takes a free one.")] = None
    hosts: Annotated[
        Sequence[str] | None,
        about("A further host name of the server; several may be named. They replace the settings'."),
        Flag("--hosts", "NAME", list[str]),
    ] = None
    store: Annotated[
        str | None,
        about("SQLAlchemy URL, made if need be; default: the settings', or a file here."),
        Flag(variables=(STORE_VARIABLE,)),
    ] = None
    tokens: Annotated[
        Path | None, about("File of tokens, readable by its owner only: lines `read TOKEN` or `write TOKEN`.")
    ] = None

    def answer(self, *, on_ready: OnReady = lambda _: None) -> None:
        from moevolve.search.server.run import serve
        from moevolve.search.server.settings import read_settings

        changes = {name: value for name, value in self.arguments().items() if name != "settings"}
        serve(read_settings(self.settings, changes), on_ready)
