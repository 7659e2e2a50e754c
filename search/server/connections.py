"""Limits on connections, so that idle clients can't use up the process's file descriptors.

uvicorn closes connections that are idle between two requests, but waits forever for the first request on a connection
and for the rest of an incomplete one. Each connection is an open file of the process. When none is left, `accept` fails
again and again, and the event loop logs each failure. So a request has to arrive within a time limit, and if there are
too many connections even so, those that wait for a request are closed, the oldest first.

uvicorn also waits forever for a client that asks and doesn't read the answers, even while it closes the connection. So
what is sent has to be taken within a time limit, too, and a connection serves a limited number of requests.
"""

from __future__ import annotations

import asyncio
import resource

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from moevolve.search.server.guard import is_upload

# Connections waiting to be accepted. All may be accepted at once, before any connection is closed to make room.
BACKLOG = 64
# Clients that send or take nothing would otherwise keep their connections forever, until none is left for others.
_REQUEST_TIMEOUT_S = 15.0
_SEND_TIMEOUT_S = 30.0
_MAX_REQUESTS = 1000
_CLOSE = (b"connection", b"close")
_MAX_FILES, _MAX_CONNECTIONS = 1 << 16, 4096


class BoundedProtocol(H11Protocol):
    """An HTTP/1.1 connection with time limits on receiving requests and on sending answers.

    Attributes:
        request_timeout_s: Seconds for the head and the body of a request to arrive, counted from the start of the
            connection or the end of the previous response; for an upload, from its latest piece.
        send_timeout_s: Seconds, up to twice as many, in which the client must have taken what waits to be sent, or so
            much of it that the application may write more.
        max_requests: Number of requests after which the connection is closed.
    """

    request_timeout_s = _REQUEST_TIMEOUT_S
    send_timeout_s = _SEND_TIMEOUT_S
    max_requests = _MAX_REQUESTS
    _timer: asyncio.TimerHandle | None = None
    _send_timer: asyncio.TimerHandle | None = None
    _is_unsent = False
    _answered = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()
        self._watch_sending()
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        # The other half of the open files is for the store and child processes.
        most = _MAX_CONNECTIONS if files == resource.RLIM_INFINITY else min(files // 2, _MAX_CONNECTIONS)
        if len(self.connections) > most:
            others = [each for each in self.connections if isinstance(each, BoundedProtocol)]
            min(others, key=lambda each: each.deadline).abort()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_timer()
        if self._send_timer is not None:
            self._send_timer.cancel()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._is_unsent = False

    def on_response_complete(self) -> None:
        self._answered += 1
        super().on_response_complete()

    def handle_events(self) -> None:
        super().handle_events()
        last = self._answered == self.max_requests - 1
        if last and self.conn.our_state is h11.SEND_RESPONSE and _CLOSE not in self.scope["headers"]:
            # As if the client had asked for it: the answer says so, and the next request comes on a new connection.
            self.scope["headers"] = [*self.scope["headers"], _CLOSE]
        if self.conn.their_state is h11.SEND_BODY and self.conn.our_state is not h11.DONE and is_upload(self.scope):
            self._stop_timer()  # a large file may take minutes; once it is refused, its pieces gain no more time
        if self.conn.their_state in (h11.IDLE, h11.SEND_BODY):
            self._start_timer()
        else:
            self._stop_timer()

    @property
    def deadline(self) -> float:
        """Time by the event loop's clock at which the request must be complete; infinity if none is awaited."""
        return float("inf") if self._timer is None else self._timer.when()

    def abort(self) -> None:
        self._stop_timer()
        self.transport.abort()

    def _watch_sending(self) -> None:
        was_unsent, self._is_unsent = self._is_unsent, self.transport.get_write_buffer_size() > 0
        if was_unsent and self._is_unsent:
            self.abort()
        else:
            self._send_timer = self.loop.call_later(self.send_timeout_s, self._watch_sending)

    def _start_timer(self) -> None:
        if self._timer is None and not self.transport.is_closing():
            self._timer = self.loop.call_later(self.request_timeout_s, self.abort)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def raise_file_limit() -> None:
    """Raise the limit on open files of this process and its children to the system's maximum."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
