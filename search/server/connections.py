"""Who stays connected, and how long: nobody holds a connection without asking for something.

uvicorn closes connections that are idle between two requests, but waits for ever for the first one and for the rest of
any. Connections are files of the process, whose number is limited; beyond it none can be accepted, which the event loop
logs without end. So requests have to come in time, and where connections get too many even so, those that ask for
nothing make room, the oldest first.
"""

from __future__ import annotations

import asyncio
import resource

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

BACKLOG = 64
"""Connections that wait to be accepted, which happens to all of them at once, before any can make room."""
_ASKED_WITHIN_S = 15.0
"""For the head and the body of a request, since the connection was made or the answer before was sent."""
_MOST_FILES, _MOST_CONNECTIONS = 1 << 16, 4096


class BoundedProtocol(H11Protocol):
    """A connection of a client, by HTTP/1.1."""

    asked_within_s = _ASKED_WITHIN_S
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for a request, and make room for it."""
        super().connection_made(transport)
        self._set_deadline()
        if len(self.connections) > most_connections():
            others = [each for each in self.connections if isinstance(each, BoundedProtocol)]
            min(others, key=lambda each: each.due).give_up()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no more."""
        super().connection_lost(exc)
        self._unset_deadline()

    def handle_events(self) -> None:
        """Take what came, and see whether something has still to come."""
        super().handle_events()
        if self.conn.their_state in (h11.IDLE, h11.SEND_BODY):
            self._set_deadline()
        else:
            self._unset_deadline()

    @property
    def due(self) -> float:
        """When the request has to be there, in the loop's seconds; infinity if nothing is waited for."""
        return float("inf") if self._deadline is None else self._deadline.when()

    def give_up(self) -> None:
        """Close the connection at once."""
        self._unset_deadline()
        self.transport.abort()

    def _set_deadline(self) -> None:
        if self._deadline is None and not self.transport.is_closing():
            self._deadline = self.loop.call_later(self.asked_within_s, self.give_up)

    def _unset_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def allow_files() -> None:
    """Let this process, and what it starts, have as many files open as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def most_connections() -> int:
    """How many connections this process's files allow for, beside those of its store and of what it starts."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST_CONNECTIONS if files == resource.RLIM_INFINITY else min(files // 2, _MOST_CONNECTIONS)
