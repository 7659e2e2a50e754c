"""Serving a store: the process that serves HTTP requests until it is stopped."""

from __future__ import annotations

import logging
import os
import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY
from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.yaml_files import CODE_VARIABLE
from moevolve.search.interface.parameters import STORE_VARIABLE
from moevolve.search.interface.request import Flag, Request, about, record
from moevolve.search.running.observer import SILENT, Observer
from moevolve.search.server.settings import ServerSettings, read_settings
from moevolve.store.repository import Store

log = logging.getLogger(__name__)

# Seconds that requests in progress get when the server stops: the stream of news would never end by itself.
_SHUTDOWN_S = 3


@record
class ServeRequest(Request):
    """Serve a store: its searches in the browser, and an HTTP API for them, until the process is stopped.

    Raises:
        UserError: a setting is wrong, no file can be uploaded into the folder, the address can't be listened at, or
            tokens are needed and there are none.
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
    uploads: Annotated[
        Path | None, about("Folder for files of requests that clients upload; default: the settings', or none.")
    ] = None

    def answer(self, *, observer: Observer = SILENT) -> None:
        settings = read_settings(
            self.settings, {name: value for name, value in self.arguments().items() if name != "settings"}
        )
        _check_uploads(settings.uploads)
        with _listening_socket(settings) as listening, Store.open(settings.store) as store:
            # Imported here, so that errors in the settings are reported at once.
            import uvicorn

            from moevolve.search.server.app import make_app
            from moevolve.search.server.connections import BACKLOG, BoundedProtocol, raise_file_limit

            raise_file_limit()
            app = make_app(store, settings)
            port = listening.getsockname()[1]
            urls = tuple(f"http://{f'[{name}]' if ':' in name else name}:{port}" for name in settings.names)
            observer.on_note(f"serving at {', '.join(urls)}; Ctrl-C stops it")
            if store.is_new:
                log.warning("made a new store at %s: there was none", store.location)
            config = uvicorn.Config(
                app,
                http=BoundedProtocol,
                ws="none",
                backlog=BACKLOG,
                log_level="error",  # warnings are about malformed requests, with which strangers could fill the disk
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=_SHUTDOWN_S,
            )
            with _ignored_signals(), _refused_programs():
                uvicorn.Server(config).run([listening])


def _check_uploads(folder: Path | None) -> None:
    """Make the folder of uploads and a file in it: otherwise the first client to send one would hear what is wrong."""
    if folder is None:
        return
    try:
        folder.mkdir(exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(
            f"uploads: no file can be written into {folder}: {error.strerror}; name a folder of yours, or a new one in "
            "a folder that exists"
        ) from None


@contextmanager
def _refused_programs() -> Iterator[None]:
    """Load no task with a function of its own, here and in the processes that are started meanwhile."""
    before = os.environ.get(CODE_VARIABLE, "")
    os.environ[CODE_VARIABLE] = "refuse"
    try:
        yield
    finally:
        os.environ[CODE_VARIABLE] = before


@contextmanager
def _ignored_signals() -> Iterator[None]:
    # After a shutdown uvicorn raises the signal again that caused it, but stopping a server is no failure.
    before = {each: signal.signal(each, lambda *_: None) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _listening_socket(settings: ServerSettings) -> socket.socket:
    try:
        found = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[0]
        # Without the protocol's number asyncio leaves Nagle's algorithm on: each response on a kept connection would
        # wait 40 ms.
        listening = socket.socket(found[0], socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(found[4])
        listening.listen()
    except OSError as error:
        raise UserError(f"host {settings.host}, port {settings.port}: {error.strerror or error}") from None
    return listening
