"""Webhooks at the end of a search: the driver that holds its lease posts a signed JSON body.

Headers and signature are those of Standard Webhooks (https://www.standardwebhooks.com): `webhook-signature` is `v1,`
and the base64 of the HMAC-SHA256, with the target's key, of `webhook-id`, `webhook-timestamp` (seconds since 1970) and
the body, joined by dots. Attempts to post the same event have the same id. In the body, `winner` is the winner in the
final table of a finished search, which `dev` may have picked, and `best_on_search` the individual with the highest
fitness.
"""

from __future__ import annotations

import base64
import binascii
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
from moevolve.search.genomes.contract.phases import Section
from moevolve.search.loop.final_table import winner_of
from moevolve.store.errors import LeaseLostError, StoreError
from moevolve.store.reader import StoreReader
from moevolve.store.records import Event

log = logging.getLogger(__name__)

VARIABLE = "MOEVOLVE_WEBHOOKS"
"""Environment variable with the targets of this process's searches, as JSON. Their URLs may be secrets, so they are not
among a run's settings, which every reader of the store sees."""
PAUSES_S = (0.0, 2.0, 8.0)
"""Pauses before the attempts. A receiver that restarts is reached by the third; a driver that ends waits no longer."""
TIMEOUT_S = 10.0
"""Longest wait for each part of an answer."""
_PREFIX = "whsec_"
"""Prefix of keys that Standard Webhooks writes in base64."""


class WebhookSection(Section):
    """A webhook's target.

    Attributes:
        url: URL that the JSON body is posted to.
        secret_env: Environment variable with the key of the signature (HMAC-SHA256): `whsec_` and base64, or any text.
        on: Final statuses of a search that are posted.
    """

    url: str = Field(pattern=r"^https?://")
    secret_env: str
    on: tuple[Literal["finished", "failed", "interrupted", "cancelled"], ...] = ("finished", "failed")

    @property
    def secret(self) -> bytes:
        """The signature's key; UserError if there is none."""
        value = os.environ.get(self.secret_env)
        if not value:
            raise UserError(f"webhooks: what is sent is signed with the environment variable {self.secret_env}: set it")
        if not value.startswith(_PREFIX):
            return value.encode()
        try:
            return base64.b64decode(value.removeprefix(_PREFIX), validate=True)
        except binascii.Error:
            raise UserError(f"webhooks: {self.secret_env} begins with {_PREFIX}, and then isn't base64") from None


_TARGETS = TypeAdapter(tuple[WebhookSection, ...])


def targets_of_environment() -> tuple[WebhookSection, ...]:
    """The targets of this process's searches, checked to have their keys."""
    try:
        targets = _TARGETS.validate_json(os.environ.get(VARIABLE) or "[]")
    except ValidationError as error:
        # The error's own message would quote the URL.
        where = ".".join(map(str, error.errors()[0]["loc"])) or "JSON"
        raise UserError(
            f'{VARIABLE}: {where} is wrong; expected [{{"url": "https://...", "secret_env": "NAME"}}, ...]'
        ) from None
    for target in targets:
        _ = target.secret
    return targets


def environment_of(targets: Sequence[WebhookSection]) -> dict[str, str]:
    """Environment variables of a process whose searches post to these targets."""
    return {VARIABLE: _TARGETS.dump_json(tuple(targets)).decode()} if targets else {}


@contextmanager
def posting_webhooks(store: StoreReader, search_id: str, pauses: Sequence[float] = PAUSES_S) -> Iterator[None]:
    """Post the status that a search gets within the `with` block to this process's targets.

    Targets that fail every attempt, before each of which there is a pause in seconds, are logged and cause no error.
    """
    targets = targets_of_environment()
    before = _last_status(store, search_id) if targets else None
    try:
        yield
    except LeaseLostError:  # another driver runs the search now, and posts its end
        targets = ()
        raise
    finally:
        try:
            event = _last_status(store, search_id) if targets else None
            if event is not None and (before is None or event.seq > before.seq):
                _notify(store, event, targets, pauses)
        except (StoreError, UserError) as error:
            log.warning("webhooks: the end was posted nowhere: %s", error)


def _last_status(store: StoreReader, search_id: str) -> Event | None:
    return next((event for event in store.latest_events(search_id, 20) if event.kind == "status"), None)


def _notify(store: StoreReader, event: Event, targets: Sequence[WebhookSection], pauses: Sequence[float]) -> None:
    status = event.text.partition(": ")[0]
    left = [target for target in targets if status in target.on]
    body, name = _body(store, event) if left else b"", f"{event.search_id}.{event.seq}"
    for pause in pauses:
        if not left:
            return
        time.sleep(pause)
        failures = [(target, _post(target, body, name)) for target in left]
        left = [target for target, failure in failures if failure is not None]
        for target, failure in failures:
            if failure is not None:
                log.warning("webhooks: %s did not take %s: %s", _host(target.url), event.text, failure)
    for target in left:
        log.error("webhooks: %s did not take %s in %d attempts", _host(target.url), event.text, len(pauses))


def _body(store: StoreReader, event: Event) -> bytes:
    search = store.search(event.search_id)
    status, _, reason = event.text.partition(": ")
    best = store.best_of_search(search.id)
    winner = winner_of(store, search, parse_stored_config(search.config))[0] if status == "finished" else None
    data = {
        "search": search.name,
        "id": search.id,
        "number": event.seq,
        "reason": reason or None,
        "winner": None if winner is None else f"{search.name}:{winner.index}",
        "best_on_search": f"{search.name}:{best[0].index}" if best else None,
    }
    return json.dumps({"type": f"search.{status}", "timestamp": event.at.isoformat(), "data": data}).encode()


def _post(target: WebhookSection, body: bytes, name: str) -> str | None:
    """Post a body; the reason of a failure, None for success. Redirects aren't followed."""
    import httpx2

    at = str(int(time.time()))
    digest = hmac.digest(target.secret, f"{name}.{at}.".encode() + body, hashlib.sha256)
    signature = f"v1,{base64.b64encode(digest).decode()}"
    headers = {"webhook-id": name, "webhook-timestamp": at, "webhook-signature": signature}
    headers["content-type"] = "application/json"
    try:
        answer = httpx2.post(target.url, content=body, headers=headers, timeout=TIMEOUT_S, follow_redirects=False)
    except (httpx2.HTTPError, httpx2.InvalidURL, ValueError) as error:
        return type(error).__name__  # its message, and a traceback, may hold the URL
    return None if answer.is_success else f"it answered {answer.status_code}"


def _host(url: str) -> str:
    """Scheme and host of a target, for logs. The rest of the URL may be a secret, as for chat services."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{re.split('[/?#]', rest)[0].rpartition('@')[2]}"
