"""A served store, seen from another machine: the questions that a server answers, under the store's own names."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar
from urllib.parse import quote, urlsplit

from pydantic import TypeAdapter, ValidationError

from moevolve.evaluators.errors import UserError
from moevolve.search.config.files import parse_stored_config
from moevolve.search.config.run import RunConfig
from moevolve.search.server.drivers import Launch
from moevolve.store.errors import NotFoundError, StoreError
from moevolve.store.records import (
    BestRow,
    Control,
    IndividualDetail,
    LineageGraph,
    SearchRecord,
    SearchSummary,
    Split,
    Wanted,
)

if TYPE_CHECKING:
    import httpx2

    from moevolve.search.loop.standings import Standings
    from moevolve.search.running.observer import Observer

TOKEN = "MOEVOLVE_TOKEN"
_TIMEOUT_S = 60.0
_EVERY_S = 1.0
_LOOKS = 3
"""How often a search is seen to be run by nobody and not to have ended: record and lease are asked for one by one."""
_VERBS: dict[Wanted, str] = {"paused": "pause", "stopped": "stop", "cancelled": "cancel"}

T = TypeVar("T")


class Client:
    """A server's store. The environment variable MOEVOLVE_TOKEN has the token, if it needs one.

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

    def searches(self) -> list[SearchSummary]:
        """See `StoreReader.searches`."""
        return self._get(list[SearchSummary], "/api/searches")

    def search(self, name_or_id: str) -> SearchRecord:
        """See `StoreReader.search`."""
        return self._get(SearchRecord, _path("searches", name_or_id))

    def control(self, search: str) -> Control:
        """See `StoreReader.control`; by name or id."""
        return self._get(Control, _path("searches", search, "control"))

    def best(
        self,
        task: str | None = None,
        experts: int | None = None,
        active: int | None = None,
        search: str | None = None,
        limit: int = 10,
        by: Split = "dev",
    ) -> list[BestRow]:
        """See `StoreReader.best`."""
        asked = {"task": task, "experts": experts, "active": active, "search": search, "limit": limit, "by": by}
        return self._get(list[BestRow], "/api/best", **asked)

    def individual(self, ref: str) -> IndividualDetail:
        """See `StoreReader.individual`."""
        return self._get(IndividualDetail, _path("individuals", ref))

    def ancestors(self, ref: str, max_depth: int | None = None) -> LineageGraph:
        """See `StoreReader.ancestors`."""
        return self._get(LineageGraph, _path("individuals", ref, "ancestors"), depth=max_depth)

    def descendants(self, ref: str, max_depth: int | None = None) -> LineageGraph:
        """See `StoreReader.descendants`."""
        return self._get(LineageGraph, _path("individuals", ref, "descendants"), depth=max_depth)

    def standings(self, search: str) -> Standings:
        """The winner and the final table of a search."""
        from moevolve.search.loop.standings import Standings

        return self._get(Standings, _path("searches", search, "standings"))

    def report(self, search: str, path: Path, limit: int, analysis: object = None) -> Standings:
        """See `moevolve.report`; an analysis can't be sent."""
        if analysis is not None:
            raise UserError(f"{self.url} makes reports without an analysis; make this one where the store is")
        self._save(path, _path("searches", search, "report"), limit=limit)
        return self.standings(search)

    def plot(self, search: str, path: Path, individual: str | None) -> None:
        """See `moevolve.plot`."""
        self._save(path, _path("searches", search, "plot"), form=path.suffix.lstrip("."), individual=individual)

    def steer(self, search: str, wanted: Wanted) -> Control:
        """See `moevolve.search.service.steer.steer`."""
        return self._post(Control, _path("searches", search, _VERBS[wanted]))

    def scale(self, search: str, workers: int | None, priority: int | None) -> Control:
        """See `moevolve.search.service.steer.scale`."""
        given = {"workers": workers, "priority": priority}
        asked = {name: value for name, value in given.items() if value is not None}
        return self._post(Control, _path("searches", search, "scale"), asked)

    def launch(self, configuration: str, name: str | None, overrides: dict[str, Any], observer: Observer) -> Standings:
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

    def resume(self, search: str, observer: Observer) -> Standings | None:
        """Continue a search on the server's machine and follow it; None if it was paused, and goes on where it runs.

        Of one that is finished it is the table, as it stands.
        """
        record = self.search(search)
        if record.status == "finished":
            observer.on_begin(self._here(record))
            return self.standings(search)
        before = self.control(search).epoch
        kind: Any = Launch | None
        if self._post(kind, _path("searches", search, "resume")) is None:
            return None
        return self.follow(record.name, before, observer)

    def follow(self, name: str, epoch: int, observer: Observer) -> Standings:
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
                    return self.standings(name)
                silent = 0 if control.alive else silent + 1
                if silent and record.status not in ("running", "paused"):
                    raise UserError(f"search {name} is {record.status}: {record.status_reason or 'nobody says why'}")
                if silent > _LOOKS:
                    raise UserError(f"search {name} has lost its driver; `moevolve resume {name}` continues it")
            time.sleep(_EVERY_S)

    def _state(self, name: str) -> tuple[SearchRecord, Control] | tuple[None, None]:
        """A search, and where it stands; nothing of one that isn't recorded yet."""
        try:
            return self.search(name), self.control(name)
        except NotFoundError:
            return None, None

    def _check_started(self, name: str) -> None:
        for one in self._get(list[Launch], "/api/launches"):
            if one.name == name and one.exit_code:
                raise UserError(f"search {name} didn't start: {one.last_line}")

    def _here(self, record: SearchRecord) -> RunConfig:
        """A search's configuration, with the server in the place of its store."""
        config = parse_stored_config(record.config)
        if not isinstance(config, RunConfig):
            raise UserError(f"search {record.name} was imported: there is nothing to resume")
        return config.model_copy(update={"store": self.url})

    def _save(self, path: Path, route: str, **asked: Any) -> None:
        given = {name: value for name, value in asked.items() if value is not None}
        content = self._ask("GET", route, params=given).content
        try:
            path.write_bytes(content)
        except OSError as error:
            raise UserError(f"{path}: can't be written: {error.strerror}") from None

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
