"""Client of a server on another machine: sends requests, and follows searches that run there."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any, Self, TypeVar
from urllib.parse import quote, urlsplit

from pydantic import TypeAdapter, ValidationError

from moevolve.evaluators.errors import UserError
from moevolve.search.config.files import override_lines, parse_stored_config, settings_of
from moevolve.search.config.run import RunConfig
from moevolve.search.interface.control import ControlRequest
from moevolve.search.interface.parameters import SILENT
from moevolve.search.interface.request import Answered, Request, answer_type, path_fields
from moevolve.search.interface.running import LaunchRequest, ResumeRequest
from moevolve.search.interface.searches import FinalTableRequest, SearchRequest
from moevolve.search.server.processes import Job
from moevolve.store.errors import NotFoundError, StoreError
from moevolve.store.records import Control, SearchRecord

if TYPE_CHECKING:
    import httpx2

    from moevolve.search.loop.final_table import FinalTable
    from moevolve.search.running.observer import Observer

TOKEN = "MOEVOLVE_TOKEN"
_TIMEOUT_S = 60.0
"""Longest wait for an answer: a report or a fit over a large search takes many seconds."""
_POLL_S = 1.0
"""Seconds between polls of a search, as often as the server's feed looks for changes."""
_POLLS_WITHOUT_DRIVER = 3
"""Polls that may find no driver although the search hasn't ended: its record and lease are read one after the other."""

T = TypeVar("T")


