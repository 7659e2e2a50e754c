"""Client of a server on another machine: sends requests, and follows searches that run there."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any, Self, TypeVar
from urllib.parse import quote, urlsplit

from pydantic import TypeAdapter, ValidationError

from moevolve.evaluators.errors import UserError
from moevolve.search.config.files import parse_stored_config
from moevolve.search.config.run import RunConfig
from moevolve.search.requests.record import Request, path_fields
from moevolve.search.requests.running import ResumeRequest
from moevolve.search.requests.searches import ControlRequest, FinalTableRequest, SearchRequest
from moevolve.search.server.processes import Job
from moevolve.search.service.use_cases import USE_CASES
from moevolve.store.errors import NotFoundError, StoreError
from moevolve.store.records import Control, SearchRecord

if TYPE_CHECKING:
    import httpx2

    from moevolve.search.loop.final_table import FinalTable
    from moevolve.search.running.observer import Observer

TOKEN = "MOEVOLVE_TOKEN"
_TIMEOUT_S = 60.0
_POLL_S = 1.0
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

    def ask(self, request: Request[T]) -> T:
        """See `Service`."""
        case = USE_CASES[type(request)]
        if case.path is None:
            raise UserError(f"{self.url} is a server: this needs the store itself, and the model; do it where they are")
        values = TypeAdapter(type(request)).dump_python(request, mode="json", exclude_none=True)
        path = "/api" + case.path.format(**{name: quote(str(value), safe="") for name, value in values.items()})
        others = {name: value for name, value in values.items() if name not in path_fields(case.path)}
        if case.answer is bytes:
            content: Any = self._send("GET", path, params=others).content
            document: T = content
            return document
        answer = self._post(case.answer, path, others) if case.writes else self._get(case.answer, path, **others)
        received: T = answer
        return received

    def launch(self, configuration: str, name: str | None, overrides: dict[str, Any], observer: Observer) -> FinalTable:
        """Launch one of the server's run files there and follow the search. An interrupt leaves it running.

        Args:
            configuration: Name of the run file.
            name: Name of the search; None takes the run file's.
            overrides: Changed settings by dotted path.
            observer: Is told of the search's progress.

        Raises:
            UserError: the server doesn't have the run file or doesn't allow a setting, or the search didn't finish.
        """
        asked = {"configuration": configuration, "name": name, "overrides": overrides}
        started = self._post(Job, "/api/searches", asked)
        return self.follow(started.name, 0, observer)

    def resume(self, request: ResumeRequest, observer: Observer) -> FinalTable | None:
        """See `Service`. The search continues on the server's machine; of a finished one only the table is returned."""
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
            observer: Is told of the search's progress.

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
