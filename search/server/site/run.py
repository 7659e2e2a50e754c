"""Running the server until it is told to stop."""

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

_GOODBYE_S = 3
"""Seconds that requests under way get when the server stops."""


def serve(settings: ServerSettings, on_ready: Callable[[tuple[str, ...]], None]) -> None:
    """Serve until SIGINT or SIGTERM.

    Args:
        settings: of the server.
        on_ready: told the URLs that it can be reached at, once it can.

    Raises:
        UserError: the address can't be listened at, or tokens are missing or can't be read.
        StoreError: the store can't be opened.
    """
    with _listening(settings) as listening, Store.open(settings.store) as store:
        # Not sooner: what is wrong in the settings is said at once.
        import uvicorn

        from moevolve.search.server.connections import BACKLOG, BoundedProtocol, allow_files
        from moevolve.search.server.site.app import make_app

        allow_files()
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
            log_level="error",  # less than that is what strangers send, who could fill a disk with it
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=_GOODBYE_S,
        )
        with _ends_quietly():
            uvicorn.Server(config).run([listening])


@contextmanager
def _ends_quietly() -> Iterator[None]:
    """Being told to stop is no failure: uvicorn raises the signal again, once it has stopped."""
    before = {each: signal.signal(each, lambda *_: None) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _listening(settings: ServerSettings) -> socket.socket:
    try:
        found = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(found[0], socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(found[4])
        listening.listen()
    except OSError as error:
        raise UserError(f"host {settings.host}, port {settings.port}: {error.strerror or error}") from None
    return listening