class RemoteService:
    """Answers requests by asking a server, with the token in the environment variable MOEVOLVE_TOKEN.

    Every failure is a `StoreError` or a `UserError` with the server's message.

    Args:
        url: URL of the server, `http://HOST:PORT`.

    Raises:
        UserError: the URL is malformed or contains a user or a password, or the token is malformed.
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
            # A server may close an idle connection just when the next request is on its way: none is kept.
            limits = httpx2.Limits(max_keepalive_connections=0)
            self._http = httpx2.Client(base_url=self.url, headers=headers, timeout=_TIMEOUT_S, limits=limits)
        except (ValueError, httpx2.InvalidURL) as error:
            raise UserError(f"a server's URL is http://HOST:PORT or https://HOST; this is none: {error}") from None
        self._failed = (httpx2.HTTPError, httpx2.InvalidURL, UnicodeError)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def ask(self, request: Answered[T], *, observer: Observer = SILENT) -> T:
        """Have the server answer a request; `observer` follows a search that it launches or resumes.

        Raises:
            StoreError: the server can't be reached, or what the request's record says.
            UserError: the server doesn't offer this, or what the request's record says.
        """
        answer: Any = self._answer(request, observer)
        found: T = answer
        return found

    def _answer(self, request: Any, observer: Observer) -> Any:
        kind: type[Request] = type(request)
        if kind is LaunchRequest:
            return self._launch(request, observer)
        if kind is ResumeRequest:
            return self._resume(request, observer)
        if kind.route is None:
            raise UserError(f"{self.url} is a server: this needs the store itself, and the model; do it where they are")
        values = TypeAdapter(kind).dump_python(request, mode="json", exclude_none=True)
        path = "/api" + kind.route.format(**{name: quote(str(value), safe="") for name, value in values.items()})
        others = {name: value for name, value in values.items() if name not in path_fields(kind.route)}
        answer = answer_type(kind)
        if answer is bytes:
            return self._send("GET", path, params=others).content
        return self._post(answer, path, others) if kind.writes else self._get(answer, path, **others)

    def _launch(self, request: LaunchRequest, observer: Observer) -> FinalTable:
        """Launch one of the server's run files there and follow the search. An interrupt leaves it running.

        Raises:
            UserError: the server doesn't have the run file or doesn't allow a setting, or the search didn't finish.
        """
        refused = {
            "address": request.address,
            "or_resume (--or-resume)": request.or_resume,
            "search_id (--id)": request.search_id,
        }
        inapplicable = [name for name, value in refused.items() if value]
        if isinstance(request.config, RunConfig) or inapplicable:
            without = f": without {' and '.join(inapplicable)}" if inapplicable else ""
            raise UserError(f"{self.url} launches its own configurations, by their names, on its own cluster{without}")
        overrides = settings_of(override_lines(request.overrides))
        asked = {"configuration": str(request.config), "name": request.name, "overrides": overrides}
        started = self._post(Job, "/api/searches", asked)
        return self.follow(started.name, 0, observer)

    def _resume(self, request: ResumeRequest, observer: Observer) -> FinalTable | None:
        """Continue a search. It continues on the server's machine; of a finished one only the table is returned."""
        if request.address is not None or request.overrides:
            raise UserError(f"{self.url} resumes searches as they are; change settings where the store is")
        search = request.search
        record = self.ask(SearchRequest(search))
        if record.status == "finished":
            observer.on_begin(self._config(record))
            return self.ask(FinalTableRequest(search))
        before = self.ask(ControlRequest(search)).epoch
        kind: Any = Job | None
        if self._post(kind, f"/api/searches/{quote(search, safe='')}/resume") is None:
            return None
        return self.follow(record.name, before, observer)

    def follow(self, name: str, epoch: int, observer: Observer) -> FinalTable:
        """Follow a search until it is finished.

        Args:
            name: Name of the search.
            epoch: The epoch of the search's lease before its driver was started.
            observer: Observer of the search.

        Raises:
            UserError: the search didn't start, ended without finishing, or lost its driver.
        """
        begun, stage, progress, without_driver = False, None, None, 0
        while True:
            record, control = self._state(name)
            if record is None or control is None or (control.epoch <= epoch and record.status != "finished"):
                self._check_started(name)
            else:
                if not begun:
                    begun = True
                    observer.on_begin(self._config(record))
                if control.stage is not None and control.stage != stage:
                    stage = control.stage
                    observer.on_stage(stage)
                if control.progress is not None and control.progress != progress:
                    progress = control.progress
                    observer.on_progress(progress)
                if record.status == "finished":
                    return self.ask(FinalTableRequest(name))
                without_driver = 0 if control.alive else without_driver + 1
                if without_driver and record.status not in ("running", "paused"):
                    raise UserError(f"search {name} is {record.status}: {record.status_reason or 'nobody says why'}")
                if without_driver > _POLLS_WITHOUT_DRIVER:
                    raise UserError(f"search {name} has lost its driver; `moevolve resume {name}` continues it")
            time.sleep(_POLL_S)

    def _state(self, name: str) -> tuple[SearchRecord, Control] | tuple[None, None]:
        """A search and who runs it; None for both if it isn't recorded yet."""
        try:
            return self.ask(SearchRequest(name)), self.ask(ControlRequest(name))
        except NotFoundError:
            return None, None

    def _check_started(self, name: str) -> None:
        for job in self._get(list[Job], "/api/launches"):
            if job.name == name and job.exit_code:
                raise UserError(f"search {name} didn't start: {job.last_line}")

    def _config(self, record: SearchRecord) -> RunConfig:
        """A search's configuration, with the server's URL in place of its store's."""
        config = parse_stored_config(record.config)
        if config.is_imported:
            raise UserError(f"search {record.name} was imported: there is nothing to resume")
        return config.model_copy(update={"store": self.url})

    def _get(self, kind: type[T], path: str, **params: Any) -> T:
        given = {name: value for name, value in params.items() if value is not None}
        return self._parse(kind, self._send("GET", path, params=given))

    def _post(self, kind: type[T], path: str, body: Any = None) -> T:
        return self._parse(kind, self._send("POST", path, json={} if body is None else body))

    def _parse(self, kind: type[T], response: httpx2.Response) -> T:
        try:
            return TypeAdapter(kind).validate_json(response.content)
        except ValidationError as error:
            raise StoreError(f"{self.url} answers what this version doesn't understand: {error.errors()[0]}") from None

    def _send(self, method: str, path: str, **options: Any) -> httpx2.Response:
        try:
            answer = self._http.request(method, path, **options)
        except self._failed as error:
            raise StoreError(f"{self.url} can't be reached: {error}") from None
        if answer.is_success:
            return answer
        try:
            detail = str(answer.json()["detail"])
        except (ValueError, KeyError, TypeError):
            detail = f"it answers {answer.status_code}, which is no answer of moevolve's"
        if answer.status_code == 401:
            detail = f"it knows no such token as {TOKEN} has" if self._token else f"it wants a token: set {TOKEN}"
        if answer.status_code == 422:
            raise UserError(detail)
        raise (NotFoundError if answer.status_code == 404 else StoreError)(
            detail if answer.status_code in (404, 409) else f"{self.url}: {detail}"
        )


def _token() -> str:
    """The token in the environment, or an empty string.

    Raises:
        UserError: the token is malformed; the message doesn't show it.
    """
    token = os.environ.get(TOKEN, "").strip()
    if not all("!" <= each <= "~" for each in token):
        raise UserError(f"{TOKEN} has blanks or characters other than ASCII, which no token has: set it again")
    return token
