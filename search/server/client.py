"""A server seen from another machine: requests are sent to it, searches run there and are followed from here."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Self, TypeVar
from urllib.parse import quote, urlsplit

from pydantic import TypeAdapter, ValidationError

from moevolve.evaluators.errors import UserError
from moevolve.search.config.files import parse_stored_config
from moevolve.search.config.run import RunConfig
from moevolve.search.requests.record import Request, path_fields
from moevolve.search.requests.running import ResumeRequest
from moevolve.search.requests.searches import ControlRequest, FinalTableRequest, SearchRequest
from moevolve.search.server.drivers import Launch
from moevolve.search.service.use_cases import use_case_of
from moevolve.store.errors import NotFoundError, StoreError
from moevolve.store.records import Control, SearchRecord

if TYPE_CHECKING:
    import httpx2

    from moevolve.search.loop.final_table import FinalTable
    from moevolve.search.running.observer import Observer

TOKEN = "MOEVOLVE_TOKEN"
_TIMEOUT_S = 60.0
_EVERY_S = 1.0
_LOOKS = 3
"""How often a search is seen to be run by nobody and not to have ended: record and lease are asked for one by one."""

T = TypeVar("T")


class RemoteService:
    """The service of a server. The environment variable MOEVOLVE_TOKEN has the token, if it needs one.

    Whatever fails is a `StoreError` or a `UserError` with the line that the server gave.

    Args:
        url: of the server.

    Raises:
        UserError: the URL isn't one, or has a user or a password in it; the token can't be one.
    """

    def __init__(self, url: str) -> None:
        import httpx2

        self.url = url.rstrip("/")
        self._token = _token()
        headers = {"x-moevolve": "1"}
        if self._token:
            headers["authorization"] = f"Bearer {self._token}"
        try:
            parts = urlsplit(url)
            if parts.username is not None or parts.query:
                raise UserError(f"{parts.hostname}: a token doesn't belong into a URL; set {TOKEN}")
            self._http = httpx2.Client(base_url=self.url, headers=headers, timeout=_TIMEOUT_S)
        except (ValueError, httpx2.InvalidURL) as error:
            raise UserError(f"a server's URL is http://HOST:PORT or https://HOST; this is none: {error}") from None
        self._failed = (httpx2.HTTPError, httpx2.InvalidURL, UnicodeError)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def ask(self, request: Request[T]) -> T:
        """See `Service`."""
        case = use_case_of(request)
        if case.path is None:
            raise UserError(f"{self.url} is a server: this needs the store itself, and the model; do it where they are")
        values = TypeAdapter(type(request)).dump_python(request, mode="json", exclude_none=True)
        path = _path(*(_filled(part, values) for part in case.path.strip("/").split("/")))
        others = {name: value for name, value in values.items() if name not in path_fields(case.path)}
        if case.answer is bytes:
            content: Any = self._ask("GET", path, params=others).content
            drawn: T = content
            return drawn
        answer = self._post(case.answer, path, others) if case.writes else self._get(case.answer, path, **others)
        found: T = answer
        return found

    def launch(self, configuration: str, name: str | None, overrides: dict[str, Any], observer: Observer) -> FinalTable:
        """Launch a search on the server's machine and follow it to its end; interrupting that leaves it running.

        Args:
            configuration: name of one of the server's run files.
            name: of the search; None takes the run file's.
            overrides: of its settings.
            observer: told what happens.

        Raises:
            UserError: the server doesn't have, or allow, that; or the search didn't come to its end.
        """
        asked = {"configuration": configuration, "name": name, "overrides": overrides}
        started = self._post(Launch, "/api/searches", asked)
        return self.follow(started.name, 0, observer)

    def resume(self, request: ResumeRequest, observer: Observer) -> FinalTable | None:
        """See `Service`: the search goes on on the server's machine. Of one that is finished it is the table."""
        if request.address is not None or request.overrides:
            raise UserError(f"{self.url} resumes searches as they are; change settings where the store is")
        search = request.search
        record = self.ask(SearchRequest(search))
        if record.status == "finished":
            observer.on_begin(self._here(record))
            return self.ask(FinalTableRequest(search))
        before = self.ask(ControlRequest(search)).epoch
        kind: Any = Launch | None
        if self._post(kind, _path("searches", search, "resume")) is None:
            return None
        return self.follow(record.name, before, observer)

    def follow(self, name: str, epoch: int, observer: Observer) -> FinalTable:
        """Follow a search until its driver, of a later epoch than that, has come to its end.

        Raises:
            UserError: it didn't start, ended otherwise than finished, or is gone.
        """
        begun, stage, progress, silent = False, None, None, 0
        while True:
            record, control = self._state(name)
            if record is None or control is None or (control.epoch <= epoch and record.status != "finished"):
                self._check_started(name)
            else:
                if not begun:
                    begun = True
                    observer.on_begin(self._here(record))
                if control.stage is not None and control.stage != stage:
                    stage = control.stage
                    observer.on_stage(stage)
                if control.progress is not None and control.progress != progress:
                    progress = control.progress
                    observer.on_progress(progress)
                if record.status == "finished":
                    return self.ask(FinalTableRequest(name))
                silent = 0 if control.alive else silent + 1
                if silent and record.status not in ("running", "paused"):
                    raise UserError(f"search {name} is {record.status}: {record.status_reason or 'nobody says why'}")
                if silent > _LOOKS:
                    raise UserError(f"search {name} has lost its driver; `moevolve resume {name}` continues it")
            time.sleep(_EVERY_S)

    def _state(self, name: str) -> tuple[SearchRecord, Control] | tuple[None, None]:
        """A search, and where it stands; nothing of one that isn't recorded yet."""
        try:
            return self.ask(SearchRequest(name)), self.ask(ControlRequest(name))
        except NotFoundError:
            return None, None

    def _check_started(self, name: str) -> None:
        for one in self._get(list[Launch], "/api/launches"):
            if one.name == name and one.exit_code:
                raise UserError(f"search {name} didn't start: {one.last_line}")

    def _here(self, record: SearchRecord) -> RunConfig:
        """A search's configuration, with the server in the place of its store."""
        config = parse_stored_config(record.config)
        if config.is_imported:
            raise UserError(f"search {record.name} was imported: there is nothing to resume")
        return config.model_copy(update={"store": self.url})

    def _get(self, kind: type[T], path: str, **asked: Any) -> T:
        given = {name: value for name, value in asked.items() if value is not None}
        return self._read(kind, lambda: self._ask("GET", path, params=given))

    def _post(self, kind: type[T], path: str, body: Any = None) -> T:
        return self._read(kind, lambda: self._ask("POST", path, json={} if body is None else body))

    def _read(self, kind: type[T], ask: Callable[[], httpx2.Response]) -> T:
        try:
            return TypeAdapter(kind).validate_json(ask().content)
        except ValidationError as error:
            raise StoreError(f"{self.url} answers what this version doesn't understand: {error.errors()[0]}") from None

    def _ask(self, method: str, path: str, **what: Any) -> httpx2.Response:
        try:
            answer = self._http.request(method, path, **what)
        except self._failed as error:
            raise StoreError(f"{self.url} can't be reached: {error}") from None
        if answer.is_success:
            return answer
        try:
            said = str(answer.json()["detail"])
        except (ValueError, KeyError, TypeError):
            said = f"it answers {answer.status_code}, which is no answer of moevolve's"
        if answer.status_code == 401:
            said = f"it knows no such token as {TOKEN} has" if self._token else f"it wants a token: set {TOKEN}"
        if answer.status_code == 422:
            raise UserError(said)
        raise (NotFoundError if answer.status_code == 404 else StoreError)(
            said if answer.status_code in (404, 409) else f"{self.url}: {said}"
        )


def _token() -> str:
    """That of the environment, if there is one.

    Raises:
        UserError: it can't be sent; the message doesn't show it.
    """
    token = os.environ.get(TOKEN, "").strip()
    if not all("!" <= each <= "~" for each in token):
        raise UserError(f"{TOKEN} has blanks or characters other than ASCII, which no token has: set it again")
    return token


def _path(*parts: str) -> str:
    """A route under /api; names in it are whatever the user typed."""
    return "/api/" + "/".join(quote(part, safe="") for part in parts)


def _filled(part: str, values: Mapping[str, Any]) -> str:
    """A part of a route with the value of the parameter that stands in it, if one does."""
    return str(values[part[1:-1]]) if part.startswith("{") else part
