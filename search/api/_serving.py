"""Serving a store over HTTP."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path


def serve(
    settings: str | Path | None = None,
    *,
    store: str | None = None,
    host: str | None = None,
    port: int | None = None,
    hosts: Sequence[str] | None = None,
    tokens: str | Path | None = None,
    on_ready: Callable[[tuple[str, ...]], None] = lambda _: None,
) -> None:
    """Serve a store until the process is told to stop: pages for browsers, and an API under /api.

    Args:
        settings: a YAML file; see `moevolve.search.server.settings`.
        store: URL of the store, made if need be; None takes the settings', or `sqlite:///moevolve.db`.
        host: address to listen at; None takes the settings', or 127.0.0.1.
        port: None takes the settings', or 8080; 0 takes a free one.
        hosts: further names that it is reached under, in place of the settings'.
        tokens: file of tokens, for its owner only.
        on_ready: told the URLs that the server can be reached at, once it can.

    Raises:
        UserError: a setting is wrong, the address can't be listened at, or tokens are needed and there are none.
        StoreError: the store can't be opened.
    """
    from moevolve.search.server.run import serve as run
    from moevolve.search.server.settings import read_settings

    changes = {"store": store, "host": host, "port": port, "hosts": hosts, "tokens": tokens and str(tokens)}
    run(read_settings(None if settings is None else Path(settings), changes), on_ready)
