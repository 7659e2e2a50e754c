"""Telling others of the ends of searches: signed, tried again for a while, once per event however many servers run.

What is posted is JSON. The header `X-Moevolve-Signature: t=SECONDS,v1=HEX` holds the HMAC-SHA256, with the target's
key, of the seconds (since 1970), a dot and the body: who checks it, and that the time is near, knows who sent it.
`winner` is the individual that the final table of a finished search ends with, which `dev` may have picked, and
`best_on_search` the one with the highest fitness.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import re
import threading
import time
from datetime import UTC, datetime, timedelta
from types import TracebackType
from typing import Self

from moevolve.evaluators.errors import UserError
from moevolve.search.loop.standings import winner_of
from moevolve.search.server.settings import WebhookSection
from moevolve.store.errors import StoreError
from moevolve.store.records import Event, IndividualRecord, SearchRecord
from moevolve.store.repository import Store

log = logging.getLogger(__name__)

SIGNATURE = "x-moevolve-signature"
ATTEMPTS = 8
_EVERY_S = 2.0
_TIMEOUT_S = 10.0
_FIRST_PAUSE_S = 5.0
"""Before the second attempt; it doubles each time, so the last one comes after some ten minutes."""
_NEWS = timedelta(days=1)
"""Older events are nobody's news: a target that is new isn't told the whole past."""


class Webhooks:
    """Tells targets in the background, for the length of a `with` block.

    Args:
        store: whose searches.
        targets: who is told, and of what.
        every: seconds between two looks.
        first_pause: seconds before the second attempt.

    Raises:
        UserError: a target's key isn't in the environment.
    """

    def __init__(
        self,
        store: Store,
        targets: tuple[WebhookSection, ...],
        every: float = _EVERY_S,
        first_pause: float = _FIRST_PAUSE_S,
    ) -> None:
        self._store, self._every, self._first_pause = store, every, first_pause
        self._targets = [(target, target.secret) for target in targets]
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="webhooks", daemon=True)

    def __enter__(self) -> Self:
        if self._targets:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._targets:
            self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(self._every):
            for target, key in self._targets:
                try:
                    self._tell(target, key)
                except StoreError as error:
                    log.warning("webhooks wait for the store: %s", error)
                except Exception:  # the other targets are told all the same, and this one at the next look
                    log.exception("webhooks: telling %s failed", _host(target.url))

    def _tell(self, target: WebhookSection, key: bytes) -> None:
        since, name = datetime.now(UTC) - _NEWS, _name(target.url)
        for event, before in self._store.claim_events(name, target.on, since, 3 * _TIMEOUT_S):
            failure = self._failure(target.url, event, key)
            if failure is None:
                self._store.settle_event(event, name, "told")
                continue
            again = self._first_pause * 2**before if before + 1 < ATTEMPTS else None
            log.warning("%s was not told of %s: %s", _host(target.url), event.text, failure)
            self._store.settle_event(event, name, failure, again)

    def _failure(self, url: str, event: Event, key: bytes) -> str | None:
        """Tell of an event; why that failed, None if it didn't."""
        try:
            return _post(url, self._body(event), key)
        except Exception as error:  # an event that can't be told is given up one day, and those behind it are told
            log.exception("webhooks: telling %s of %s failed", _host(url), event.text)
            return type(error).__name__

    def _body(self, event: Event) -> bytes:
        search = self._store.search(event.search_id)
        status, _, reason = event.text.partition(": ")
        best = self._store.best_of_search(search.id)
        winner = self._winner(search) if status == "finished" else None
        said = {
            "event": f"search.{status}",
            "search": search.name,
            "id": search.id,
            "number": event.seq,
            "reason": reason or None,
            "winner": None if winner is None else f"{search.name}:{winner.index}",
            "best_on_search": f"{search.name}:{best[0].index}" if best else None,
            "at": event.at.isoformat(),
        }
        return json.dumps(said).encode()

    def _winner(self, search: SearchRecord) -> IndividualRecord | None:
        try:
            return winner_of(self._store, search)[0]
        except UserError:  # another version of moevolve stored its settings: nothing says who won
            return None


def _host(url: str) -> str:
    """A target as logs name it: the rest of its URL is a secret where it is all that a chat service asks for."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{re.split('[/?#]', rest)[0].rpartition('@')[2]}"


def _name(url: str) -> str:
    """A target as the store knows it: different for different URLs, and telling none."""
    return f"{_host(url)} {hashlib.sha256(url.encode()).hexdigest()[:16]}"


def signed(body: bytes, key: bytes, at: int) -> str:
    """The signature's header for a body sent at a time (seconds since 1970)."""
    digest = hmac.new(key, f"{at}.".encode() + body, hashlib.sha256).hexdigest()
    return f"t={at},v1={digest}"


def _post(url: str, body: bytes, key: bytes) -> str | None:
    """Send a body; why it failed, None if it didn't. Redirections aren't followed: the settings say where to."""
    import httpx2

    headers = {"content-type": "application/json", SIGNATURE: signed(body, key, int(time.time()))}
    try:
        answer = httpx2.post(url, content=body, headers=headers, timeout=_TIMEOUT_S, follow_redirects=False)
    except (httpx2.HTTPError, httpx2.InvalidURL, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return None if answer.is_success else f"it answered {answer.status_code}"
