"""Sessions of browsers that have signed in: random ids that expire and can be revoked.

They are in this process's memory, so everyone signs in again after a restart of the server.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable

from moevolve.search.server.settings import Token

SESSION_S = 12 * 3600
"""Seconds after which a session ends, however much it is used."""
MAX_SESSIONS = 10_000
"""Number of sessions that are kept; the oldest ends when another one begins."""


class Sessions:
    """The open sessions of one server.

    Args:
        clock: Seconds since some fixed moment. The default can't be set, so no session outlives a change of the date.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._open: dict[bytes, tuple[Token, float]] = {}

    def begin(self, token: Token) -> str:
        """Begin a session with a token; returns its id, which the browser keeps as a cookie."""
        now = self._clock()
        kept = {key: value for key, value in self._open.items() if now < value[1]}
        while len(kept) >= MAX_SESSIONS:
            del kept[next(iter(kept))]
        given = secrets.token_urlsafe(32)
        self._open = kept | {_key(given): (token, now + SESSION_S)}
        return given

    def token(self, given: str) -> Token | None:
        """Token of the session with an id; None if there is no such session any more."""
        token, ends = self._open.get(_key(given), (None, 0.0))
        return token if self._clock() < ends else None

    def end(self, given: str) -> None:
        """End a session, if there is one with this id."""
        self._open.pop(_key(given), None)


def _key(given: str) -> bytes:
    # The time to look up a hash says nothing about how much of an id is right.
    return hashlib.sha256(given.encode("utf-8", "surrogateescape")).digest()
