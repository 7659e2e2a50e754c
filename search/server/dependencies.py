"""Parameters that routes have in common: the server's state, and names and limits in paths and queries."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from http import HTTPStatus
from typing import Annotated, Literal

from fastapi import Depends, Header, HTTPException, Path, Query, Request
from fastapi.security import HTTPBearer

from moevolve.search.config.run import LONGEST_NAME
from moevolve.search.server.caches import Listings
from moevolve.search.server.feed import Feed
from moevolve.search.server.processes import ProcessRunner
from moevolve.search.server.queues import ChildQueue, SerialQueue
from moevolve.search.server.settings import ServerSettings
from moevolve.store.reader import StoreReader
from moevolve.store.repository import Store

_UNSTORABLE = "the body has a character that can't be stored: an unpaired surrogate or a NUL"


@dataclass(frozen=True, slots=True)
class ServerState:
    """What the routes of one server share.

    Attributes:
        checks: Checks of launches and shrinks.
        uploads: Checks of small uploaded files, which don't wait for those of others, and of others.
    """

    writer: Store
    settings: ServerSettings
    drawings: SerialQueue
    checks: ChildQueue
    uploads: tuple[ChildQueue, ChildQueue]
    feed: Feed
    processes: ProcessRunner
    listings: Listings

    @property
    def store(self) -> StoreReader:
        """The store, for routes that only read; those that change something use `writer`."""
        return self.writer


async def refuse_doubtful_json(request: Request) -> None:
    """Refuse a JSON body with text that neither UTF-8 nor a database can hold, or with a key that is given twice.

    JSON can write unpaired surrogates and NUL as escapes. Every route depends on this.

    Raises:
        HTTPException: status 422.
    """
    if request.method != "POST":
        return
    try:
        text = json.dumps(json.loads(await request.body(), object_pairs_hook=_without_repetition), ensure_ascii=False)
    except (ValueError, RecursionError):
        return  # FastAPI refuses what isn't JSON
    try:
        text.encode()
    except UnicodeEncodeError:
        raise HTTPException(HTTPStatus.UNPROCESSABLE_ENTITY, _UNSTORABLE) from None
    if r"\u0000" in text.replace(r"\\", ""):
        raise HTTPException(HTTPStatus.UNPROCESSABLE_ENTITY, _UNSTORABLE)


def _without_repetition(pairs: list[tuple[str, object]]) -> dict[str, object]:
    for key, times in Counter(key for key, _ in pairs).items():
        if times > 1:
            raise HTTPException(HTTPStatus.UNPROCESSABLE_ENTITY, f"the body gives {key!a} twice")
    return dict(pairs)


# Dependency that describes the token in OpenAPI; the guard has checked it.
NEEDS_TOKEN = Depends(
    HTTPBearer(
        scheme_name="token",
        description="A read token, or a write token for changes. Servers without tokens ignore it.",
        auto_error=False,
    )
)


async def _header(
    _: Annotated[Literal["1"], Header(alias="X-Moevolve", description="Forms of other sites can't send it.")],
) -> None: ...


# Dependency of routes that change something; it describes the header, without which the guard refuses them.
CHANGES = Depends(_header)


async def _state_of(request: Request) -> ServerState:
    return request.app.state.server


ServerDep = Annotated[ServerState, Depends(_state_of)]
SearchPath = Annotated[str, Path(max_length=LONGEST_NAME, description="Name or id of the search.")]
RefPath = Annotated[str, Path(max_length=LONGEST_NAME + 20, description="SEARCH:INDEX, for example demo:137.")]
LimitQuery = Annotated[int, Query(ge=1, le=1000, description="Return at most this many.")]
AfterQuery = Annotated[int | None, Query(ge=0, lt=2**63, description="Index of the last one of the previous page.")]
# A name as forms send it: empty where nothing is chosen.
NameQuery = Annotated[str, Query(max_length=LONGEST_NAME)]
