"""Telling others how a search ended: the driver that holds its lease posts a signed JSON body.

The header `X-Moevolve-Signature: t=SECONDS,v1=HEX` holds the HMAC-SHA256, with the target's key, of the seconds (since
1970), a dot and the body: a receiver that checks it, and that the time is near, knows who sent it. `winner` is the
individual that the final table of a finished search ends with, which `dev` may have picked, and `best_on_search` the
one with the highest fitness.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

from pydantic import Field, TypeAdapter, ValidationError

from moevolve.evaluators.errors import UserError
from moevolve.search.config.files import parse_stored_config
from moevolve.search.loop.final_table import winner_of
from moevolve.search.settings.section import Section
from moevolve.store.errors import LeaseLostError, StoreError
from moevolve.store.reader import StoreReader
from moevolve.store.records import Event

log = logging.getLogger(__name__)

VARIABLE = "MOEVOLVE_WEBHOOKS"
"""Environment variable with the targets of this process's searches, as JSON; URLs may be secrets, which a run's
settings, in the store for everybody to read, can't hold."""
SIGNATURE = "x-moevolve-signature"
PAUSES_S = (0.0, 2.0, 8.0)
"""Before each attempt."""
_TIMEOUT_S = 10.0


class WebhookSection(Section):
    """Who is told how a search ended.

    Attributes:
        url: that a JSON body is posted to.
        secret_env: environment variable with the key that the body is signed with (HMAC-SHA256).
        on: statuses of a search that are told.
    """

    url: str = Field(pattern=r"^https?://")
    secret_env: str
    on: tuple[Literal["finished", "failed", "interrupted", "cancelled"], ...] = ("finished", "failed")

    @property
    def secret(self) -> bytes:
        """The key.

        Raises:
            UserError: the environment variable isn't set.
        """
        value = os.environ.get(self.secret_env)
        if not value:
            raise UserError(f"webhooks: what is sent is signed with the environment variable {self.secret_env}: set it")
        return value.encode()


_TARGETS = TypeAdapter(tuple[WebhookSection, ...])


def targets_of_environment() -> tuple[WebhookSection, ...]:
    """The targets of this process's searches, whose keys are there.

    Raises:
        UserError: they aren't written as they should be, or a key isn't in the environment.
    """
    try:
        targets = _TARGETS.validate_json(os.environ.get(VARIABLE) or "[]")
    except ValidationError as error:
        # Not its message, which quotes what was given.
        where = ".".join(map(str, error.errors()[0]["loc"])) or "JSON"
        raise UserError(
            f'{VARIABLE}: {where} is wrong; expected [{{"url": "https://...", "secret_env": "NAME"}}, ...]'
        ) from None
    for target in targets:
        _ = target.secret
    return targets


def environment_of(targets: Sequence[WebhookSection]) -> dict[str, str]:
    """What a process is started with so that it tells these targets."""
    return {VARIABLE: _TARGETS.dump_json(tuple(targets)).decode()} if targets else {}


@contextmanager
def telling_the_end(store: StoreReader, search_id: str, pauses: Sequence[float] = PAUSES_S) -> Iterator[None]:
    """Tell this process's targets of the status that a search got in the `with` block, which its driver is in.

    Whoever can't be told is named in the log after the last attempt; that is no error, and nobody tries again.

    Args:
        store: where the search is.
        search_id: id of the search.
        pauses: seconds before each attempt.

    Raises:
        UserError: on entering, as `targets_of_environment`.
    """
    targets = targets_of_environment()
    before = _last_status(store, search_id) if targets else None
    lost = False
    try:
        yield
    except LeaseLostError:  # how the search ends is for another driver to tell
        lost = True
        raise
    finally:
        if targets and not lost:
            try:
                event = _last_status(store, search_id)
                if event is not None and (before is None or event.seq > before.seq):
                    _tell(store, event, targets, pauses)
            except (StoreError, UserError) as error:
                log.warning("webhooks: nobody was told of the end: %s", error)


def _last_status(store: StoreReader, search_id: str) -> Event | None:
    return next((event for event in store.latest_events(search_id, 20) if event.kind == "status"), None)


def _tell(store: StoreReader, event: Event, targets: Sequence[WebhookSection], pauses: Sequence[float]) -> None:
    status = event.text.partition(": ")[0]
    left = [target for target in targets if status in target.on]
    body = _body(store, event) if left else b""
    for pause in pauses:
        if not left:
            return
        time.sleep(pause)
        failures = [(target, _post(target, body)) for target in left]
        left = [target for target, failure in failures if failure is not None]
        for target, failure in failures:
            if failure is not None:
                log.warning("webhooks: %s was not told of %s: %s", _host(target.url), event.text, failure)
    for target in left:
        log.error("webhooks: %s was not told of %s in %d attempts", _host(target.url), event.text, len(pauses))


def _body(store: StoreReader, event: Event) -> bytes:
    search = store.search(event.search_id)
    status, _, reason = event.text.partition(": ")
    best = store.best_of_search(search.id)
    winner = winner_of(store, search, parse_stored_config(search.config))[0] if status == "finished" else None
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


def signed(body: bytes, key: bytes, at: int) -> str:
    """The signature's header for a body sent at a time (seconds since 1970)."""
    digest = hmac.new(key, f"{at}.".encode() + body, hashlib.sha256).hexdigest()
    return f"t={at},v1={digest}"


def _post(target: WebhookSection, body: bytes) -> str | None:
    """Send a body; why it failed, None if it didn't. Redirections aren't followed: the settings say where to."""
    import httpx2

    headers = {"content-type": "application/json", SIGNATURE: signed(body, target.secret, int(time.time()))}
    try:
        answer = httpx2.post(target.url, content=body, headers=headers, timeout=_TIMEOUT_S, follow_redirects=False)
    except (httpx2.HTTPError, httpx2.InvalidURL, ValueError) as error:
        return type(error).__name__  # its message, and a traceback, may hold the URL
    return None if answer.is_success else f"it answered {answer.status_code}"


def _host(url: str) -> str:
    """A target as logs name it: the rest of its URL is a secret where it is all that a chat service asks for."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{re.split('[/?#]', rest)[0].rpartition('@')[2]}"
