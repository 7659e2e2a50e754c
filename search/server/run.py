"""The process that serves HTTP requests until it is stopped."""

from __future__ import annotations

import logging
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from moevolve.evaluators.errors import UserError
from moevolve.search.server.settings import ServerSettings
from moevolve.store.repository import Store

log = logging.getLogger(__name__)

_SHUTDOWN_S = 3
"""Seconds that requests in progress get when the server stops: the stream of news would never end by itself."""


def serve(settings: ServerSettings, on_ready: Callable[[tuple[str, ...]], None]) -> None:
    """Serve until SIGINT or SIGTERM; `on_ready` takes the server's URLs once it accepts connections.

    Raises:
        UserError: the address can't be bound, or tokens are missing or can't be read.
        StoreError: the store can't be opened.
    """
    with _listening_socket(settings) as listening, Store.open(settings.store) as store:
        # Imported here, so that errors in the settings are reported at once.
        import uvicorn

        from moevolve.search.server.app import make_app
        from moevolve.search.server.connections import BACKLOG, BoundedProtocol, raise_file_limit

        raise_file_limit()
        app = make_app(store, settings)
        port = listening.getsockname()[1]
        urls = tuple(f"http://{f'[{name}]' if ':' in name else name}:{port}" for name in settings.names)
        on_ready(urls)
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
        with _ignored_signals():
            uvicorn.Server(config).run([listening])


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
        listening = socket.socket(found[0], socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(found[4])
        listening.listen()
    except OSError as error:
        raise UserError(f"host {settings.host}, port {settings.port}: {error.strerror or error}") from None
    return listening
